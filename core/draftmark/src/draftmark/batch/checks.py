"""Checks that a batch's tensors and host numbers describe one valid forward. No device read."""

from __future__ import annotations

import torch

from ..errors import BatchError
from ..geometry import BatchGeometry, Form, Geometry, Mode, StateGeometry
from ..lengths import HostLengths, Unknown
from .forward import Block, Causal, Chosen, ForwardBatch, Tree

INT32_MAX = 2**31 - 1


def validate(batch: ForwardBatch, geometry: Geometry | StateGeometry) -> ForwardBatch:
    """Check shapes, dtypes and host numbers of a batch against its geometry; return the batch. No device read.

    A batch of a hybrid model matches the geometry of each of its layers. A `StateGeometry` needs `state_slots`, and
    `Tree.parents` in a tree; it ignores the page table and the KV slots.

    Raises:
        BatchError: the first contradiction, with its value, limit and remedy.
    """
    check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers or ragged")
    check_kind("geometry", geometry, (Geometry, StateGeometry), "a Geometry", "pass the geometry of the batch")
    check_mode(batch.mode, geometry)
    _check_numbers(batch)
    _check_requests(batch, geometry)
    _check_extent(batch, geometry)
    r, rows = batch.padded_reqs, batch.num_rows
    if batch.mode is not Mode.RAGGED_VERIFY and rows != sum(batch.q_lens):
        raise BatchError(f"num_rows is {rows}, but q_lens add up to {sum(batch.q_lens)}; give their sum")
    if batch.mode is Mode.EXTEND:
        check_rows(batch.q_lens)
    device = require_tensor("prefix_lens", batch.prefix_lens, (r,), torch.int32).device
    require_tensor("q_indptr", batch.q_indptr, (r + 1,), torch.int32, device)
    stateful = isinstance(geometry, StateGeometry)
    if not isinstance(geometry, StateGeometry):
        check_table(batch.page_table, r, geometry, device)
        check_slots(batch.slots, rows, geometry, device)
        check_chosen(batch.chosen, rows, geometry.attention.chosen_width, device)
    check_state_slots(batch.state_slots, r, stateful, device)
    require_tensor("positions", batch.positions, (rows,), torch.int64, device)
    if isinstance(batch.tail, Tree):
        require_tensor("tail.mask", batch.tail.mask, (rows, geometry.mask_words), torch.int32, device)
        by_row = batch.mode is Mode.RAGGED_VERIFY
        depth = (rows,) if by_row else (r, max(batch.tail_lens, default=0))
        require_tensor("tail.depth", batch.tail.depth, depth, torch.int32, device)
        absent = "a tree over recurrent state needs the parent of each slot; create BatchBuffers with state="
        _check_optional("tail.parents", batch.tail.parents, depth, torch.int32, device, absent if stateful else "")
    return batch


def check_rows(q_lens: tuple[int, ...]) -> None:
    """Require at least one new token in an EXTEND batch; a forward without rows has nothing to compute."""
    if not sum(q_lens):
        raise BatchError(f"q_lens is {shown(q_lens)}, but an EXTEND has at least one new token; skip the forward")


def check_mode(mode: object, geometry: BatchGeometry) -> None:
    """Require a `Mode` that the geometry serves."""
    remedy = f"write Mode.{mode.upper()}" if isinstance(mode, str) and mode.lower() in tuple(Mode) else "pass a Mode"
    check_kind("mode", mode, Mode, "a draftmark.Mode", remedy)
    if mode not in geometry.modes:
        modes = ", ".join(one.value for one in geometry.modes)
        raise BatchError(f"mode is {mode}, but the geometry serves {modes}; create it with that mode")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Require an instance of `kind`; `what` describes it in the error."""
    if not isinstance(value, kind):
        raise BatchError(f"{name} is {shown(value)}, but it must be {what}; {remedy}")


def check_integer(name: str, value: object, least: int, most: int, remedy: str) -> None:
    """Require an integer from `least` to `most`; a bool or a tensor is no integer."""
    if type(value) is not int or not least <= value <= most:
        raise BatchError(f"{name} is {shown(value)}, but it must be an integer of {least} … {most}; {remedy}")


def check_integers(name: str, values: object, remedy: str) -> None:
    """Require a tuple of integers."""
    if not isinstance(values, tuple) or not all(type(one) is int for one in values):
        raise BatchError(f"{name} is {shown(values)}, but it must be a tuple of integers; {remedy}")


def shown(value: object) -> str:
    """Return a value on one line: a tensor by dtype and shape, other values by their repr, cut at 60 characters."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:59] + "…"


def check_host(host: object, num_reqs: int, geometry: BatchGeometry) -> None:
    """Require host lengths of `num_reqs` live requests, each within the geometry's limit."""
    remedy = "take them from SequenceLengths for the same rows"
    check_kind("host", host, HostLengths, "Exact, UpperBound or Unknown", "take it from SequenceLengths")  # type: ignore[arg-type]
    if isinstance(host, Unknown):
        check_integer("host.num_reqs", host.num_reqs, 0, INT32_MAX, remedy)
        check_integer("host.bound", host.bound, 0, INT32_MAX, remedy)
    else:
        check_integers("host.lens", host.lens, remedy)  # type: ignore[attr-defined]
    bounds = host.upper_bound()  # type: ignore[attr-defined]
    if len(bounds) != num_reqs:
        raise BatchError(f"host lengths cover {len(bounds)} requests, but {num_reqs} are live; {remedy}")
    wrong = next((n for n in bounds if not 0 <= n <= geometry.max_prefix_len), None)
    if wrong is not None:
        raise BatchError(
            f"a host length is {wrong}, but prefixes are 0 … {geometry.max_prefix_len}; take them from SequenceLengths"
        )


