"""Buffer specifications: sizes are products, and what cannot be allocated is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark.buffers import OWN_ROLES, BufferSpec, Init, Memory, Role, Unit, validate_specs
from draftmark.errors import BufferError
from draftmark.geometry import DTYPE_BYTES

GOOD = BufferSpec("kv_lens", Role.KV_LENS, (3, 4), "int32", Unit.TOKENS, "max_reqs")


def test_bytes_are_the_product_of_the_shape_times_the_element():
    """12 int32 are 48 bytes; a scalar is one element; an empty extent makes none."""
    assert (GOOD.numel, GOOD.nbytes) == (12, 48)
    assert replace(GOOD, shape=()).nbytes == 4
    assert replace(GOOD, shape=(0, 4)).nbytes == 0


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_dtype_bytes_are_torchs(dtype):
    """Every dtype name of the table is a torch dtype of that size."""
    assert getattr(torch, dtype).itemsize == DTYPE_BYTES[dtype]


def test_a_size_past_int32_is_exact():
    """Sizing is Python integers: 8 GiB does not wrap."""
    assert replace(GOOD, shape=(2**20, 2**11)).nbytes == 2**33


def test_good_specs_pass():
    """Distinct names, known dtypes and non-negative extents are accepted, scalars and empties included."""
    validate_specs([])
    validate_specs([GOOD, replace(GOOD, name="b", shape=()), replace(GOOD, name="c", shape=(0,))])


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([GOOD, GOOD], ("'kv_lens'", "declared twice", "unique")),
        ([replace(GOOD, dtype="int33")], ("'kv_lens'", "'int33'", "int32")),
        ([replace(GOOD, dtype="torch.int32")], ("'torch.int32'", "torch dtype's name")),
        ([replace(GOOD, shape=(3, -1))], ("'kv_lens'", "(3, -1)", ">= 0")),
        ([replace(GOOD, shape=(3.0,))], ("'kv_lens'", "(3.0,)", "integers")),
        ([replace(GOOD, shape=(True,))], ("'kv_lens'", "(True,)", "integers")),
        ([replace(GOOD, shape=(None,))], ("'kv_lens'", "(None,)", "integers")),
        ([replace(GOOD, shape=3)], ("'kv_lens'", "3")),
        ([("kv_lens", (3,))], ("BufferSpec", "kv_lens")),
        ([replace(GOOD, dtype=torch.int32)], ("'kv_lens'", "torch.int32")),
    ],
    ids=[
        "name twice",
        "unknown dtype",
        "dtype with a prefix",
        "negative",
        "float",
        "bool",
        "None",
        "shape without a comma",
        "no spec",
        "torch.dtype",
    ],
)
def test_a_malformed_spec_is_refused_by_name(specs, words):
    """Each fault raises BufferError with the buffer's name, what was got, and what is allowed."""
    with pytest.raises(BufferError) as caught:
        validate_specs(specs)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("field", "value"), [("role", "kv_lens"), ("unit", "tokens"), ("memory", "device"), ("init", "zeros")]
)
def test_a_plain_string_where_an_enum_is_meant_is_refused(field, value):
    """`memory="device"` is not `Memory.DEVICE`: it must not silently become host memory, nor "zeros" become garbage."""
    with pytest.raises(BufferError, match=field):
        validate_specs([replace(GOOD, **{field: value})])


def test_own_roles_are_the_ones_whose_need_only_the_plugin_knows():
    """Index roles are the core's to check; schedules, partial results and workspaces are the plugin's."""
    assert {Role.SPLIT_SCHEDULE, Role.PARTIAL_OUT, Role.PARTIAL_LSE, Role.WORKSPACE} == OWN_ROLES


def test_defaults_are_device_memory_that_lives_as_long_as_a_graph():
    """A spec that says nothing else is uninitialised device memory."""
    assert (GOOD.memory, GOOD.init) == (Memory.DEVICE, Init.EMPTY)
