"""Geometry: every length formula of the attention layer, written once. Integers only, no torch."""

from .arithmetic import ceil_div, maximum, minimum
from .geometry import Geometry, GeometryPair
from .shapes import (
    DRAFT_MODES,
    DTYPE_BYTES,
    KV_DTYPES,
    Q_DTYPES,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Extent,
    Limits,
    Mode,
)

__all__ = [
    "DRAFT_MODES",
    "DTYPE_BYTES",
    "KV_DTYPES",
    "Q_DTYPES",
    "TARGET_MODES",
    "AttentionShape",
    "DeviceProfile",
    "DraftShape",
    "Extent",
    "Geometry",
    "GeometryPair",
    "Limits",
    "Mode",
    "ceil_div",
    "maximum",
    "minimum",
]
