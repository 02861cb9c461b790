"""Geometry: shapes, limits and every length formula of the attention layer. Integers only, no torch."""

from .arithmetic import ceil_div, maximum, minimum
from .batch_geometry import BatchGeometry
from .geometry import Geometry
from .shapes import (
    CORE_MODES,
    DRAFT_MODES,
    DTYPE_BYTES,
    LAYOUT_FORMS,
    Q_DTYPES,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Extent,
    Form,
    Limits,
    Mode,
    RowFormat,
)
from .state import StateGeometry
from .state_shapes import STATE_MODES, Gate, Recurrence, StateShape

__all__ = [
    "CORE_MODES",
    "DRAFT_MODES",
    "DTYPE_BYTES",
    "LAYOUT_FORMS",
    "Q_DTYPES",
    "STATE_MODES",
    "TARGET_MODES",
    "AttentionShape",
    "BatchGeometry",
    "DeviceProfile",
    "DraftShape",
    "Extent",
    "Form",
    "Gate",
    "Geometry",
    "Limits",
    "Mode",
    "Recurrence",
    "RowFormat",
    "StateGeometry",
    "StateShape",
    "ceil_div",
    "maximum",
    "minimum",
]
