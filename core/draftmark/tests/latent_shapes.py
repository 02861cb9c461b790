"""A latent shape, and a plugin of contract 1.4, for tests of latent layers."""

from __future__ import annotations

import torch

import draftmark
from core.draftmark.tests.bad_calls import Rig
from draftmark import LAYOUT_FORMS, AttentionShape, Form, Geometry, Mode
from draftmark.runtime import KVPool

LATENT = {"num_qo_heads": 5, "num_kv_heads": 1, "head_dim": 12, "value_dim": 8, "latent": True, "softmax_scale": 0.3}


def plugin_with(name, **claims):
    """Return a plugin with the sizes of the reference, and a step path with the arguments of contract 1.4."""
    from draftmark_reference import ReferencePlugin

    class Old:
        def __init__(self, inner):
            self.plan, self.write_metadata, self._inner = inner.plan, inner.write_metadata, inner

        def write_kv(self, k, v, cache, batch):
            assert v is not None
            self._inner.write_kv(k, v, cache, batch)

        def attend(self, q, cache, batch, out):
            self._inner.attend(q, cache, batch, out)

    class Plugin(ReferencePlugin):
        info = draftmark.BackendInfo(name, "any", 4, True, **{"modes": tuple(Mode), "forms": LAYOUT_FORMS} | claims)

        def open_backend(self, geometry, arena):
            return Old(super().open_backend(geometry, arena))

    return Plugin()


class LatentRig(Rig):
    """The rig of `bad_calls`, with a latent layer of 4 query heads on a guarded reference backend."""

    def __init__(self, forms: tuple[Form, ...] = (), backend: str = "reference") -> None:
        super().__init__()
        shape = AttentionShape(4, 1, 12, 4, "float32", "float32", softmax_scale=0.3, value_dim=8, latent=True)
        old = self.geometry
        self.geometry = Geometry.create(shape, old.limits, old.draft, modes=old.modes, forms=forms)
        self.backend = self.loaded.open(self.geometry, "cpu", guard=True)
        self.pool = KVPool(self.geometry, 1, 32, 1, "cpu")
        for one in self.pool.tensors:
            one.zero_()
        self.cache = self.pool.layers[0]
        self.q, self.k, self.v = torch.randn(8, 4, 12), torch.randn(8, 1, 12), None
        self.out = torch.empty(8, 4, 8)