def _check_numbers(batch: ForwardBatch) -> None:
    """Require integers in the batch's host fields (row counts, tail lengths, step), and a tail of a known class."""
    check_integers("q_lens", batch.q_lens, "take the batch from BatchBuffers or ragged")
    check_integers("tail_lens", batch.tail_lens, "take the batch from BatchBuffers or ragged")
    if not batch.q_lens:
        raise BatchError("q_lens is (), but a batch has at least one request; skip the forward")
    # -1 is permitted here because a later check of `validate` raises a more specific error for it.
    for name, least in (("step", -1), ("num_rows", 0), ("num_reqs", -1)):
        check_integer(name, getattr(batch, name), least, INT32_MAX, "take the batch from BatchBuffers or ragged")
    check_kind("tail", batch.tail, (Causal, Tree, Block), "Causal, Tree or Block", "take the batch from BatchBuffers")


def check_table(
    table: object, requests: int, geometry: Geometry | StateGeometry, device: torch.device | None = None
) -> None:
    """Require a page table with the geometry's number of columns; with Form.ENGINE_TABLE it may have more."""
    width, wide = geometry.max_pages_per_req, Form.ENGINE_TABLE in geometry.forms
    if wide and isinstance(table, torch.Tensor) and table.dim() == 2 and table.shape[1] > width:
        table = table[:, :width]
    require_tensor("page_table", table, (requests, width), torch.int32, device)


def check_slots(slots: object, rows: int, geometry: BatchGeometry, device: torch.device) -> None:
    """Require the `slots` tensor if the geometry has Form.ENGINE_SLOTS; otherwise require None."""
    brings = Form.ENGINE_SLOTS in geometry.forms
    if slots is not None and not brings:
        raise BatchError(
            "slots are given, but the geometry lacks Form.ENGINE_SLOTS; create the geometry with that form"
        )
    absent = "the geometry has Form.ENGINE_SLOTS; fill BatchBuffers.slots, or create the geometry without that form"
    _check_optional("slots", slots, (rows,), torch.int64, device, absent if brings else "")


def check_state_slots(state_slots: object, requests: int, needed: bool, device: torch.device) -> None:
    """Require the `state_slots` tensor if `needed`; a layer without state accepts the tensor and None."""
    absent = "the geometry has recurrent state; create BatchBuffers with state=, or pass state_slots to ragged"
    _check_optional("state_slots", state_slots, (requests,), torch.int32, device, absent if needed else "")


def _check_optional(
    name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, absent: str
) -> None:
    """Check a tensor that may be None; `absent` says why it may not, and is empty where it may."""
    if tensor is not None:
        require_tensor(name, tensor, shape, dtype, device)
    elif absent:
        raise BatchError(f"{name} is None, but {absent}")


def check_chosen(chosen: object, rows: int, width: int, device: torch.device) -> None:
    """Require lists of chosen keys for a layer with chosen_width; a layer without it ignores them."""
    if not width:
        return
    remedy = "take it from BatchBuffers, or pass chosen to ragged"
    check_kind("chosen", chosen, Chosen, f"a Chosen, because the geometry has chosen_width {width}", remedy)
    assert isinstance(chosen, Chosen)
    for name, shape in (("slots", (rows, width)), ("counts", (rows,))):
        tensor = require_tensor(f"chosen.{name}", getattr(chosen, name), shape, torch.int32, device)
        if not tensor.is_contiguous():
            raise BatchError(
                f"chosen.{name} has strides {list(tensor.stride())}, but it must be contiguous; copy the lists"
            )


def _check_requests(batch: ForwardBatch, geometry: BatchGeometry) -> None:
    r = batch.padded_reqs
    if r > geometry.max_reqs and batch.mode is not Mode.EXTEND:
        raise BatchError(
            f"the batch is padded to {r} requests, but max_reqs is {geometry.max_reqs}; "
            "raise max_num_reqs or capture a larger batch"
        )
    if not 0 <= batch.num_reqs <= r:
        raise BatchError(f"num_reqs is {batch.num_reqs}, but the batch is padded to {r}; pad to at least num_reqs")
    check_host(batch.host, batch.num_reqs, geometry)


def _check_extent(batch: ForwardBatch, geometry: BatchGeometry) -> None:
    if batch.mode is Mode.EXTEND:
        if batch.tail_lens != batch.q_lens or min(batch.q_lens, default=0) < 0:
            raise BatchError(
                f"EXTEND has q_lens {batch.q_lens} and tail_lens {batch.tail_lens}, but they must be equal and >= 0, "
                "because every new token is a query row and a tail slot; build the batch with draftmark.runtime.ragged"
            )
        return
    if isinstance(batch.tail, Tree if batch.mode is Mode.DRAFT_BLOCK else Block):
        raise BatchError(
            f"{batch.mode.value} has tail {type(batch.tail).__name__}, but draft_block has a Block or Causal tail, and "
            "no other mode a Block; take the batch from BatchBuffers"
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


def _check_budget(batch: ForwardBatch, geometry: BatchGeometry) -> None:
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


def require_tensor(
    name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return `tensor` if it has this shape and dtype, and lies on `device` if one is given."""
    want = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(f"{name} is {shown(tensor)}, but it must be a tensor {want}; size it from the geometry")
    if tensor.shape != shape or tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise BatchError(f"{name} is {got}, but this batch needs {want}; size it from the geometry")
    if device is not None and tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}, but the batch is on {device}; move it to {device}")
    return tensor
