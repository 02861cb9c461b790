"""Mutants M34 … M42, for bugs that the museum (the collection of known public bugs) added later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch, Tree
from draftmark.graphs import is_recording
from draftmark.reference import backend as reference

from .mutant import Mutant, after, around, on_batch
from .plain_attention import Parts, attending

Tensor = torch.Tensor
_FIRST: dict[str, int] = {}
BEYOND = {"layouts": ("reference",), "absent": "it serves only the five core modes"}


def _stale_padding(backend: Any) -> None:
    """Give padded requests the page-table rows of the previous batch of that size."""
    kept: dict[int, Tensor] = {}

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        table, live = batch.page_table.clone(), batch.num_reqs
        old = kept.get(batch.padded_reqs)
        if old is not None:
            table[live:] = old[live:]
        kept[batch.padded_reqs] = batch.page_table.clone()
        return replace(batch, page_table=table)

    on_batch(change, "write_metadata")(backend)


def _first_group(shape: Any) -> Tensor:
    """Map query heads with the group size of the first geometry that the process opened."""
    group = _FIRST.setdefault("group", shape.group_size)
    return (torch.arange(shape.num_qo_heads) // group).clamp(max=shape.num_kv_heads - 1)


def _first_page_size(backend: Any) -> None:
    """Compute slots with the page size of the first geometry that the process opened."""
    size = backend.geometry.attention.page_size
    first = _FIRST.setdefault("page", size)

    def then(batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        slots.copy_(torch.where(slots >= 0, slots // size * first + slots % size, slots))

    after(backend, "write_metadata", then)


def _weighs_the_tile(scores: Tensor, shape: Any) -> Tensor:
    """Give keys from the request's length to the end of a tile of 128 the logit 0 instead of -inf, and value 0."""
    place = torch.arange(1, scores.shape[-1] + 1)
    length = torch.where(scores.isfinite(), place, 0).amax((1, 2, 3), keepdim=True)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (-length % 128) * (-top).exp())


def _shifted(q: Tensor, cache: Any, batch: ForwardBatch, out: Tensor) -> None:
    """When the batch has padding, give each live request the output of the previous request."""
    if batch.uniform is not None and batch.num_reqs < batch.padded_reqs:
        live = batch.num_reqs * batch.uniform.q_len
        out[:live] = out[:live].roll(batch.uniform.q_len, 0)


def _one_row_more(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Give attention a draft batch of topk + 1 rows per request instead of topk."""
    if batch.mode is not Mode.DRAFT:
        return batch
    rows = backend.geometry.draft.topk + 1
    return replace(batch, q_indptr=torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * rows)


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


MUTANTS = (
    Mutant("M34", "Stores padded requests on the pages of the previous batch", "vllm#56734", patch=_stale_padding),
    Mutant("M35", "Maps query heads by the head group of the process's first geometry", "vllm#53002",
           patch=attending(Parts(heads=_first_group))),
    Mutant("M36", "Computes slots by the page size of the process's first geometry", "vllm-ascend#13372",
           patch=_first_page_size, layouts=("reference", "csr")),
    Mutant("M37", "Gives keys after the length weight exp(0) up to the end of a tile", "vllm#57432",
           patch=attending(Parts(weights=_weighs_the_tile))),
    Mutant("M38", "Shifts the outputs of live rows by one request when there is padding", "vllm#54893",
           patch=lambda b: after(b, "attend", _shifted)),
    Mutant("M39", "Describes a draft step with the row count of another mode", "vllm-ascend#12296",
           patch=on_batch(_one_row_more, "write_metadata")),
    Mutant("M40", "Gives all rows of a draft block the window of its first row", "sglang#35209",
           patch=_window_of_the_first_row, **BEYOND),
    Mutant("M41", "Serves draft blocks in eager mode but raises at capture", "vllm#48167",
           patch=lambda b: after(b, "write_metadata", _blocks_are_not_captured), **BEYOND),
    Mutant("M42", "Captures a uniform graph for a ragged batch", "vllm#47808",
           patch=on_batch(_uniform_graph, "write_metadata", "attend"), **BEYOND),
)  # fmt: skip
