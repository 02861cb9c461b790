"""Which backend serves an engine: the one that its user names, or the default of its device."""

from __future__ import annotations

from draftmark import BackendLoadError, LoadedBackend, available, load

from .errors import EngineError

DEFAULTS = {"cuda": "cuda_triton", "npu": "ascend_npu", "cpu": "reference"}
"""By torch's device type."""
PACKAGES = {
    "ascend_npu": "draftmark-ascend-npu",
    "cuda_flashinfer": "draftmark-cuda-flashinfer",
    "cuda_triton": "draftmark-cuda-triton",
    "cuda_trtllm": "draftmark-cuda-trtllm",
}
"""Backends of draftmark's own that are packages of their own."""


def choose(named: object, device: str) -> LoadedBackend:
    """Load the backend that serves.

    Args:
        named: what the engine's configuration says; None for the default of the device.
        device: torch's device type, e.g. ``"cuda"``.

    Raises:
        EngineError: there is no such backend, its plugin is not installed or does not load, it runs on another device,
            or the device has no default.
    """
    if named is None:
        named = DEFAULTS.get(device)
        if named is None:
            raise EngineError(f"device {device} has no default backend; name one of those installed: {_installed()}")
    if not isinstance(named, str) or not named:
        raise EngineError(f"the backend is {named!r}, but it is a name; give one of those installed: {_installed()}")
    if named not in {one.name for one in available()}:
        if named in PACKAGES:
            raise EngineError(f"backend {named} is not installed; pip install {PACKAGES[named]}")
        raise EngineError(f"there is no backend {named!r}; give one of those installed: {_installed()}")
    try:
        backend = load(named)
        backend.require_runtime(device)
    except BackendLoadError as error:
        raise EngineError(str(error)) from error
    return backend


def _installed() -> str:
    return ", ".join(dict.fromkeys(one.name for one in available())) or "none"
