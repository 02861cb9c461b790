"""Mutants that the checks of `windows` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import AttentionShape
from draftmark.runtime import ForwardBatch, KVCache, is_recording

from ..designs import csr_attention as kernel
from ..designs.plain_attention import Parts, attending
from ..designs.tutorial_plans import Mapped, plugin
from ..mutant import ONLY, Mutant, around, on_batch


def _ends_at_null_page(backend: Any) -> None:
    """Take the first null page of a table for the request's end, and read the first page for all pages after it."""

    def write(original: Any, batch: ForwardBatch, indptr: torch.Tensor) -> None:
        ended = (batch.page_table == 0).int().cumsum(1) > 0
        first = batch.page_table[:, :1]
        original(replace(batch, page_table=torch.where(ended, first, batch.page_table)), indptr)

    around(backend, "_write_indices", write)


class PaddingByFirstPage(Mapped):
    """Takes a request for padding when its first page is the null page, and gives its rows an output of 0."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention, then clear the rows of padding."""
        super().attend(q, cache, batch, out)
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
        out.masked_fill_((batch.page_table[request, 0] == 0)[:, None, None], 0.0)


def _resident_length(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Clamp each length to the tokens of the pages that are not null, as a defence against stale lengths."""
    resident = (batch.page_table != 0).sum(1, dtype=torch.int32) * backend.geometry.attention.page_size
    return replace(batch, prefix_lens=torch.minimum(batch.prefix_lens, resident))


def _with_early_maximum(backend: Any) -> None:
    """Subtract the row maximum over the whole prefix, also over keys left of the window, and mask afterwards."""
    kept: list[torch.Tensor] = []

    def seen(seen: torch.Tensor, prefix: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        kept[:] = [seen]
        return seen | (torch.arange(seen.shape[2]) < prefix[:, None])[:, None]

    def weights(scores: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        mass = (scores - scores.amax(-1, keepdim=True)).exp() * kept[0][:, None]
        return mass / mass.sum(-1, keepdim=True)

    def used(prefix: torch.Tensor, lens: torch.Tensor, width: int, window_left: int) -> torch.Tensor:
        return kernel.used(prefix, lens, width, -1)

    attending(Parts(seen=seen, weights=weights, used=used))(backend)


TILE = 32


def _in_whole_tiles(prefix: Tensor, lens: Tensor, width: int, window_left: int) -> Tensor:
    """Clear V from the first key tile of the window on only, as a kernel that skips whole tiles does."""
    if window_left < 0:
        return kernel.used(prefix, lens, width, window_left)
    first = (prefix - window_left).clamp(min=0) // TILE * TILE
    return kernel.used(first, lens, width, 0)


def _of_single_rows(prefix: Tensor, lens: Tensor, width: int, window_left: int) -> Tensor:
    """Clear V left of the window only where the request has a single row."""
    alone = lens - prefix == 1
    every = kernel.used(prefix, lens, width, -1)
    return torch.where(alone[:, None], kernel.used(prefix, lens, width, window_left), every)


def _frozen(backend: Any) -> None:
    """Clear V left of the windows that the capture's batch had, also in every replay."""
    kept: list[Tensor] = []

    def plan(original: Any, batch: ForwardBatch) -> None:
        kept[:] = [batch.prefix_lens.clone()]
        original(batch)

    def used(prefix: Tensor, lens: Tensor, width: int, window_left: int) -> Tensor:
        if not is_recording() or window_left < 0:
            return kernel.used(prefix, lens, width, window_left)
        return kernel.used(kept[0][: len(prefix)], lens, width, window_left)

    around(backend, "plan", plan)
    attending(Parts(used=used))(backend)


def _with_a_window(change: Callable[[Any, ForwardBatch], ForwardBatch]) -> Callable[[Any], None]:
    """Return a patch that changes the batch of every method if the layer has a window."""
    return on_batch(lambda b, x: change(b, x) if b.geometry.attention.window_left >= 0 else x)


def _null_page_is_padding(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Treat a request as padding, with prefix length 0, if its table begins with the null page."""
    live = batch.page_table[:, 0] > 0
    return replace(batch, prefix_lens=torch.where(live, batch.prefix_lens, 0))


def _ends_at_the_null_page(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read no column after the first null page of a table that begins with a page."""
    table = batch.page_table
    ended = ((table == 0).int().cumsum(1) > 0) & (table[:, :1] > 0)
    return replace(batch, page_table=torch.where(ended, 0, table))


MUTANTS = (
    Mutant("OW1", "Takes the first null page of a table for the request's end", "pages freed left of a window",
           patch=_ends_at_null_page, layouts=("csr",), absent="tried in csr"),
    Mutant("OW2", "Takes a request with a null first page for padding", "pages freed left of a window",
           plugin=plugin(PaddingByFirstPage), layouts=("tutorial",), absent=ONLY),
    Mutant("OW3", "Clamps lengths to the pages that are not null", "pages freed left of a window",
           patch=on_batch(_resident_length, "write_metadata", "attend"), layouts=("cuda_triton",),
           absent="tried in cuda_triton"),
    Mutant("OW4", "Subtracts a row maximum that includes keys left of the window", "stale KV left of a window",
           patch=_with_early_maximum, layouts=("csr",), absent="tried in csr"),
    Mutant("Q01", "Multiplies V left of the window by a weight of zero", "vllm#43961",
           patch=attending(Parts(used=lambda prefix, lens, width, window: kernel.used(prefix, lens, width, -1)))),
    Mutant("Q02", "Clears V left of the window only in whole key tiles", "vllm#43961",
           patch=attending(Parts(used=_in_whole_tiles))),
    Mutant("Q03", "Clears V left of the window only for requests with one row", "vllm#43961",
           patch=attending(Parts(used=_of_single_rows))),
    Mutant("Q04", "Clears V left of the window of the captured batch in every replay", "sglang#26521",
           patch=_frozen),
    Mutant("Q05", "Treats a request whose first column is the null page as padding", "vllm#42273",
           patch=_with_a_window(_null_page_is_padding)),
    Mutant("Q06", "Ends a request's pages at a null page between other pages", "vllm#42273",
           patch=_with_a_window(_ends_at_the_null_page)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(
        ("OW1", "OW2", "OW3", "OW4", "Q01", "Q02", "Q03", "Q05", "Q06"), "windows.hide_what_pages_left_of_them_hold"
    ),
    "Q04": "windows.hide_what_pages_left_of_them_hold_in_a_graph",
}
