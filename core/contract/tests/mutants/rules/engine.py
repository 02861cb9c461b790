"""Mutants that the checks of `engine` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import Block, Causal, ForwardBatch, KVCache, Tree, is_recording
from draftmark_reference import backend as reference

from ..designs.plain_attention import Parts, attending
from ..mutant import Mutant, after, around, on_batch

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


BEYOND = {"layouts": ("reference",), "absent": "it serves only the five core modes"}


def _window_of_the_first_row(backend: Any) -> None:
    right = reference.block_visibility

    def of_the_first(*args: Any) -> Tensor:
        seen: Tensor = right(*args)
        return seen[:, :1].expand_as(seen)

    def attend(original: Callable[..., None], *args: Any) -> None:
        with mock.patch.object(reference, "block_visibility", of_the_first):
            original(*args)

    around(backend, "attend", attend)


def _blocks_are_not_captured(batch: ForwardBatch) -> None:
    if batch.mode is Mode.DRAFT_BLOCK and is_recording():
        raise NotImplementedError("draft blocks are run eagerly")


def _uniform_graph(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """At capture, describe a ragged batch as if every request had the mean number of rows."""
    if batch.mode is not Mode.RAGGED_VERIFY or not is_recording() or not isinstance(batch.tail, Tree):
        return batch
    rows = batch.num_rows // batch.padded_reqs
    return replace(batch, q_indptr=torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * rows)


def _strides_of_k(cache: KVCache) -> KVCache:
    """Return the cache with V in K's strides, where they stay in V's memory."""
    k, v = cache.k, cache.v
    last = v.storage_offset() + sum((size - 1) * step for size, step in zip(v.shape, k.stride(), strict=True))
    if (last + 1) * v.element_size() > v.untyped_storage().nbytes():
        return cache
    return replace(cache, v=v.as_strided(v.shape, k.stride(), v.storage_offset()))


def _reads_in_strides_of_k(backend: Any) -> None:
    around(backend, "attend", lambda original, q, cache, *rest: original(q, _strides_of_k(cache), *rest))


def _stores_in_strides_of_k(backend: Any) -> None:
    around(backend, "write_kv", lambda original, k, v, cache, batch: original(k, v, _strides_of_k(cache), batch))


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
    Mutant("D11", "Reads V with K's page, token and head strides", "one set of strides for both tensors, FlashInfer's",
           patch=_reads_in_strides_of_k, **FORMS),
    Mutant("D12", "Stores V with K's page, token and head strides", "one set of strides for both tensors",
           patch=_stores_in_strides_of_k, **FORMS),
    Mutant("M40", "Gives all rows of a draft block the window of its first row", "sglang#35209",
           patch=_window_of_the_first_row, **BEYOND),
    Mutant("M41", "Serves draft blocks in eager mode but raises at capture", "vllm#48167",
           patch=lambda b: after(b, "write_metadata", _blocks_are_not_captured), **BEYOND),
    Mutant("M42", "Captures a uniform graph for a ragged batch", "vllm#47808",
           patch=on_batch(_uniform_graph, "write_metadata", "attend"), **BEYOND),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("D01", "D02", "D03"), "engine.blocks_may_be_causal"),
    **dict.fromkeys(("D04", "D06"), "engine.rows_may_be_stored_only"),
    **dict.fromkeys(("D11", "D12"), "engine.forms_are_taken_as_they_are"),
    "D05": "engine.rows_may_be_stored_only_in_a_graph",
    **dict.fromkeys(("D07", "D08", "D09"), "engine.modules_read_their_newest_rows_again"),
}
