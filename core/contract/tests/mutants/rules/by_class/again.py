"""More mutants of the classes A to K by the fifth author, planted after the first 24 had been killed."""

from __future__ import annotations

import atexit
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, KVCache

from ...designs import csr_attention
from ...designs.changes import on_cache
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import Mutant, around, standalone
from .batches import CSR, TRITON, TUTORIAL, Invariant


def _stores_again(backend: Any) -> None:
    """Store the newest rows again in attend, in the layer that attends."""
    newest: list[Tensor] = []
    store = backend.write_kv

    def write(original: Any, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        newest[:] = [k, v]
        original(k, v, cache, batch)

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if newest and newest[0].shape[0] == batch.num_rows:
            store(*newest, cache, batch)
        original(q, cache, batch, out)

    around(backend, "write_kv", write)
    around(backend, "attend", attend)


def _at_exit(backend: Any) -> None:
    """Close the backend at the end of the process, and keep it until then."""
    atexit.register(lambda: backend.arena)


class ShortHeads(TutorialParts):
    """Leaves out the elements after the last whole block of 32, if a head has more than 32 elements."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        dim = q.shape[-1] if q.shape[-1] < 32 else q.shape[-1] // 32 * 32
        return super().scores(q[..., :dim], k[..., :dim])


def _last_prompt(backend: Any) -> None:
    """Lose the last row of a prefill of more than 40 requests."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        original(q, cache, batch, out)
        if batch.mode is Mode.EXTEND and batch.num_reqs > 40:
            out[sum(batch.q_lens[: batch.num_reqs]) - 1] = 0

    around(backend, "attend", attend)


class OddPages(TutorialParts):
    """Sums the keys from the last to the first if the first page has an odd number."""

    odd: Tensor

    def _visible(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        self.odd = batch.page_table[request, 0] % 2 == 1
        return super()._visible(batch, request, rows, prefix, tail_len)

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        key = torch.arange(self.width, device=scores.device)
        order = torch.where(self.odd, self.width - 1 - key, key)
        return super().weights(scores[..., order], seen[..., order])[..., order]


def _first_sinks(cache: KVCache) -> KVCache:
    """Leave the sinks of the heads after the 16th out."""
    if cache.sinks is None or len(cache.sinks) <= 16:
        return cache
    head = torch.arange(len(cache.sinks), device=cache.sinks.device)
    return replace(cache, sinks=torch.where(head < 16, cache.sinks, -1e30))


def _second_head(cache: KVCache) -> KVCache:
    """Read the second KV head for every later head of 8-bit KV."""
    if cache.k.element_size() > 1 or cache.k.shape[2] < 3:
        return cache
    head = torch.arange(cache.k.shape[2], device=cache.k.device).clamp(max=1)
    return replace(cache, k=csr_attention.indexable(cache.k)[:, :, head].view(cache.k.dtype))


def _shaped_by(change: Any) -> Any:
    """Return a patch that changes the parameters of one step's kernel: `change` maps (parameters, batch) to fields."""

    def patch(backend: Any) -> None:
        verify = getattr(backend, "_decode_verify", None)
        if verify is None:
            return

        def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            own = verify._shape
            verify._shape = replace(own, **change(backend.geometry.attention, batch))
            original(q, cache, batch, out)
            verify._shape = own

        around(backend, "attend", attend)

    return patch


def _plain_scale(attention: Any, batch: ForwardBatch) -> dict[str, Any]:
    return {"scale": attention.head_dim**-0.5} if batch.mode is Mode.RAGGED_VERIFY else {}


def _no_window(attention: Any, batch: ForwardBatch) -> dict[str, Any]:
    wide = batch.mode is Mode.DRAFT_BLOCK and attention.window_left > 64
    return {"window_left": -1} if wide else {}


MUTANTS = (
    Mutant("OA7", "Stores the newest rows again in attend, in the layer that attends", "layers that share KV",
           patch=_stores_again, **CSR),
    Mutant("OB9", "Registers a function for the end of the process at each open", "a handle that is closed at exit",
           patch=_at_exit, **CSR),
    Mutant("OF8", "Leaves out the last elements of a longer head that is no multiple of 32", "heads of 80 and 112",
           plugin=opens(ShortHeads), **TUTORIAL),
    Mutant("OF9", "Loses the last row of a prefill of more than 40 requests", "a grid of 40 CTAs", patch=_last_prompt,
           **CSR),
    Mutant("OH6", "Sums keys from the end if the first page has an odd number", "two banks of pages",
           plugin=opens(OddPages, Invariant), **TUTORIAL),
    Mutant("OJ7", "Requires unique slots on another thread than the main one", "a lookup by thread",
           **standalone("blind_processes:OJ7", "tutorial")),
    Mutant("OK10", "Leaves out the sinks of heads after the 16th", "64 heads of gpt-oss",
           patch=on_cache(_first_sinks, "attend"), **CSR),
    Mutant("OK13", "Reads the second KV head of e4m3 for every later one", "fp8 with the KV heads of a rank",
           patch=on_cache(_second_head, "attend"), **CSR),
    Mutant("OK11", "Takes the plain scale for ragged verifies", "softmax_scale of a drafter",
           patch=_shaped_by(_plain_scale), **TRITON),
    Mutant("OK12", "Leaves the window out of draft blocks if it has more than 64 keys", "windows of DFlash",
           patch=_shaped_by(_no_window), **TRITON),
)  # fmt: skip
KILLER = {
    "OA7": "random_history.equals_the_oracle",
    "OB9": "process.is_left_as_it_was",
    "OF8": "sizes.may_be_any",
    "OF9": "sizes.may_end_at_any_tile",
    "OH6": "batch_invariance.holds_in_any_batch",
    "OJ7": "supports.answers_alike_elsewhere",
    "OK10": "sinks.take_their_share",
    "OK11": "production.profiles_are_right_together",
    "OK12": "production.a_crowd_is_right",
    "OK13": "production.a_crowd_is_right",
}
