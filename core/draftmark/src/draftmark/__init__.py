"""draftmark: hardware-abstraction plugins for the attention layer of engines that decode speculatively.

The names here need no torch: a geometry, its buffers, the hooks and the registry. The torch side lives in
`draftmark.arena`, `.batch`, `.lengths`, `.cache`, `.graphs`, `.backend`, and the decoding loop in
`draftmark_speculative`.
"""

from typing import TYPE_CHECKING, Any

from .errors import DraftmarkError
from .geometry import (
    DRAFT_MODES,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Extent,
    Geometry,
    GeometryPair,
    Limits,
    Mode,
    ceil_div,
    maximum,
    minimum,
)
from .version import __version__

if TYPE_CHECKING:
    from .buffers import BufferSpec, Init, Lifetime, Memory, Role, Unit
    from .hookspecs import BackendInfo, hookimpl
    from .loaded import LoadedBackend
    from .metadata import HostLengthsNeed, Layout, LengthConvention, Level, MetadataSpec
    from .registry import available, load

_HOMES = {
    "BufferSpec": "buffers",
    "Role": "buffers",
    "Unit": "buffers",
    "Memory": "buffers",
    "Init": "buffers",
    "Lifetime": "buffers",
    "BackendInfo": "hookspecs",
    "hookimpl": "hookspecs",
    "LoadedBackend": "loaded",
    "HostLengthsNeed": "metadata",
    "Layout": "metadata",
    "LengthConvention": "metadata",
    "Level": "metadata",
    "MetadataSpec": "metadata",
    "available": "registry",
    "load": "registry",
}


def __getattr__(name: str) -> Any:
    # pluggy and importlib.metadata cost more than the rest of this package: they are paid when first used.
    if name not in _HOMES:
        raise AttributeError(f"module 'draftmark' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


__all__ = [
    "DRAFT_MODES",
    "TARGET_MODES",
    "AttentionShape",
    "LoadedBackend",
    "BackendInfo",
    "BufferSpec",
    "DeviceProfile",
    "DraftShape",
    "DraftmarkError",
    "Extent",
    "Geometry",
    "GeometryPair",
    "HostLengthsNeed",
    "Init",
    "Layout",
    "LengthConvention",
    "Level",
    "Lifetime",
    "Limits",
    "Memory",
    "MetadataSpec",
    "Mode",
    "Role",
    "Unit",
    "__version__",
    "available",
    "ceil_div",
    "hookimpl",
    "load",
    "maximum",
    "minimum",
]
