"""Mutants D01 … D10: causal draft blocks, forwards that only store rows, and rows of several MTP modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.batch import Block, Causal, ForwardBatch
from draftmark.cache import KVCache
from draftmark.graphs import is_recording

from .mutant import Mutant, after, around, on_batch, resized
from .plain_attention import Parts, attending

Tensor = torch.Tensor
DEVICE = ("reference", "cuda_triton")
EVERY = ("reference", "csr", "cuda_triton")
FORMS: dict[str, Any] = {"layouts": DEVICE, "absent": "it serves only the five core modes, without forms of an engine"}
PARTS: dict[str, Any] = {
    "layouts": ("reference",),
    "absent": "it serves only the five core modes; in cuda_triton a kernel decides this",
}
ALL: dict[str, Any] = {"layouts": EVERY, "absent": "the tutorial's backend serves neither modules nor blocks"}


def _whole(_: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read the mode instead of the tail."""
    return replace(batch, tail=Block()) if batch.mode is Mode.DRAFT_BLOCK else batch


def _first_kind(backend: Any) -> None:
    """Keep the kind of tail that the backend's first draft block has."""
    kept: list[Any] = []

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is not Mode.DRAFT_BLOCK:
            return batch
        kept[:] = kept or [batch.tail]
        return replace(batch, tail=kept[0])

    on_batch(change)(backend)


def _in_causal_blocks(parts: Parts) -> Callable[[Any], None]:
    """Return a patch that attends with these parts in causal draft blocks only."""

    def patch(backend: Any) -> None:
        right = backend.attend
        attending(parts)(backend)
        wrong = backend.attend

        def attend(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            causal = batch.mode is Mode.DRAFT_BLOCK and isinstance(batch.tail, Causal)
            (wrong if causal else right)(q, cache, batch, out)

        backend.attend = attend

    return patch


def _one_more(seen: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    """Let each row of a block see the row after it."""
    return seen | torch.cat((seen[:, 1:], seen[:, -1:]), 1)


def _stored_late(when: Callable[[], bool]) -> Callable[[Any], None]:
    """Return a patch that stores the rows of a layer in `attend`, if `when` is true at write_kv."""

    def patch(backend: Any) -> None:
        waiting: list[tuple[Any, ...]] = []
        store = backend.write_kv

        def write_kv(*args: Any) -> None:
            if when():
                waiting[:] = [args]
            else:
                store(*args)

        def attend(original: Any, *args: Any) -> None:
            while waiting:
                store(*waiting.pop())
            original(*args)

        backend.write_kv = write_kv
        around(backend, "attend", attend)

    return patch


def _kept_until_attended(backend: Any) -> None:
    """Write no metadata while that of the last forward waits for its attend, which frees it."""
    waits = [False]

    def write(original: Any, batch: ForwardBatch) -> None:
        if not waits[0]:
            original(batch)
        waits[0] = True

    def attend(original: Any, *args: Any) -> None:
        waits[0] = False
        original(*args)

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _extra_rows(backend: Any, batch: ForwardBatch) -> int:
    modules: int = backend.geometry.draft.num_modules
    return (modules - 1) * (batch.mode is Mode.DRAFT_EXTEND)


def _accepted_rows_only(backend: Any) -> None:
    """Attend for D rows of each request; the rows after them stay zero."""

    def attend(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *_: Any) -> None:
        extra = _extra_rows(backend, batch)
        if extra:
            out.view(batch.padded_reqs, batch.q_lens[0], -1)[:, -extra:] = 0

    after(backend, "attend", attend)


def _shifted_store(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Take the prefix before the last accepted rows for the prefix of the forward."""
    return replace(batch, prefix_lens=batch.prefix_lens + _extra_rows(backend, batch))


def _every_row_stored(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Store front rows without a slot where their positions lie."""
    if batch.slots is None or not _extra_rows(backend, batch):
        return batch
    size, rows = backend.geometry.attention.page_size, batch.q_lens[0]
    position = (batch.prefix_lens[:, None] + torch.arange(rows, device=batch.device)).long()
    slots = (batch.page_table.gather(1, position // size) * size + position % size).flatten()
    return replace(batch, slots=torch.where(batch.slots < 0, slots, batch.slots))


def _short_slots(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Size the slots for D rows of a request in DRAFT_EXTEND."""
    extra = geometry.draft.num_modules - 1 if Mode.DRAFT_EXTEND in geometry.modes else 0
    return (shape[0] - geometry.max_reqs * extra,)


MUTANTS = (
    Mutant("D01", "Lets rows of a causal draft block see later rows", "layers of one DFlash head differ",
           patch=on_batch(_whole), **FORMS),
    Mutant("D02", "Keeps the kind of tail of its first draft block", "a plan cached by mode",
           patch=_first_kind, **FORMS),
    Mutant("D03", "Lets each row of a causal draft block see the next row", "off by one",
           patch=_in_causal_blocks(Parts(seen=_one_more)), **PARTS),
    Mutant("D04", "Stores the rows of a layer in attend", "a store fused with attention",
           patch=_stored_late(lambda: True), **ALL),
    Mutant("D05", "Stores the rows of a layer in attend when it is captured", "a store fused with attention in graphs",
           patch=_stored_late(is_recording), **ALL),
    Mutant("D06", "Keeps a forward's metadata until attend has read it", "a schedule that attention's kernel resets",
           patch=_kept_until_attended, **ALL),
    Mutant("D07", "Attends for D rows of a request in DRAFT_EXTEND with several modules", "a grid of accepted rows",
           patch=_accepted_rows_only, **ALL),
    Mutant("D08", "Stores rows of several modules n - 1 positions too far", "a prefix up to the accepted rows",
           patch=on_batch(_shifted_store, "write_metadata"), **ALL),
    Mutant("D09", "Stores the front rows of several modules that have slot -1", "slots computed from the page table",
           patch=on_batch(_every_row_stored, "write_metadata"), **FORMS),
    Mutant("D10", "Sizes slots for D rows of a request with several modules", "a second copy of the rows' formula",
           hooks=resized("slot_mapping", _short_slots)),
)  # fmt: skip

KILLER = {
    "D01": "engine.blocks_may_be_causal",
    "D02": "engine.blocks_may_be_causal",
    "D03": "engine.blocks_may_be_causal",
    "D04": "engine.rows_may_be_stored_only",
    "D05": "engine.rows_may_be_stored_only_in_a_graph",
    "D06": "engine.rows_may_be_stored_only",
    "D07": "engine.modules_read_their_newest_rows_again",
    "D08": "engine.modules_read_their_newest_rows_again",
    "D09": "engine.modules_read_their_newest_rows_again",
}
"""Check that must kill each mutant."""
