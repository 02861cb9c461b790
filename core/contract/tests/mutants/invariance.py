"""Mutants of batch invariance: right outputs, with rounding that depends on the batch around a request.

Each declares `BackendInfo.batch_invariant`. Requests that the defect selects run in another correct kernel, which sums
the values of the keys in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from draftmark import CORE_MODES, Mode
from draftmark.batch import ForwardBatch
from draftmark.cache import KVCache

from .mutant import Mutant, around
from .plain_attention import Parts, attend_plainly

Tensor = torch.Tensor
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
)
KILLER = {one.id: "batch_invariance.holds_in_any_batch" for one in MUTANTS} | {
    "K06": "batch_invariance.holds_in_any_graph"
}
"""Check that must kill each mutant."""
