"""Buffer specifications: sizes are products, and an invalid specification raises an error with the buffer's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark.buffers import BufferSpec, validate_specs
from draftmark.errors import BufferError
from draftmark.geometry import DTYPE_BYTES

GOOD = BufferSpec("kv_lens", (3, 4), "int32", "max_reqs")


def test_bytes_are_shape_times_element_size():
    """12 int32 have 48 bytes; a scalar is one element; an empty extent gives 0 bytes."""
    assert (GOOD.numel, GOOD.nbytes) == (12, 48)
    assert replace(GOOD, shape=()).nbytes == 4
    assert replace(GOOD, shape=(0, 4)).nbytes == 0


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_dtype_bytes_are_torchs(dtype):
    """Each name in the table of dtypes is a torch dtype, and the table has its element size."""
    assert getattr(torch, dtype).itemsize == DTYPE_BYTES[dtype]


def test_a_size_past_int32_is_exact():
    """Sizes are Python integers: 8 GiB does not overflow."""
    assert replace(GOOD, shape=(2**20, 2**11)).nbytes == 2**33


def test_good_specs_pass():
    """Distinct names, known dtypes and non-negative extents are accepted, scalars and empty shapes included."""
    validate_specs([])
    validate_specs([GOOD, replace(GOOD, name="b", shape=()), replace(GOOD, name="c", shape=(0,))])


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([GOOD, GOOD], ("'kv_lens'", "declared twice", "unique")),
        ([replace(GOOD, dtype="int33")], ("'kv_lens'", "'int33'", "int32")),
        ([replace(GOOD, dtype="torch.int32")], ("'torch.int32'", "torch dtype name")),
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
    """Each fault raises BufferError with the buffer's name, the value, and the allowed values."""
    with pytest.raises(BufferError) as caught:
        validate_specs(specs)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(("field", "value"), [("pinned", "no"), ("zeros", 1)])
def test_a_flag_that_is_no_bool_is_refused(field, value):
    """`pinned="no"` must not silently select pinned memory."""
    with pytest.raises(BufferError, match=field):
        validate_specs([replace(GOOD, **{field: value})])


def test_the_default_is_uninitialized_device_memory():
    """A specification without flags is uninitialized device memory."""
    assert not GOOD.pinned and not GOOD.zeros
