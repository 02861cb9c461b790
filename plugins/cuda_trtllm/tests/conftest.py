"""Fixtures: geometries for an H200, and the plugin with another backend class."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftmark import TARGET_MODES, AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, LoadedBackend
from draftmark_cuda_trtllm import TrtllmPlugin

H200 = DeviceProfile("cuda", 90, 132)


def make_geometry(modes=TARGET_MODES, *, draft=(8, 5, 64), limits=None, device=H200, **attention) -> Geometry:
    """Return a geometry of Llama-3-8B's attention, 256 requests and a context of 131072, with the given changes."""
    shape = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, **attention}
    limits = limits or Limits(256, 131072, 8192, (256,))
    return Geometry.create(AttentionShape(**shape), limits, DraftShape(*draft), device, modes)


@pytest.fixture(scope="session")
def geometry() -> Callable[..., Geometry]:
    return make_geometry


@pytest.fixture(scope="session")
def loaded_with() -> Callable[[type], LoadedBackend]:
    """Return a function that loads the plugin with another backend class: ``loaded_with(cls).bind`` returns a `cls`."""

    def load(backend: type) -> LoadedBackend:
        class Replaced(TrtllmPlugin):
            def open_backend(self, geometry, arena):
                return backend(geometry, arena)

        return LoadedBackend("cuda_trtllm", Replaced())

    return load
