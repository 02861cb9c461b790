"""Checks that a batch's tensors and host numbers describe one valid forward. No device read."""

from __future__ import annotations

import torch

from ..errors import BatchError
from ..geometry import Form, Geometry, Mode
from ..lengths import HostLengths
from .forward import Block, Causal, ForwardBatch, Tree


def validate(batch: ForwardBatch, geometry: Geometry) -> ForwardBatch:
    """Check shapes, dtypes and host numbers of a batch against its geometry; return the batch. No device read.

    Raises:
        BatchError: the first contradiction, with its value, limit and remedy.
    """
    if batch.mode not in geometry.modes:
        modes = ", ".join(mode.value for mode in geometry.modes)
        raise BatchError(f"mode is {batch.mode.value}, but the geometry serves {modes}; create it with that mode")
    _check_requests(batch, geometry)
    _check_extent(batch, geometry)
    r, rows = batch.padded_reqs, batch.num_rows
    if batch.mode is not Mode.RAGGED_VERIFY and rows != sum(batch.q_lens):
        raise BatchError(f"num_rows is {rows}, but q_lens add up to {sum(batch.q_lens)}; give their sum")
    _shape("prefix_lens", batch.prefix_lens, (r,), torch.int32)
    _shape("q_indptr", batch.q_indptr, (r + 1,), torch.int32)
    _check_table(batch.page_table, r, geometry)
    _shape("positions", batch.positions, (rows,), torch.int64)
    _check_slots(batch, geometry)
    if isinstance(batch.tail, Tree):
        _shape("tail.mask", batch.tail.mask, (rows, geometry.mask_words), torch.int32)
        by_row = batch.mode is Mode.RAGGED_VERIFY
        _shape("tail.depth", batch.tail.depth, (rows,) if by_row else (r, max(batch.tail_lens)), torch.int32)
    return batch


def _check_table(table: torch.Tensor, requests: int, geometry: Geometry) -> None:
    """Require the geometry's width; with Form.ENGINE_TABLE the table may be wider."""
    width = geometry.max_pages_per_req
    if Form.ENGINE_TABLE in geometry.forms and table.dim() == 2 and table.shape[1] > width:
        table = table[:, :width]
    _shape("page_table", table, (requests, width), torch.int32)


def _check_slots(batch: ForwardBatch, geometry: Geometry) -> None:
    """Require slots with Form.ENGINE_SLOTS, and reject them without it."""
    brings = Form.ENGINE_SLOTS in geometry.forms
    if batch.slots is None:
        if brings:
            raise BatchError(
                "slots is None, but the geometry has Form.ENGINE_SLOTS; fill BatchBuffers.slots, or create the "
                "geometry without that form"
            )
        return
    if not brings:
        raise BatchError(
            "slots are given, but the geometry lacks Form.ENGINE_SLOTS; create the geometry with that form"
        )
    _shape("slots", batch.slots, (batch.num_rows,), torch.int64)


def _check_requests(batch: ForwardBatch, geometry: Geometry) -> None:
    r = batch.padded_reqs
    if r > geometry.max_reqs and batch.mode is not Mode.EXTEND:
        raise BatchError(
            f"the batch is padded to {r} requests, but max_reqs is {geometry.max_reqs}; "
            "raise max_num_reqs or capture a larger batch"
        )
    if not 0 <= batch.num_reqs <= r:
        raise BatchError(f"num_reqs is {batch.num_reqs}, but the batch is padded to {r}; pad to at least num_reqs")
    if not isinstance(batch.host, HostLengths):
        raise BatchError(
            f"host is {batch.host!r}, but it must be Exact, UpperBound or Unknown; take it from SequenceLengths"
        )
    bounds = batch.host.upper_bound()
    if len(bounds) != batch.num_reqs:
        raise BatchError(
            f"host lengths cover {len(bounds)} requests, but {batch.num_reqs} are live; "
            "take them from SequenceLengths for the same rows"
        )
    wrong = next((n for n in bounds if not 0 <= n <= geometry.max_prefix_len), None)
    if wrong is not None:
        raise BatchError(
            f"a host length is {wrong}, but prefixes are 0 … {geometry.max_prefix_len}; take them from SequenceLengths"
        )


def _check_extent(batch: ForwardBatch, geometry: Geometry) -> None:
    if batch.mode is Mode.EXTEND:
        if batch.tail_lens != batch.q_lens or min(batch.q_lens, default=0) < 0:
            raise BatchError(
                f"EXTEND has q_lens {batch.q_lens} and tail_lens {batch.tail_lens}, but they must be equal and >= 0, "
                "because every new token is a query row and a tail slot; build the batch with draftmark.runtime.ragged"
            )
        return
    if isinstance(batch.tail, Block) is not (batch.mode is Mode.DRAFT_BLOCK):
        raise BatchError(
            f"{batch.mode.value} has tail {type(batch.tail).__name__}, but draft_block needs a Block tail, and no "
            "other mode accepts one; take the batch from BatchBuffers"
        )
    if batch.mode is Mode.RAGGED_VERIFY:
        _check_budget(batch, geometry)
        return
    if not 0 <= batch.step < max(1, geometry.num_draft_steps):
        raise BatchError(
            f"step is {batch.step}, but num_steps {geometry.draft.num_steps} has DRAFT steps 0 … "
            f"{geometry.num_draft_steps - 1}; raise num_steps or stop drafting"
        )
    extent = geometry.extent(batch.mode, batch.step)
    if set(batch.q_lens) != {extent.q_len} or set(batch.tail_lens) != {extent.tail_len}:
        raise BatchError(
            f"{batch.mode.value} has {extent.q_len} rows and {extent.tail_len} tail slots a request, "
            f"got q_lens {batch.q_lens} and tail_lens {batch.tail_lens}; take them from Geometry.extent"
        )
    if batch.mode is Mode.DRAFT and extent.q_len > 1 and isinstance(batch.tail, Causal):
        raise BatchError(
            f"tail is Causal(), but the {extent.q_len} branches of a draft step must see only their own ancestors; "
            "pass a Tree"
        )


def _check_budget(batch: ForwardBatch, geometry: Geometry) -> None:
    d, most = geometry.draft.num_draft_tokens, geometry.max_rows(Mode.RAGGED_VERIFY)
    if batch.num_rows > most:
        raise BatchError(
            f"ragged_verify has a budget of {batch.num_rows} rows, but the geometry's largest is {most}; "
            "raise Limits.row_budgets"
        )
    wrong = next((n for n in batch.q_lens if not 0 <= n <= d), None)
    if wrong is not None or batch.tail_lens != batch.q_lens:
        raise BatchError(
            f"ragged_verify has q_lens {batch.q_lens} and tail_lens {batch.tail_lens}, but they must be equal bounds "
            f"in 0 … num_draft_tokens = {d}; take the batch from BatchBuffers.ragged_verify"
        )


def _shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        want = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise BatchError(f"{name} is {got}, but this batch needs {want}; size it from the geometry")
