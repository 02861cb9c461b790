"""Checks of a batch's device tensors against its host numbers. Every function reads the device."""

from __future__ import annotations

from itertools import pairwise

import torch

from draftmark.batch import ForwardBatch, Tree
from draftmark.errors import BatchError
from draftmark.geometry import BatchGeometry, Form, Geometry, Mode
from draftmark.lengths import Exact


def check_contents(batch: ForwardBatch, geometry: Geometry, null_pages: int) -> int:
    """Check the tensors of a batch that `validate` accepts; return the largest page id that it names.

    Raises:
        BatchError: the first tensor that contradicts the batch, with the value, the limit and the remedy.
    """
    rows = check_rows_and_lengths(batch, geometry)
    return _check_pages(batch, geometry, batch.prefix_lens.tolist(), rows, null_pages)


def check_rows_and_lengths(batch: ForwardBatch, geometry: BatchGeometry) -> list[int]:
    """Check prefix lengths, row counts, positions and the tree's mask; return the number of rows of each request.

    Raises:
        BatchError: the first tensor that contradicts the batch.
    """
    lens = _check_lengths(batch, geometry)
    rows = _check_rows(batch)
    _check_positions(batch, geometry, lens, rows)
    if isinstance(batch.tail, Tree):
        _check_tree(batch, geometry, rows)
    return rows


def _check_lengths(batch: ForwardBatch, geometry: BatchGeometry) -> list[int]:
    lens: list[int] = batch.prefix_lens.tolist()
    for r, length in enumerate(lens):
        if not 0 <= length <= geometry.max_prefix_len:
            raise BatchError(
                f"prefix_lens[{r}] is {length}, but prefixes are 0 … {geometry.max_prefix_len}; fill it from "
                "SequenceLengths.device"
            )
        if r >= batch.num_reqs and length:
            raise BatchError(
                f"prefix_lens[{r}] is {length}, but request {r} is padding, with length 0; fill it from a null row of "
                "SequenceLengths"
            )
    exact = isinstance(batch.host, Exact)
    for r, bound in enumerate(batch.host.upper_bound()):
        if lens[r] > bound or (exact and lens[r] != bound):
            limit = "exactly" if exact else "at most"
            raise BatchError(
                f"prefix_lens[{r}] is {lens[r]} on the device, but host promises {limit} {bound}; take host from "
                "SequenceLengths for the same rows"
            )
    return lens


def _check_rows(batch: ForwardBatch) -> list[int]:
    """Check `q_indptr` against the host's row counts, and return the number of rows of each request."""
    starts: list[int] = batch.q_indptr.tolist()
    rows = [end - start for start, end in pairwise(starts)]
    ragged = batch.mode is Mode.RAGGED_VERIFY
    fits = all(0 <= n <= most if ragged else n == most for n, most in zip(rows, batch.q_lens, strict=True))
    if starts[0] or not fits or starts[-1] > batch.num_rows:
        limit = f"at most q_lens {batch.q_lens} and {batch.num_rows} in all" if ragged else f"q_lens {batch.q_lens}"
        raise BatchError(
            f"q_indptr is {starts}, but it starts at 0 and its steps are {limit}; write the running sum of each "
            "request's rows"
        )
    return rows


def _tail_lens(batch: ForwardBatch, rows: list[int]) -> list[int]:
    return rows if batch.mode is Mode.RAGGED_VERIFY else list(batch.tail_lens)


def _check_positions(batch: ForwardBatch, geometry: BatchGeometry, lens: list[int], rows: list[int]) -> None:
    last, starts = geometry.limits.max_context_len - 1, batch.q_indptr.tolist()
    got: list[int] = batch.positions.tolist()
    for r in range(batch.num_reqs):
        tail = _tail_lens(batch, rows)[r]
        depths = _depths(batch, r, starts[r], rows[r], tail)
        want = [min(lens[r] + depth, last) for depth in depths]
        mine = got[starts[r] : starts[r] + rows[r]]
        if mine != want:
            j = next(j for j, pair in enumerate(zip(mine, want, strict=True)) if pair[0] != pair[1])
            raise BatchError(
                f"positions[{starts[r] + j}] is {mine[j]}, but row {j} of request {r} has position {want[j]} (prefix "
                f"{lens[r]} + depth {depths[j]}); call write_tail after prefix_lens is filled"
            )


