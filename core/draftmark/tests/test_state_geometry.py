"""Tests of the shapes and byte formulas of recurrent state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import (
    AttentionShape,
    BatchGeometry,
    DraftShape,
    Gate,
    Geometry,
    GeometryError,
    Limits,
    Mode,
    Recurrence,
    StateGeometry,
    StateShape,
)

GDN = StateShape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128, 8192, 4, "bfloat16")
LIMITS = Limits(64, 4096, capture_batch_sizes=(8, 100), row_budgets=(64, 8))


def create(shape: StateShape = GDN, **changes) -> StateGeometry:
    """Return a geometry with 36 layers and trees of 8 rows."""
    arguments = {"limits": LIMITS, "draft": DraftShape(2, 4, 8), "num_layers": 36} | changes
    return StateGeometry.create(shape, **arguments)


def test_bytes_of_a_slot_and_a_record() -> None:
    """One layer of Qwen3-Next stores 2 MiB of state and 48 KiB of window; replay keeps 12.25 KiB and 16 KiB per row."""
    g = create()
    assert (g.window, g.state_numel, g.conv_numel) == (3, 32 * 128 * 128, 8192 * 3)
    assert (g.state_bytes, g.conv_bytes, g.slot_bytes) == (2 << 20, 48 << 10, (2 << 20) + (48 << 10))
    assert (g.record_bytes, g.channel_bytes) == ((32 * 128 + 16 * 128) * 2 + 32 * 8, 8192 * 2)


def test_dtypes_change_the_bytes() -> None:
    """States, windows, records and gates follow their own dtypes."""
    g = create(replace(GDN, dtype="float64", state_dtype="bfloat16", conv_dtype="float32"))
    assert (g.state_bytes, g.conv_bytes, g.channel_bytes) == (1 << 20, 96 << 10, 32 << 10)
    assert g.record_bytes == (32 + 16) * 128 * 8 + 2 * 32 * 8
    assert (g.state.compute_dtype, GDN.compute_dtype) == ("float64", "float32")


@pytest.mark.parametrize(
    ("recurrence", "gate", "extra"),
    [
        (Recurrence.DELTA, Gate.KEY, 32 * 128 * 4 + 32 * 4),
        (Recurrence.DECAY, Gate.HEAD, 32 * 4),
        (Recurrence.DECAY, Gate.CONSTANT, 0),
    ],
)
def test_records_store_only_gates_that_differ(recurrence, gate, extra) -> None:
    """A constant decay and a write strength of 1 take no bytes of a record."""
    g = create(replace(GDN, recurrence=recurrence, gate=gate))
    assert g.record_bytes == (32 + 16) * 128 * 2 + extra


def test_convolution_alone_and_recurrence_alone() -> None:
    """A layer without recurrence has no state, one without convolution no window."""
    conv = create(StateShape(Recurrence.NONE, Gate.HEAD, 0, 0, 0, 0, 2048, 3, "bfloat16"))
    assert (conv.state_bytes, conv.slot_bytes, conv.record_bytes, conv.state.heads_per_key) == (0, 2048 * 2 * 2, 0, 1)
    assert create(replace(GDN, conv_channels=0, conv_kernel=0)).slot_bytes == 2 << 20


def test_batch_formulas_are_those_of_attention() -> None:
    """Both geometries of a hybrid model have the same page-free properties, from one base."""
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY)
    state = create(modes=modes)
    other = Geometry.create(AttentionShape(4, 2, 64, 16), LIMITS, DraftShape(2, 4, 8), modes=modes)
    names = [name for name, value in vars(BatchGeometry).items() if isinstance(value, property)]
    assert {"max_tail", "max_reqs", "mask_words", "max_rows_any"} <= set(names)
    assert {name: getattr(state, name) for name in names} == {name: getattr(other, name) for name in names}
    assert state.limits == other.limits and state.limits.row_budgets == (8, 64)
    assert (state.null_slots(), state.null_slots(unique=True)) == (1, 100)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recurrence": "delta2"}, "state.recurrence"),
        ({"gate": "head2"}, "state.gate"),
        ({"num_heads": 0}, "state.num_heads"),
        ({"num_heads": 31}, "state.num_heads"),
        ({"num_key_heads": True}, "state.num_key_heads"),
        ({"key_dim": 0}, "state.key_dim"),
        ({"value_dim": -1}, "state.value_dim"),
        ({"conv_kernel": 0}, "state.conv_kernel"),
        ({"conv_kernel": 1}, "state.conv_kernel"),
        ({"conv_channels": 0}, "state.conv_channels"),
        ({"dtype": "bf16"}, "state.dtype"),
        ({"state_dtype": "int8"}, "state.state_dtype"),
        ({"conv_dtype": "float8_e4m3fn"}, "state.conv_dtype"),
        ({"conv_silu": 1}, "state.conv_silu"),
        ({"recurrence": Recurrence.NONE}, "state.num_heads"),
    ],
)
def test_wrong_shapes_are_refused_by_field(changes, field) -> None:
    """Each wrong field raises an error that names it."""
    with pytest.raises(GeometryError) as caught:
        create(replace(GDN, **changes))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"modes": (Mode.DRAFT,)}, "modes"),
        ({"modes": (Mode.VERIFY, Mode.DRAFT_EXTEND)}, "modes"),
        ({"limits": replace(LIMITS, state_interval=-1)}, "limits.state_interval"),
        ({"limits": replace(LIMITS, state_interval=8, overlap=True)}, "limits.state_interval"),
        ({"draft": DraftShape(0)}, "draft.topk"),
    ],
)
def test_wrong_geometries_are_refused_by_field(changes, field) -> None:
    """Modes of a draft model, and intervals that two rounds in flight would cross twice, are refused."""
    with pytest.raises(GeometryError) as caught:
        create(**changes)
    assert caught.value.field == field


def test_no_shape_is_no_state_shape() -> None:
    """An object of another class is refused."""
    with pytest.raises(GeometryError, match="StateShape"):
        create(None)  # type: ignore[arg-type]
