"""Tests of the function that builds a `Geometry` from an engine's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import LAYOUT_FORMS, AttentionShape, DeviceProfile, Mode, load
from draftmark_engines import EngineError, EngineLimits, geometry_for, window_left

SHAPE = AttentionShape(8, 2, 64, 16, "float32", "float32")
LIMITS = EngineLimits(6, 256, 96, num_draft_tokens=5, host_lag=True, row_budgets=(16,))
MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY)


def test_longest_request_is_the_engines() -> None:
    """The geometry addresses no position past max_model_len, so the engine's own page table is wide enough."""
    geometry = geometry_for(load("reference"), SHAPE, LIMITS, DeviceProfile(), MODES, LAYOUT_FORMS)
    assert geometry.max_kv_len == geometry.max_prefix_len == 256
    assert geometry.max_pages_per_req == 16 and geometry.max_rows(Mode.RAGGED_VERIFY) == 16
    assert geometry.extent(Mode.VERIFY).q_len == 5 and geometry.limits.host_lags


def test_ragged_verify_is_dropped_if_undeclared() -> None:
    """If a backend does not declare RAGGED_VERIFY, the geometry has the engine's other modes."""
    backend = load("reference")
    backend.info = replace(backend.info, modes=(Mode.EXTEND, Mode.DECODE, Mode.VERIFY))
    geometry = geometry_for(backend, SHAPE, LIMITS, DeviceProfile(), MODES, ())
    assert Mode.RAGGED_VERIFY not in geometry.modes and geometry.limits.row_budgets == ()


def test_refusal_has_the_backends_reason() -> None:
    """If the backend refuses a geometry, the error has the backend's reason."""
    with pytest.raises(EngineError, match=r"reference.*float8_e4m3fn is not served"):
        geometry_for(
            load("reference"), replace(SHAPE, kv_dtype="float8_e4m3fn"), LIMITS, DeviceProfile(), MODES, LAYOUT_FORMS
        )


def test_a_number_out_of_range_is_named() -> None:
    """If an engine's number is out of range, the error names the field."""
    with pytest.raises(EngineError, match="page_size"):
        geometry_for(load("reference"), replace(SHAPE, page_size=0), LIMITS, DeviceProfile(), MODES, ())


@pytest.mark.parametrize(("window", "left"), [(None, -1), (0, -1), (-1, -1), (1, 0), (4096, 4095)])
def test_a_window_counts_the_row_itself(window: int | None, left: int) -> None:
    """A model's window of n tokens includes the row itself, so a row sees n - 1 positions to its left."""
    assert window_left(window) == left
