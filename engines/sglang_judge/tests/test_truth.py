"""Tests of the judge's checks of a forward: right results pass, wrong results fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark_contract.check import ContractViolation
from draftmark_sglang_judge.driver import TRAP, ForwardResult
from draftmark_sglang_judge.requests import place
from draftmark_sglang_judge.setups import ON_A_CPU, SETUPS, Scene
from draftmark_sglang_judge.truth import check_rows, check_stores, visible

SETUP = SETUPS["page1-tree"]

HEADS, KV_HEADS, HEAD_DIM = ON_A_CPU.num_qo_heads, ON_A_CPU.num_kv_heads, ON_A_CPU.head_dim


def _right(scene: Scene) -> ForwardResult:
    """Return a right forward result, computed by a loop over rows that shares no code with the contract's reference."""
    placed = place(scene, SETUP, 512)
    make = torch.Generator().manual_seed(1)
    before = tuple(torch.full((512, KV_HEADS, HEAD_DIM), TRAP) for _ in range(2))
    rows = [(n, row) for n, one in enumerate(placed.requests) for row in range(one.rows)]
    for pool in before:
        for one, slots in zip(placed.requests, placed.slots, strict=True):
            for slot in slots[: one.prefix]:
                pool[slot] = torch.randn(KV_HEADS, HEAD_DIM, generator=make)
    q, k, v = (torch.randn(len(rows), heads, HEAD_DIM, generator=make) for heads in (HEADS, KV_HEADS, KV_HEADS))
    writes = [placed.slots[n][placed.requests[n].prefix + row] for n, row in rows]
    after = tuple(pool.clone() for pool in before)
    after[0][writes], after[1][writes] = k, v
    out = torch.empty_like(q)
    for at, (n, row) in enumerate(rows):
        request = placed.requests[n]
        here = request.prefix + request.depth(row)
        seen = [slot for i, slot in enumerate(placed.slots[n][: request.prefix]) if _near(scene, here - i)]
        seen += [
            placed.slots[n][request.prefix + slot]
            for slot in request.lineage(row)
            if _near(scene, here - request.prefix - request.depth(slot))
        ]
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = torch.softmax(after[0][seen, group] @ q[at, head] / HEAD_DIM**0.5, 0)
            out[at, head] = weights @ after[1][seen, group]
    return ForwardResult(placed, 0, q, k, v, out, before, after, writes)


def _near(scene: Scene, distance: int) -> bool:
    return scene.window < 0 or distance <= scene.window


@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.DECODE])
def test_right_result_passes(mode: Mode, window: int) -> None:
    """A right result passes the checks of output and of KV stores, with draft trees and with windows."""
    ran = _right(Scene("right", mode, (9, 3), window=window))
    check_rows(ran)
    check_stores(ran)


def test_missing_key_is_wrong() -> None:
    """Output with a window that is one key short fails; the error has the request, the row and the known bug."""
    scene = Scene("short", Mode.DECODE, (9, 3), window=6)
    short = _right(replace(scene, window=5))
    placed = place(scene, SETUP, 512)
    with pytest.raises(
        ContractViolation, match=r"request 0, row 0 is not attention over the 7 tokens .*1 of 2"
    ) as told:
        check_rows(replace(short, placed=replace(short.placed, scene=scene, requests=placed.requests)), "sglang#32087")
    assert told.value.details["known from"] == "sglang#32087"


def test_padding_rows_must_be_finite() -> None:
    """The output check fails if a padding row contains NaN."""
    ran = _right(Scene("padded", Mode.DECODE, (9,)))
    wide = replace(ran, out=torch.cat([ran.out, torch.full_like(ran.out, float("nan"))]))
    with pytest.raises(ContractViolation, match="row 1, which belongs to a padding request, is not finite"):
        check_rows(wide)


def test_a_row_stored_elsewhere_is_wrong() -> None:
    """The store check fails if a row's K or V is not in its KV slot, or if another slot has changed."""
    ran = _right(Scene("stores", Mode.DECODE, (9, 3)))
    lost = ran.after[0].clone()
    lost[ran.writes[1]] = 0
    with pytest.raises(ContractViolation, match=r"(?s)cache differs.*rows .* own some of these slots"):
        check_stores(replace(ran, after=(lost, ran.after[1])))
    other = ran.after[1].clone()
    other[ran.placed.slots[0][2]] = 0
    with pytest.raises(ContractViolation, match=r"(?s)cache differs.*no row owns some of these slots"):
        check_stores(replace(ran, after=(ran.after[0], other)))


def test_draft_step_sees_its_own_branch() -> None:
    """A branch of a draft step sees its own drafts, and committed tokens within the window."""
    placed = place(Scene("draft", Mode.DRAFT, (9,), window=2), SETUP, 512)
    seen = visible(placed, 1)
    assert set(seen) == {(0, 0), (0, 1), (0, 2)}
    for branch in range(3):
        own = {placed.draft_slot(0, branch, 0), placed.draft_slot(0, branch, 1)}
        assert set(seen[0, branch]) == own | {placed.slots[0][8]}
