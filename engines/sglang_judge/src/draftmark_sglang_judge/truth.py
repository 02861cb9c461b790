"""Checks of a forward of the judge: output rows against float64 attention, and the KV slots that it wrote."""

from __future__ import annotations

import torch

from draftmark import Mode
from draftmark.geometry import AttentionShape
from draftmark_contract.check import ContractViolation
from draftmark_contract.harness.assertions import assert_stored, wrong_elements
from draftmark_contract.oracle.attention import attend
from draftmark_contract.oracle.truth import Row, enumerate_truth

from .driver import ForwardResult
from .requests import Placed


def visible(placed: Placed, step: int) -> dict[Row, tuple[int, ...]]:
    """Return for each row the KV slots to which it must attend."""
    scene = placed.scene
    if scene.mode is not Mode.DRAFT:
        return enumerate_truth(placed.requests, placed.setup.page_size, scene.window).visible
    found = {}
    for n, one in enumerate(placed.requests):
        oldest = max(0, one.prefix + step - scene.window) if scene.window >= 0 else 0
        for branch in range(placed.setup.topk):
            own = [placed.draft_slot(n, branch, s) for s in range(step + 1) if one.prefix + s >= oldest]
            found[n, branch] = (*sorted((*placed.slots[n][oldest : one.prefix], *own)),)
    return found


def check_rows(ran: ForwardResult, bug: str = "") -> None:
    """Check that live rows equal float64 attention within rounding, and that padding rows are finite.

    Raises:
        ContractViolation: the error describes the first wrong row.
    """
    placed, scene = ran.placed, ran.placed.scene
    shape = AttentionShape(
        ran.heads.num_qo_heads,
        ran.heads.num_kv_heads,
        ran.heads.head_dim,
        placed.setup.page_size,
        q_dtype=ran.heads.dtype,
        kv_dtype=ran.heads.dtype,
        window_left=scene.window,
        logits_soft_cap=scene.soft_cap,
        softmax_scale=ran.heads.scale,
        value_dim=ran.heads.value_width,
        latent=ran.heads.value_dim > 0,
    )
    rows, seen = placed.rows, visible(placed, ran.step)
    k, v = (pool.clone() for pool in ran.before)
    live = len(rows)
    where = torch.tensor(ran.writes[:live], dtype=torch.int64)
    k[where], v[where] = ran.k[:live], ran.v[:live]
    answer = attend(ran.q[:live], k, v, seen, rows, shape)
    wrong, _ = wrong_elements(ran.out[:live], answer, shape)
    if wrong.any():
        _report(ran, rows, seen, answer.out, wrong, bug)
    if not bool(ran.out.isfinite().all()):
        bad = int((~ran.out.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ContractViolation(
            f"row {bad}, which belongs to a padding request, is not finite", batch=_describe(ran), bug=bug
        )


def _report(
    ran: ForwardResult,
    rows: list[Row],
    seen: dict[Row, tuple[int, ...]],
    expected: torch.Tensor,
    wrong: torch.Tensor,
    bug: str,
) -> None:
    bad = wrong.flatten(1).any(1).nonzero().flatten().tolist()
    first = bad[0]
    n, row = rows[first]
    head, dim = (int(one) for one in wrong[first].nonzero()[0])
    raise ContractViolation(
        f"request {n}, row {row} is not attention over the {len(seen[n, row])} tokens that it sees "
        f"({len(bad)} of {len(rows)} rows are wrong: {_list_rows(rows, bad)})",
        batch=_describe(ran),
        got=f"out[head {head}, {dim}] = {float(ran.out[first, head, dim]):.6f}",
        expected=f"{float(expected[first, head, dim]):.6f}",
        bug=bug,
    )


def check_stores(ran: ForwardResult) -> None:
    """Check that each row's K and V are in its slot, and that no other slot outside page 0 has changed.

    Raises:
        ContractViolation: the error names the wrong slots.
    """
    live, rows_of = len(ran.placed.rows), ran.placed.rows
    where = torch.tensor(ran.writes[:live], dtype=torch.int64)
    owners = dict(zip(ran.writes[:live], rows_of, strict=True))
    for name, rows, before, after in zip("KV", (ran.k, ran.v), ran.before, ran.after, strict=True):
        want = before.clone()
        want[where] = rows[:live]
        assert_stored(name, after, want, owners, _describe(ran), first=ran.placed.setup.page_size)


def _describe(ran: ForwardResult) -> str:
    scene, setup = ran.placed.scene, ran.placed.setup
    step = f" step {ran.step}" if scene.mode is Mode.DRAFT else ""
    more = f", window {scene.window}" if scene.window >= 0 else ""
    more += f", cap {scene.soft_cap}" if scene.soft_cap else ""
    if scene.mode is Mode.DRAFT:
        lines = [f"L={one.prefix}, {setup.topk} branches" for one in ran.placed.requests]
    else:
        lines = [str(one) for one in ran.placed.requests]
    head = f"{scene.name}: {scene.mode.value}{step}, page size {setup.page_size}{more}"
    return "\n      ".join([head, *(f"r{n}: {line}" for n, line in enumerate(lines))])


def _list_rows(rows: list[Row], bad: list[int], most: int = 6) -> str:
    shown = ", ".join(f"r{rows[one][0]} row {rows[one][1]}" for one in bad[:most])
    return shown + (", …" if len(bad) > most else "")
