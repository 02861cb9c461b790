"""Parts that several mutants share: tutorial_parts."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree

from ..mutant import ONLY, Mutant
from .tutorial import Backend, Plugin


class TutorialParts(Backend):
    """Attention of the tutorial's backend (tugboat) in overridable parts. This class has no defect."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.geometry, self.arena = geometry, arena
        self.window = self.shape.window_left

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        """Attend request by request, as the tutorial's backend does."""
        first = 0
        for request, (q_len, tail_len) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows = slice(first, first + q_len)
            first += q_len
            if q_len == 0:
                continue
            prefix = batch.prefix_lens[request].long()
            key = torch.arange(self.width, device=q.device)
            oldest = prefix - self.window if self.window >= 0 else 0
            stored = ((key >= oldest) & (key < prefix + tail_len))[:, None, None]
            k, v = (
                torch.where(stored, self.pages(one, batch.page_table[request]).float(), 0.0).repeat_interleave(
                    self.shape.group_size, dim=1
                )
                for one in (cache.k, cache.v)
            )
            seen = self._visible(batch, request, rows, prefix, tail_len)
            weights = self.weights(self.scores(q[rows].float(), k), seen)
            out[rows] = torch.einsum("hqn,nhd->hqd", weights, v).transpose(0, 1).to(out.dtype)

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        """Return the gathered keys or values of one request, ``[width, kv_heads, head_dim]``."""
        return one[table].flatten(0, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scaled scores, ``[heads, q, width]``."""
        return torch.einsum("qhd,nhd->hqn", q, k) * self.scale

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the softmax over the visible keys, ``[heads, q, width]``."""
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)

    def _visible(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        key, slot = (torch.arange(n, device=prefix.device) for n in (self.width, tail_len))
        q_len = rows.stop - rows.start
        own = slice(tail_len - q_len, tail_len)
        bits, depth = slot <= slot[own, None], slot
        if isinstance(batch.tail, Tree):
            depth = batch.tail.depth[request].long()
            bits = self.tree_bits(batch.tail.mask[rows], slot, depth[own], prefix)
        seen = (key < prefix).repeat(q_len, 1).scatter(1, (prefix + slot).expand(q_len, -1), bits)
        if self.window >= 0:
            position = key.scatter(0, prefix + slot, prefix + depth)
            seen &= self.in_window(batch, rows, (prefix + depth)[own, None], position)
        return seen

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        """Return which new tokens of the request (draft tree or chain) each row sees, bool ``[q, tail]``."""
        return (words[:, slot // 32] >> (slot % 32).int()) & 1 == 1

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        """Return the key positions that lie in the window of each row position, bool ``[q, width]``."""
        return row - key <= self.window


def opens(backend: type[Backend], base: type[Plugin] = Plugin) -> type[Plugin]:
    """Return a plugin class that opens `backend`."""

    def open_backend(self: Plugin, geometry: Geometry, arena: Arena) -> Backend:
        return backend(geometry, arena)

    return type(f"{backend.__name__}Plugin", (base,), {"open_backend": open_backend, "__module__": Plugin.__module__})


def with_parts(name: str, what: str, backend: type[TutorialParts]) -> Mutant:
    return Mutant(name, what, "", layouts=("tutorial",), absent=ONLY, plugin=opens(backend))
