"""Mutants that the checks of `batch_invariance` kill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import CORE_MODES, Mode
from draftmark.runtime import ForwardBatch, KVCache, is_recording

from ..designs.plain_attention import Parts, attend_plainly
from ..designs.tutorial import Backend, Plugin
from ..designs.tutorial_plans import plugin
from ..mutant import ONLY, Mutant, around

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


def _around_splits(backend: Any, choose: Callable[..., Any]) -> None:
    """Replace the choice of tiles and splits; a backend that serves prefills only has none."""
    if set(backend.geometry.modes) != {Mode.EXTEND}:
        around(backend._decode_verify, "choose_splits", choose)


def _tiles_by_requests(backend: Any) -> None:
    """Halve the key tile of batches with more than four requests, so that more programs fit on the device."""

    def choose(original: Any, extent: Any) -> Any:
        config, splits = original(extent)
        if extent.num_reqs > 4 and config.block_n > 64:
            config = replace(config, block_n=config.block_n // 2)
        return config, splits

    _around_splits(backend, choose)


def _tiles_of_long_contexts(backend: Any) -> None:
    """Halve the key tile of batches of several requests in geometries with contexts of 3,000 tokens and more."""

    def choose(original: Any, extent: Any) -> Any:
        config, splits = original(extent)
        if extent.num_reqs > 1 and backend.geometry.limits.max_context_len >= LONG and config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        return config, splits

    _around_splits(backend, choose)


def declared(backend: type[Backend]) -> type[Plugin]:
    """Return the tutorial's plugin with this backend; it declares batch invariance."""
    return type("Plugin", (plugin(backend),), {"info": replace(Plugin.info, batch_invariant=True)})


LONG = 3000
"""Number of keys from which a batch's other requests decide how long requests are split."""
SPLIT = 64
"""Number of keys in a part, where the number of parts is not fixed."""


def _summed_in(parts: int) -> Parts:
    """Return the parts of an attention that sums the values of `parts` equal ranges of keys, and adds the sums."""

    def values(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        pairs = zip(weights.chunk(parts, -1), v.chunk(parts, 1), strict=True)
        return sum(torch.einsum("rhqk,rkhd->rqhd", *pair) for pair in pairs)  # type: ignore[return-value]

    return Parts(values=values)


def _splitting(parts_of: Callable[[Any, ForwardBatch], Iterable[int]]) -> Callable[[Any], None]:
    """Return a patch that sums each request's values in parts.

    Args:
        parts_of: (backend, batch) → number of parts of each request; 0 leaves the right kernel's output.
    """

    def patch(backend: Any) -> None:
        def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            original(q, cache, batch, out)
            if batch.mode not in CORE_MODES:
                return
            first, shape = 0, getattr(backend, "shape", None) or backend.geometry.attention
            others: dict[int, Tensor] = {}
            for n, parts in zip(batch.q_lens, parts_of(backend, batch), strict=True):
                if n and parts:
                    if parts not in others:
                        others[parts] = torch.empty_like(out)
                        attend_plainly(shape, _summed_in(parts), q, cache, batch, others[parts])
                    out[first : first + n] = others[parts][first : first + n]
                first += n

        around(backend, "attend", call)

    return patch


def _by_batch(parts: Callable[[ForwardBatch], int]) -> Callable[[Any], None]:
    return _splitting(lambda backend, batch: (parts(batch),) * batch.padded_reqs)


def _bounds(batch: ForwardBatch) -> tuple[int, ...]:
    return (*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs))


