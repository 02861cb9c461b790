"""Geometry: shapes, limits and every length formula of the attention layer. Integers only, no torch."""

from .arithmetic import ceil_div, maximum, minimum
from .geometry import Geometry
from .latent import latent_shape
from .pair import GeometryPair, ModelFacts
from .shapes import (
    CORE_MODES,
    DRAFT_MODES,
    DTYPE_BYTES,
    KV_DTYPES,
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
)

__all__ = [
    "CORE_MODES",
    "DRAFT_MODES",
    "DTYPE_BYTES",
    "KV_DTYPES",
    "LAYOUT_FORMS",
    "Q_DTYPES",
    "TARGET_MODES",
    "AttentionShape",
    "DeviceProfile",
    "DraftShape",
    "Extent",
    "Form",
    "Geometry",
    "GeometryPair",
    "Limits",
    "Mode",
    "ModelFacts",
    "ceil_div",
    "latent_shape",
    "maximum",
    "minimum",
]
