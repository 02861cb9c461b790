"""Validation of a state geometry's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import GeometryError
from .checks import at_least, check_batch_fields, check_bool, check_dtype
from .shapes import Mode
from .state_shapes import STATE_MODES, Gate, Recurrence, StateShape

if TYPE_CHECKING:
    from .batch_geometry import BatchGeometry

STATE_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of activations, states and windows."""


def check_state_geometry(geometry: BatchGeometry, shape: StateShape, num_layers: int) -> None:
    """Raise `GeometryError` for the first field of a state layer's geometry that is out of range."""
    if not isinstance(shape, StateShape):
        raise GeometryError("state", shape, "it must be an instance of StateShape", "write StateShape(…)")
    check_state_shape(shape)
    check_batch_fields(geometry)
    wrong: Mode | None = next((mode for mode in geometry.modes if mode not in STATE_MODES), None)
    if wrong is not None:
        limit = f"a layer with state serves {', '.join(mode.value for mode in STATE_MODES)}"
        raise GeometryError("modes", wrong.value, limit, "remove the mode; draft models with state are not served")
    _check_interval(geometry)
    at_least("num_layers", num_layers, 1, "count the layers of this shape on this rank")


def _check_interval(geometry: BatchGeometry) -> None:
    """Refuse an interval that the rounds in flight could cross twice: a request has one spare slot."""
    interval, rounds = geometry.limits.state_interval, 2 if geometry.limits.host_lags else 1
    least = rounds * geometry.draft.num_draft_tokens
    if 0 < interval < least and rounds > 1:
        limit = f"two rounds in flight commit up to {least} tokens, and a request has one spare slot"
        raise GeometryError("limits.state_interval", interval, limit, f"use {least} or more, or 0")


def check_state_shape(shape: StateShape) -> None:
    """Raise `GeometryError` for the first field of a `StateShape` that is out of range."""
    for name, kind in (("recurrence", Recurrence), ("gate", Gate)):
        value = getattr(shape, name)
        if not isinstance(value, kind):
            names = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
            raise GeometryError(f"state.{name}", value, f"it must be one of {names}", f"write {kind.__name__}.…")
    none = shape.recurrence is Recurrence.NONE
    for name in ("num_heads", "num_key_heads", "key_dim", "value_dim"):
        value = getattr(shape, name)
        at_least(f"state.{name}", value, 0 if none else 1, f"set the model's {name}, per rank")
        if none and value:
            remedy = "write 0, or set the recurrence"
            raise GeometryError(f"state.{name}", value, "a layer without recurrence has 0", remedy)
    if not none and shape.num_heads % shape.num_key_heads:
        limit = f"it must be a multiple of num_key_heads = {shape.num_key_heads}"
        remedy = "take both numbers from one model, per tensor-parallel rank"
        raise GeometryError("state.num_heads", shape.num_heads, limit, remedy)
    _check_convolution(shape, needed=none)
    for name in ("dtype", "state_dtype", "conv_dtype"):
        check_dtype(f"state.{name}", getattr(shape, name), STATE_DTYPES)
    check_bool("state.conv_silu", shape.conv_silu, "use False for LFM2")
    remedy = "use True for the precision of the engines' own prompt kernels"
    check_bool("state.round_prompts", shape.round_prompts, remedy)


def _check_convolution(shape: StateShape, needed: bool) -> None:
    """Require channels and taps together; a layer without recurrence needs both."""
    remedy = "take both from the model, or write 0 for both"
    at_least("state.conv_kernel", shape.conv_kernel, 2 if needed else 0, remedy)
    at_least("state.conv_channels", shape.conv_channels, 1 if shape.conv_kernel else 0, remedy)
    if shape.conv_kernel == 1 or (shape.conv_channels and not shape.conv_kernel):
        limit = f"{shape.conv_channels} channels need 2 taps or more"
        raise GeometryError("state.conv_kernel", shape.conv_kernel, limit, remedy)
