"""Attention backends for LLM engines that decode speculatively: geometry, buffer sizes, plugin class and registry.

This module and `draftmark.runtime` are the public API; every other module is internal and may change in any release.
The objects of this module contain only integers and text, and do not import torch. `draftmark.runtime` has the names
that use tensors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors, geometry
from .errors import *
from .geometry import *
from .version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

if TYPE_CHECKING:
    from .backend_info import BackendInfo
    from .buffers import BufferSpec
    from .hookspecs import hookimpl
    from .kernels import BatchSize, KernelChoice, Progress, WarmedKernels, cache_folder, prepares_kernels
    from .loaded import LoadedBackend
    from .plugin import BackendPlugin
    from .registry import Available, available, load
    from .requirements import HostLengthsNeed, Requirements

_HOMES = {
    "backend_info": ("BackendInfo",),
    "buffers": ("BufferSpec",),
    "hookspecs": ("hookimpl",),
    "kernels": ("BatchSize", "KernelChoice", "Progress", "WarmedKernels", "cache_folder", "prepares_kernels"),
    "loaded": ("LoadedBackend",),
    "plugin": ("BackendPlugin",),
    "registry": ("Available", "available", "load"),
    "requirements": ("HostLengthsNeed", "Requirements"),
}


def __getattr__(name: str) -> Any:
    # Importing pluggy and importlib.metadata takes longer than the rest of this package, so names are resolved lazily.
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'draftmark' has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


__all__ = [
    *errors.__all__,
    *geometry.__all__,
    "CONTRACT_MAJOR",
    "CONTRACT_MINOR",
    "Available",
    "BackendInfo",
    "BackendPlugin",
    "BatchSize",
    "BufferSpec",
    "HostLengthsNeed",
    "KernelChoice",
    "LoadedBackend",
    "Progress",
    "Requirements",
    "WarmedKernels",
    "__version__",
    "available",
    "cache_folder",
    "hookimpl",
    "load",
    "prepares_kernels",
]
