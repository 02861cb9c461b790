"""Checks of the arguments of `BatchBuffers` and `ragged`: host numbers only, before any tensor is made."""

from __future__ import annotations

import torch

from ..errors import BatchError
from ..geometry import BatchGeometry, Geometry, Mode, StateGeometry
from .checks import (
    check_chosen,
    check_host,
    check_integer,
    check_integers,
    check_kind,
    check_mode,
    check_rows,
    check_slots,
    check_state_slots,
    check_table,
    require_tensor,
    shown,
)


def check_geometry(geometry: object) -> None:
    """Require a `Geometry` or a `StateGeometry`."""
    check_kind("geometry", geometry, (Geometry, StateGeometry), "a Geometry", "write Geometry.create(…)")


def check_state(state: object) -> None:
    """Require a `StateGeometry` or None."""
    remedy = "write StateGeometry.create(…), or leave it out"
    check_kind("state", state, (StateGeometry, type(None)), "a StateGeometry", remedy)


def check_uniform(
    geometry: BatchGeometry,
    mode: object,
    step: object,
    padded_reqs: object,
    num_reqs: object,
    host: object,
    tree: object,
    causal: object,
) -> None:
    """Check the arguments of `BatchBuffers.uniform`.

    Raises:
        BatchError: the first argument that is out of range.
    """
    check_mode(mode, geometry)
    if mode in (Mode.EXTEND, Mode.RAGGED_VERIFY):
        other = "draftmark.runtime.ragged" if mode is Mode.EXTEND else "BatchBuffers.ragged_verify"
        raise BatchError(f"mode is {mode}, but its requests have different numbers of rows; use {other}")
    steps = max(1, geometry.num_draft_steps) if mode is Mode.DRAFT else 1
    check_integer("step", step, 0, steps - 1, "count the DRAFT forwards from 0, and pass 0 in other modes")
    _check_requests(geometry, padded_reqs, num_reqs, host)
    check_kind("tree", tree, bool, "True or False", "pass a bool")
    if tree and mode is Mode.DRAFT_BLOCK:
        raise BatchError("tree is True, but draft_block has a Block or Causal tail; pass tree=False")
    check_kind("causal", causal, bool, "True or False", "pass a bool")
    if causal and mode is not Mode.DRAFT_BLOCK:
        raise BatchError(
            f"causal is True, but only draft_block has a choice, and mode is {mode}; pass tree=False alone"
        )


def check_ragged_verify(
    geometry: BatchGeometry,
    budget: int,
    num_reqs: object,
    host: object,
    tree: object,
    padded_reqs: int | None,
    q_bounds: tuple[int, ...] | None,
) -> tuple[int, tuple[int, ...]]:
    """Check the arguments of `BatchBuffers.ragged_verify`; return `padded_reqs` and `q_bounds` with their defaults.

    Raises:
        BatchError: the first argument that is out of range.
    """
    check_mode(Mode.RAGGED_VERIFY, geometry)
    d, remedy = geometry.draft.num_draft_tokens, "give one bound for each padded request"
    check_integer("budget", budget, 1, geometry.max_rows(Mode.RAGGED_VERIFY), "raise Limits.row_budgets")
    padded = min(geometry.max_reqs, budget) if padded_reqs is None else padded_reqs
    _check_requests(geometry, padded, num_reqs, host)
    check_kind("tree", tree, bool, "True or False", "pass a bool")
    bounds = (d,) * padded if q_bounds is None else q_bounds
    check_integers("q_bounds", bounds, remedy)
    if len(bounds) != padded or not all(0 <= n <= d for n in bounds):
        raise BatchError(
            f"q_bounds is {shown(bounds)}, but it must have {padded} entries of 0 … num_draft_tokens = {d}; {remedy}"
        )
    return padded, bounds


def check_ragged(
    geometry: Geometry | StateGeometry,
    prefix_lens: object,
    page_table: object,
    q_lens: tuple[int, ...],
    host: object,
    num_reqs: object,
    slots: object,
    state_slots: object = None,
    chosen: object = None,
) -> None:
    """Check the arguments of `ragged`, with `num_reqs` filled in; `q_lens` are integers.

    Raises:
        BatchError: the first argument that is out of range.
    """
    check_mode(Mode.EXTEND, geometry)
    count, rows, most = len(q_lens), sum(q_lens), geometry.limits.max_extend_tokens
    if min(q_lens, default=0) < 0:
        raise BatchError(f"q_lens is {q_lens}, but each entry must be >= 0; give the chunk length of each prompt")
    check_rows(q_lens)
    if rows > most:
        raise BatchError(f"EXTEND has {rows} tokens, but max_extend_tokens is {most}; split the prompts into chunks")
    device = require_tensor("prefix_lens", prefix_lens, (count,), torch.int32).device
    check_table(page_table, count, geometry, device)
    check_integer("num_reqs", num_reqs, 0, count, "count the live requests, which come first")
    check_host(host, num_reqs, geometry)  # type: ignore[arg-type]
    check_slots(slots, rows, geometry, device)
    check_state_slots(state_slots, count, isinstance(geometry, StateGeometry), device)
    if isinstance(geometry, Geometry):
        check_chosen(chosen, rows, geometry.attention.chosen_width, device)


def _check_requests(geometry: BatchGeometry, padded_reqs: object, num_reqs: object, host: object) -> None:
    remedy = "raise max_num_reqs or capture a larger batch"
    check_integer("padded_reqs", padded_reqs, 1, geometry.max_reqs, remedy)
    check_integer("num_reqs", num_reqs, 0, padded_reqs, "pad to at least num_reqs")  # type: ignore[arg-type]
    check_host(host, num_reqs, geometry)  # type: ignore[arg-type]