def _depths(batch: ForwardBatch, request: int, start: int, rows: int, tail: int) -> list[int]:
    """Return the depth of each row of a request."""
    if not isinstance(batch.tail, Tree):
        return list(range(tail - rows, tail))
    depth = batch.tail.depth
    own = depth[start : start + rows] if batch.mode is Mode.RAGGED_VERIFY else depth[request, tail - rows :]
    found: list[int] = own.tolist()
    return found


def _check_tree(batch: ForwardBatch, geometry: BatchGeometry, rows: list[int]) -> None:
    assert isinstance(batch.tail, Tree)
    starts = batch.q_indptr.tolist()
    for r in range(batch.num_reqs):
        n, tail = rows[r], _tail_lens(batch, rows)[r]
        # On the host: a device may lack these operators. An Ascend NPU shifts only operands of equal shape.
        mask = batch.tail.mask[starts[r] : starts[r] + n].cpu()
        seen = ((mask.long()[:, :, None] >> torch.arange(32)) & 1).flatten(1).bool()
        slots = torch.arange(seen.shape[1])
        own = torch.arange(tail - n, tail)[:, None]
        wrong = (seen & (slots > own)).any(1) | ~(seen & (slots == own)).any(1)
        depths = torch.tensor(_depths(batch, r, starts[r], n, tail))
        wrong |= seen.sum(1) - 1 != depths
        if bool(wrong.any()):
            j = int(wrong.nonzero()[0])
            visible = seen[j].nonzero()[:, 0].tolist()
            raise BatchError(
                f"tail.mask of row {j} of request {r} shows slots {visible} at depth {int(depths[j])}, but a row sees "
                f"its own slot {int(own[j])} and one ancestor for each level above it; call write_tail with this "
                "batch's parents before write_metadata"
            )


def _check_pages(batch: ForwardBatch, geometry: Geometry, lens: list[int], rows: list[int], null_pages: int) -> int:
    size, window = geometry.attention.page_size, geometry.attention.window_left
    table: list[list[int]] = batch.page_table.tolist()
    writers: dict[int, int] = {}
    apart = batch.slots is not None or Form.ENGINE_STORES in geometry.forms  # the engine decides which slots it writes
    largest = 0
    for r in range(batch.num_reqs):
        start, end = lens[r], lens[r] + _tail_lens(batch, rows)[r]
        hidden = max(0, start - window) // size if window >= 0 else 0
        for column in range(-(-end // size)):
            page = table[r][column] if column < len(table[r]) else -1
            largest = max(largest, page)
            if column < hidden:
                if page < 0:
                    raise BatchError(
                        f"page_table[{r}, {column}] is {page}, left of the window of request {r}, but a column there "
                        "names a page of the pool, whatever that page contains; write the null page 0 when a page is "
                        "given back"
                    )
                continue
            if page < 0:
                raise BatchError(
                    f"page_table[{r}, {column}] is {page}, but request {r} uses {end} KV positions and needs a page "
                    "there; reserve pages for the prefix and the tail before the forward"
                )
            # Null pages are allowed without a prefix, because a warm-up before capture runs live requests on them.
            if page < null_pages and (start or batch.mode is Mode.EXTEND) and end > start:
                raise BatchError(
                    f"page_table[{r}, {column}] is {page}, but pages below {null_pages} are null pages of padding; "
                    f"give live request {r} pages of its own"
                )
            if not apart and page >= null_pages and column >= start // size and end > start:
                other = writers.setdefault(page, r)
                if other != r:
                    raise BatchError(
                        f"requests {other} and {r} both write to page {page}; copy the page, or give each request its "
                        "own page for new tokens"
                    )
    return largest
