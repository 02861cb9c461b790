"""Mutants OH…, by an author who had not read the checks: a row's bits depend on the other requests of the batch.

Every output is right within rounding, and every plugin declares `BackendInfo.batch_invariant`. Their source is public:
kernels chosen by batch size, and split-KV bounds that depend on all requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.runtime import KVCache

from .mutant import ONLY, Mutant, around
from .state_and_order import plugin
from .tutorial import Backend, Plugin

MANY = 32
"""Largest padded batch that runs the kernel of small batches."""


class SplitByTotal(Backend):
    """Splits each request's keys in chunks of a quarter of the batch's keys, and merges the chunks by their lse."""

    chunk = 16

    def plan(self, batch: ForwardBatch) -> None:
        """Choose the chunk from the sum of the host's length bounds."""
        total = sum(batch.host.upper_bound()) + sum(batch.tail_lens)
        self.chunk = max(16, total // 4)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention of one request at a time, in chunks of its keys."""
        first = 0
        for request, (q_len, tail_len) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows = slice(first, first + q_len)
            first += q_len
            if q_len:
                out[rows] = self._merged(q[rows].float(), cache, batch, request, rows, tail_len).to(out.dtype)

    def _merged(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, request: int, rows: slice, tail_len: int
    ) -> torch.Tensor:
        """Return the output ``[q, heads, head_dim]`` of one request, merged from its chunks."""
        prefix, table = batch.prefix_lens[request].long(), batch.page_table[request]
        stored = (torch.arange(self.width, device=q.device) < prefix + tail_len)[:, None, None]
        k, v = (torch.where(stored, one[table].flatten(0, 1).float(), 0.0) for one in (cache.k, cache.v))
        k, v = (one.repeat_interleave(self.shape.group_size, dim=1) for one in (k, v))
        seen = self._visible(batch, request, rows, prefix, tail_len)
        scores = (torch.einsum("qhd,nhd->hqn", q, k) * self.scale).masked_fill(~seen, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        mass, total = torch.zeros_like(q), torch.zeros_like(top)
        for part, values in zip(scores.split(self.chunk, -1), v.split(self.chunk, 0), strict=True):
            weights = (part - top).exp()
            mass = mass + torch.einsum("hqn,nhd->qhd", weights, values)
            total = total + weights.sum(-1, keepdim=True)
        return mass / total.permute(1, 0, 2)


class OtherKernelForMany(SplitByTotal):
    """Runs another kernel, which merges chunks of 64 keys, for batches padded to more than 32 requests."""

    chunk = 64

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: the chunk is fixed."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention with the kernel for the padded batch size."""
        kernel = SplitByTotal if batch.padded_reqs > MANY else Backend
        kernel.attend(self, q, cache, batch, out)


def _tiles_by_requests(backend: Any) -> None:
    """Halve the key tile of batches with more than four requests, so that more programs fit on the device."""

    def choose(original: Any, extent: Any) -> Any:
        config, splits = original(extent)
        if extent.num_reqs > 4 and config.block_n > 64:
            config = replace(config, block_n=config.block_n // 2)
        return config, splits

    around(backend._decode_verify, "choose_splits", choose)


def declared(backend: type[Backend]) -> type[Plugin]:
    """Return the tutorial's plugin with this backend; it declares batch invariance."""
    return type("Plugin", (plugin(backend),), {"info": replace(Plugin.info, batch_invariant=True)})


MUTANTS = (
    Mutant("OH1", "Runs another kernel for batches padded to more than 32 requests", "pegainfer#613",
           plugin=declared(OtherKernelForMany), layouts=("tutorial",), absent=ONLY),
    Mutant("OH2", "Splits keys by the sum of the lengths of the batch", "flash-attention#1897",
           plugin=declared(SplitByTotal), layouts=("tutorial",), absent=ONLY),
    Mutant("OH3", "Chooses the key tile by the number of requests", "FlashMLA#212",
           patch=_tiles_by_requests, layouts=("cuda_triton",), absent="a plan of cuda_triton's host code"),
)  # fmt: skip

KILLER = dict.fromkeys(("OH1", "OH2", "OH3"), "batch_invariance.holds_in_any_batch")
"""Check that must kill each mutant."""
