"""Mutants that the checks of `drafters` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, KVCache, Tree

from ..designs import csr_attention as kernel
from ..designs.layouts import QUANTISED
from ..designs.plain_attention import Parts, attending
from ..mutant import Mutant, around

DRAFTING = (Mode.DRAFT, Mode.DRAFT_EXTEND)


def _for_drafts(change: Callable[[Any, KVCache], KVCache]) -> Callable[[Any], None]:
    """Return a patch that attends with a changed cache in the drafter's modes."""

    def patch(backend: Any) -> None:
        def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            original(q, change(backend, cache) if batch.mode in DRAFTING else cache, batch, out)

        around(backend, "attend", attend)

    return patch


def _with_parts(parts: Parts) -> Callable[[Any], None]:
    """Return a patch that attends with these parts in the drafter's modes."""

    def patch(backend: Any) -> None:
        right = backend.attend
        attending(parts)(backend)
        wrong = backend.attend
        backend.attend = lambda q, cache, batch, out: (wrong if batch.mode in DRAFTING else right)(q, cache, batch, out)

    return patch


def _wider(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    """Add the key left of each row's window, if there is one."""
    if shape.window_left < 0:
        return visible
    first = visible.int().argmax(-1, keepdim=True)
    key = torch.arange(visible.shape[-1])
    return visible | ((key == first - 1) & (first > 0))


def _used_wider(prefix: Tensor, lens: Tensor, width: int, window_left: int) -> Tensor:
    return kernel.used(prefix, lens, width, window_left + 1 if window_left >= 0 else -1)


def _without_the_newest(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    """Hide the last committed token, as a drafter that counts positions from L - 1 does."""
    return visible & (torch.arange(visible.shape[-1]) != (prefix - 1)[:, None])[:, None]


def _slots_as_positions(backend: Any) -> None:
    """Count a draft tree's slots as its positions, as a drafter that keeps one counter for all branches does."""
    right = backend.attend
    attending(Parts())(backend)
    wrong = backend.attend

    def attend(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
            return right(q, cache, batch, out)
        depth = torch.arange(batch.tail.depth.shape[1], dtype=torch.int32).expand_as(batch.tail.depth)
        return wrong(q, cache, replace(batch, tail=Tree(batch.tail.mask, depth)), out)

    backend.attend = attend


def _unscaled(backend: Any, cache: KVCache) -> KVCache:
    """Use the draft layer's own scale, which is 1, for the target's K."""
    return replace(cache, k_scale=None)


def _exchanged(backend: Any, cache: KVCache) -> KVCache:
    return replace(cache, k_scale=cache.v_scale, v_scale=cache.k_scale)


def _kept(backend: Any) -> None:
    """Read committed tokens in DRAFT_EXTEND from a copy of the KV that is made before the target verifies."""
    kept: list[Tensor] = []

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.mode is Mode.DRAFT_EXTEND and kept:
            cache = replace(cache, k=kept[0], v=kept[1])
        elif batch.mode is Mode.DRAFT:
            kept[:] = [kernel.indexable(one).clone().view(one.dtype) for one in (cache.k, cache.v)]
        original(q, cache, batch, out)

    around(backend, "attend", attend)


def _reaches_rejected(backend: Any) -> None:
    """See all tokens that the last DRAFT_EXTEND read, accepted or not."""
    end: list[Tensor] = []

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.mode is Mode.DRAFT_EXTEND:
            end[:] = [batch.prefix_lens + batch.tail_lens[0]]
        if batch.mode is Mode.DRAFT and end:
            parts = Parts(
                seen=lambda visible, prefix, shape: visible | _up_to(end[0], prefix, visible),
                used=lambda prefix, lens, width, window: kernel.used(prefix, lens.maximum(end[0]), width, window),
            )
            attending(parts)(shadow)
            shadow.attend(q, cache, batch, out)
        else:
            original(q, cache, batch, out)

    shadow = type("Shadow", (), {"geometry": backend.geometry, "attend": None})()
    around(backend, "attend", attend)


def _up_to(end: Tensor, prefix: Tensor, visible: Tensor) -> Tensor:
    key = torch.arange(visible.shape[-1])
    stored = (key < end[:, None]) & (key >= prefix[:, None]) & (end > prefix)[:, None]
    return stored[:, None].expand_as(visible)


def _mutant(name: str, what: str, **how: Any) -> Mutant:
    return Mutant(name, what, "acceptance lost in silence", **how)


NAMED = {
    "U01": "KV scale",
    "U02": "KV scale",
    "U03": "window",
    "U04": "position",
    "U05": "KV",
    "U06": "KV",
    "U07": "position",
}
"""Difference between drafter and target that the failure must name."""

MUTANTS = (
    _mutant("U01", "Takes the target's KV without k_scale in the drafter's modes", patch=_for_drafts(_unscaled),
            **QUANTISED),
    _mutant("U02", "Exchanges k_scale and v_scale in the drafter's modes", patch=_for_drafts(_exchanged), **QUANTISED),
    _mutant("U03", "Sees a key left of the window in the drafter's modes",
            patch=_with_parts(Parts(seen=_wider, used=_used_wider))),
    _mutant("U04", "Counts positions from the last committed token but one in the drafter's modes",
            patch=_with_parts(Parts(seen=_without_the_newest))),
    _mutant("U05", "Reads KV in DRAFT_EXTEND from before the target verified", patch=_kept),
    _mutant("U06", "Reads rejected tokens of the last round in DRAFT", patch=_reaches_rejected),
    _mutant("U07", "Counts a draft tree's slots as positions in DRAFT", patch=_slots_as_positions),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "U01",
        "U02",
        "U03",
        "U04",
        "U05",
        "U06",
        "U07",
    ),
    "drafters.read_what_their_target_reads",
)
