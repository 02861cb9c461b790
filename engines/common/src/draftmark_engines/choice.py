"""Loader of the attention backend for an engine: the backend that the user names, or the device's default."""

from __future__ import annotations

from draftmark import BackendLoadError, LoadedBackend, available, load

from .errors import EngineError

DEFAULTS = {"cuda": "cuda_triton", "npu": "ascend_npu", "cpu": "reference"}
"""Default backends by torch's device type."""
PACKAGES = {
    "ascend_npu": "draftmark-ascend-npu",
    "cuda_flashinfer": "draftmark-cuda-flashinfer",
    "cuda_triton": "draftmark-cuda-triton",
    "cuda_trtllm": "draftmark-cuda-trtllm",
}
"""Packages of draftmark's backends that are installed separately, by backend name."""


def choose(named: object, device: str) -> LoadedBackend:
    """Load the backend that the user names, or the device's default.

    Args:
        named: value from the engine's configuration; None for the device's default.
        device: torch's device type, e.g. ``"cuda"``.

    Raises:
        EngineError: the backend is unknown, not installed, does not load or runs on another device; or the device has
            no default.
    """
    if named is None:
        named = DEFAULTS.get(device)
        if named is None:
            raise EngineError(f"device {device} has no default backend; name an installed backend: {_installed()}")
    if not isinstance(named, str) or not named:
        raise EngineError(f"backend {named!r} is not a name; give an installed backend: {_installed()}")
    if named not in {one.name for one in available()}:
        if named in PACKAGES:
            raise EngineError(f"backend {named} is not installed; pip install {PACKAGES[named]}")
        raise EngineError(f"backend {named!r} does not exist; give an installed backend: {_installed()}")
    try:
        backend = load(named)
        backend.require_runtime(device)
    except BackendLoadError as error:
        raise EngineError(str(error)) from error
    return backend


def _installed() -> str:
    return ", ".join(dict.fromkeys(one.name for one in available())) or "none"
