"""Layers that are refused, buffers, and the list of compiled kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from draftmark import DeviceProfile, DraftShape, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape, load
from draftmark_cuda_triton.state import sizing
from draftmark_cuda_triton.state.kernel_list import state_calls_of

QWEN = StateShape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128, 8192, 4, "bfloat16")
HOPPER = DeviceProfile("cuda", 90, 132)
LIMITS = Limits(64, 8192, 4096, state_interval=64)


def geometry_of(shape=QWEN, nodes=8, device=HOPPER, limits=LIMITS, **more) -> StateGeometry:
    """Return a geometry of Qwen3-Next's layers on an H200."""
    return StateGeometry.create(shape, limits, DraftShape(2, 3, nodes), device, **more)


@pytest.mark.parametrize(
    ("geometry", "named"),
    [
        (geometry_of(replace(QWEN, dtype="float64")), "dtype float64"),
        (geometry_of(replace(QWEN, state_dtype="float64")), "state_dtype float64"),
        (geometry_of(replace(QWEN, conv_dtype="float64")), "conv_dtype float64"),
        (geometry_of(replace(QWEN, key_dim=512)), "key_dim 512"),
        (geometry_of(replace(QWEN, conv_kernel=17)), "conv_kernel 17"),
        (geometry_of(nodes=257), "num_draft_tokens 257"),
        (geometry_of(device=DeviceProfile("cuda", 75, 40)), "sm_75"),
        (geometry_of(device=DeviceProfile("npu", 0, 20)), "device kind npu"),
    ],
)
def test_refusals_name_the_field_and_the_value(geometry, named):
    """A layer that no kernel serves is refused with the field and its value."""
    (reason,) = load("cuda_triton").state_supports(geometry)
    assert named in reason


@pytest.mark.parametrize("recurrence", list(Recurrence))
@pytest.mark.parametrize("nodes", [1, 64, 256])
def test_each_recurrence_is_served(recurrence, nodes):
    """Every recurrence is served with up to 256 rows."""
    none = {"num_heads": 0, "num_key_heads": 0, "key_dim": 0, "value_dim": 0}
    shape = replace(QWEN, recurrence=recurrence, **(none if recurrence is Recurrence.NONE else {}))
    assert load("cuda_triton").state_supports(geometry_of(shape, nodes)) == []


def test_records_have_a_key_an_update_and_a_decay_of_each_row():
    """64 requests of 64 rows in 36 layers need 5.2 GB, where a state of each row needs 309 GB."""
    whole = {one.name: one.nbytes for one in sizing.state_buffers(geometry_of(nodes=64, num_layers=36))}
    rows = 36 * 64 * 64
    assert whole["keys"] == rows * 16 * 128 * 2
    assert whole["updates"] == rows * 32 * 128 * 4
    assert whole["decays"] == rows * 32 * 4
    assert whole["channels"] == rows * 8192 * 2
    assert sum(whole.values()) < 5.6e9


def test_a_geometry_without_a_verify_keeps_no_rows():
    """Records have no entry if no mode verifies."""
    specs = sizing.state_buffers(geometry_of(modes=(Mode.EXTEND, Mode.DECODE)))
    assert all(one.numel == 0 for one in specs if one.name in ("keys", "updates", "decays", "channels", "matrices"))


@pytest.mark.parametrize("nodes", [8, 64])
def test_the_list_of_kernels_is_short(nodes):
    """A geometry has one kernel of each kind, the convolutions for weights of two dtypes, and those of a prompt."""
    names = Counter(one.kernel.__name__ for one in state_calls_of(geometry_of(nodes=nodes)))
    found = {name: count for name, count in names.items() if name in KINDS}
    assert found == KINDS
    assert sum(names.values()) <= sum(KINDS.values()) + 8


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {"recur_verify", "commit_rows"}),
        ({"gate": Gate.KEY}, {"recur_verify", "commit_rows"}),
        ({"state_dtype": "bfloat16"}, {"recur_verify", "commit_rows"}),
        ({"dtype": "float32"}, {"commit_rows"}),
        ({"key_dim": 96}, set()),
        ({"value_dim": 40}, set()),
    ],
)
def test_hopper_has_kernels_for_tiles_without_padding(change, found):
    """On sm_90, verifies of bfloat16 rows and commits run in `kernels_sm90` if no tile is padded."""
    shape = replace(QWEN, **change)
    names = {
        one.kernel.__name__ for one in state_calls_of(geometry_of(shape)) if "kernels_sm90" in one.kernel.__module__
    }
    assert names == found
    older = state_calls_of(geometry_of(shape, device=DeviceProfile("cuda", 80, 108)))
    assert not [one for one in older if "kernels_sm90" in one.kernel.__module__]


KINDS = {
    "convolve_one": 2,
    "convolve_rows": 4,
    "recur_rows": 2,
    "verify_pairs": 1,
    "recur_verify": 1,
    "commit_rows": 2,
}
"""Kernels of every mode, by name; `recur_rows` runs decodes and, row by row, prompts of 16 bits."""


def test_kernels_do_not_depend_on_what_varies_in_traffic():
    """Other numbers of requests, rows, layers and slots launch the same compiled kernels."""
    some = set(state_calls_of(geometry_of(nodes=9)))
    more = replace(LIMITS, max_num_reqs=17, max_context_len=70_000, state_interval=3)
    assert set(state_calls_of(geometry_of(nodes=13, limits=more, num_layers=7))) == some


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("gate", [Gate.HEAD, Gate.KEY])
@pytest.mark.parametrize("nodes", [8, 64])
def test_kernels_compile_without_a_gpu(arch, gate, nodes):
    """Every kernel compiles to machine code, and fits an SM's shared memory."""
    shape = replace(QWEN, gate=gate)
    most = 227 * 1024 if arch == 90 else 163 * 1024
    for spec in state_calls_of(geometry_of(shape, nodes), arch):
        compiled = spec.compile()
        assert compiled.asm["cubin"].startswith(b"\x7fELF") and compiled.metadata.shared <= most, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("recurrence", "gate"),
    [(Recurrence.DELTA, Gate.HEAD), (Recurrence.DELTA, Gate.KEY), (Recurrence.DECAY, Gate.HEAD)],
)
def test_every_pair_of_dtypes_compiles_for_hopper(recurrence, gate, dtype, state_dtype):
    """Verifies and commits compile for rows of one dtype and states of another."""
    shape = replace(
        QWEN, recurrence=recurrence, gate=gate, dtype=dtype, state_dtype=state_dtype, conv_dtype=state_dtype
    )
    for spec in state_calls_of(geometry_of(shape)):
        if spec.kernel.__name__ in ("verify_pairs", "recur_verify", "commit_rows"):
            assert spec.compile().asm["cubin"].startswith(b"\x7fELF"), spec.name
