"""Mutants Q01 … Q06: pages left of a sliding window that an engine has given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.graphs import is_recording

from . import csr_attention as kernel
from .mutant import Mutant, around, on_batch
from .plain_attention import Parts, attending

Tensor = torch.Tensor
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
    **dict.fromkeys(("Q01", "Q02", "Q03", "Q05", "Q06"), "windows.hide_what_pages_left_of_them_hold"),
    "Q04": "windows.hide_what_pages_left_of_them_hold_in_a_graph",
}
"""Check that must kill each mutant."""
