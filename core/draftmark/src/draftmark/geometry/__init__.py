"""Geometry: shapes, limits and every length formula of the attention layer. Integers only, no torch."""

from .arithmetic import ceil_div, maximum, minimum
from .batch_geometry import BatchGeometry
from .geometry import Geometry
from .shapes import (
    CORE_MODES,
    DRAFT_MODES,
    DTYPE_BYTES,
    FP8_DS_MLA,
    LAYOUT_FORMS,
    PLAIN_ROWS,
    Q_DTYPES,
    ROW_FORMATS,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Extent,
    Form,
    Limits,
    Mode,
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
    "FP8_DS_MLA",
    "PLAIN_ROWS",
    "ROW_FORMATS",
    "StateGeometry",
    "StateShape",
    "ceil_div",
    "maximum",
    "minimum",
]