def _even_shares(batch: ForwardBatch) -> list[int]:
    """Return parts as a schedule cuts them that gives each of four programs an equal share of all requests' keys."""
    share = max(1, -(-sum(_bounds(batch)) // 4))
    return [1 + bound // share for bound in _bounds(batch)]


def _shared_first(batch: ForwardBatch) -> list[int]:
    """Return three parts for requests that have their first page in common, as cascade attention splits them."""
    if is_recording():
        return [0] * batch.padded_reqs
    first = [int(page) if n else -1 for page, n in zip(batch.page_table[:, 0], batch.prefix_lens, strict=True)]
    live = first[: batch.num_reqs]
    return [3 * (page >= 0 and live.count(page) > 1) for page in first]


def _long_in_parts(batch: ForwardBatch) -> list[int]:
    """Return one part fewer than the batch has requests, for requests of `LONG` keys and more."""
    return [(batch.padded_reqs - 1) * (bound >= LONG) for bound in _bounds(batch)]


def _mutant(number: int, what: str, source: str, patch: Callable[[Any], None], *layouts: str) -> Mutant:
    declared = {"describe": lambda geometry, info: replace(info, batch_invariant=True)}
    absent = "" if set(layouts) == {"reference", "csr"} else "one design is enough for this rule of the schedule"
    return Mutant(f"K{number:02}", what, source, declared, patch, layouts, absent)


FILLS = "FlashAttention's num_splits_heuristic fills one wave of CTAs with the batch's blocks"

MUTANTS = (
    _mutant(
        *(1, "Splits keys so that all requests together have about sixteen splits", FILLS),
        *(_by_batch(lambda batch: max(1, 16 // batch.padded_reqs)), "reference", "csr"),
    ),
    _mutant(
        *(2, "Cuts one line of all requests' keys into four equal shares", "persistent schedules of split-KV kernels"),
        *(_splitting(lambda backend, batch: _even_shares(batch)), "csr", "tutorial"),
    ),
    _mutant(
        *(3, "Takes the kernel for small batches up to four requests", "kernel tables keyed by batch size"),
        *(_by_batch(lambda batch: 3 if batch.num_reqs <= 4 else 1), "reference", "csr"),
    ),
    _mutant(
        *(4, "Runs every second request of a batch from both ends of its keys", "order that balances CTAs"),
        *(_splitting(lambda backend, batch: [2 * (n % 2) for n in range(batch.padded_reqs)]), "tutorial"),
    ),
    _mutant(
        *(5, "Sizes splits for the longest host bound of the batch", "plan-time chunk sizes, as FlashInfer's"),
        *(_by_batch(lambda batch: 1 + max(_bounds(batch)) // SPLIT), "csr"),
    ),
    _mutant(
        *(
            6,
            "Splits keys of padded batches only",
            "graph replays take another kernel than eager batches of their size",
        ),
        *(_by_batch(lambda batch: 2 * (batch.padded_reqs > batch.num_reqs)), "tutorial"),
    ),
    _mutant(
        *(7, "Splits a chunk of a prompt when the whole EXTEND batch has few rows", "split prefill"),
        *(_by_batch(lambda batch: 3 * (batch.mode is Mode.EXTEND and batch.num_rows < 64)), "reference", "tutorial"),
    ),
    _mutant(
        *(8, "Splits the keys of requests that share their first page", "cascade attention, flashinfer and vLLM"),
        *(_splitting(lambda backend, batch: _shared_first(batch)), "reference", "tutorial"),
    ),
    _mutant(
        *(9, "Splits requests of 3,000 keys and more by the number of requests", "split-KV only for long contexts"),
        *(_splitting(lambda backend, batch: _long_in_parts(batch)), "csr", "tutorial"),
    ),
    Mutant("K10", "Chooses the key tile of long contexts by the number of requests", "a table of tuned tiles",
           patch=_tiles_of_long_contexts, layouts=("cuda_triton",), absent="a plan of cuda_triton's host code"),
    Mutant("OH1", "Runs another kernel for batches padded to more than 32 requests", "pegainfer#613",
           plugin=declared(OtherKernelForMany), layouts=("tutorial",), absent=ONLY),
    Mutant("OH2", "Splits keys by the sum of the lengths of the batch", "flash-attention#1897",
           plugin=declared(SplitByTotal), layouts=("tutorial",), absent=ONLY),
    Mutant("OH3", "Chooses the key tile by the number of requests", "FlashMLA#212",
           patch=_tiles_by_requests, layouts=("cuda_triton",), absent="a plan of cuda_triton's host code"),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(
        ("K01", "K02", "K03", "K04", "K05", "K07", "K08", "K09", "K10", "OH1", "OH2", "OH3"),
        "batch_invariance.holds_in_any_batch",
    ),
    "K06": "batch_invariance.holds_in_any_graph",
}
