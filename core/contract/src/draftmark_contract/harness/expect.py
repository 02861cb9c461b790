"""What must hold after a forward. Each function raises `ContractViolation` with the batch and the two values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftmark.batch import ForwardBatch

from ..cases.forwards import ForwardCase
from ..check import ContractViolation
from ..oracle.attention import tolerance
from ..oracle.decode import Decoded
from ..oracle.problem import DecodeProblem
from .harness import Expected, Harness, answer_for, truth_of
from .tensors import raw


def metadata(
    harness: Harness, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None
) -> Decoded:
    """The buffers (now, or as copied earlier) name exactly the slots that each live row sees and writes."""
    try:
        found = harness.decoded(forward, batch, arena)
    except DecodeProblem as problem:
        raise _violation(
            problem.what,
            forward,
            problem.got,
            problem.expected,
            formula="the backend's MetadataSpec and draftmark.buffers.Role",
        ) from problem
    truth = truth_of(forward)
    for row in forward.rows[: forward.live_rows]:
        if not found.opaque and found.visible[row] != truth.visible[row]:
            what = f"row {row[1]} of request {row[0]} sees other KV slots than its prefix and its tail mask name"
            raise _slots(what, forward, found.visible[row], truth.visible[row])
        if found.writes is not None and found.writes[row] != truth.writes[row]:
            what = f"row {row[1]} of request {row[0]} would be stored at another KV slot than its own"
            raise _violation(what, forward, found.writes[row], truth.writes[row], formula="slot of token L + T - q + j")
    return found


def padding(forward: ForwardCase, found: Decoded) -> None:
    """Whatever the buffers say of padded rows, it names null pages only."""
    end = forward.null_pages * forward.geometry.attention.page_size
    for row in forward.rows[forward.live_rows :]:
        named = [*found.visible.get(row, ()), *([found.writes[row]] if found.writes and row in found.writes else [])]
        outside = [slot for slot in named if not 0 <= slot < end]
        if outside:
            raise _violation(
                f"row {row[1]} of padded request {row[0]} names KV slots outside the null pages",
                forward,
                outside,
                f"slots 0 … {end - 1}",
                formula="a padded request has prefix 0 and a page table of null pages",
                bug="sglang#24743, lmdeploy#4569",
            )


def stored(harness: Harness, forward: ForwardCase, expected: Expected) -> None:
    """The pool holds the live rows at their slots and is otherwise untouched, but for null pages."""
    start = forward.null_pages * forward.geometry.attention.page_size
    pools = (("k", harness.tensors.cache.k, expected.k), ("v", harness.tensors.cache.v, expected.v))
    for name, pool, want in pools:
        got = pool.view_as(want)
        changed = (raw(got[start:]) != raw(want[start:])).flatten(1).any(1).nonzero().flatten()
        if changed.numel():
            slots = (changed[:8] + start).tolist()
            owners = [row for row, slot in expected.truth.writes.items() if slot in slots]
            raise _violation(
                f"the {name} cache differs from the one where each row was stored at its own slot",
                forward,
                f"differences at slots {slots}",
                f"none; of these, rows {owners} own one" if owners else "none; no row owns any of these slots",
                formula="row j is stored at the slot of token L + T - q + j",
                bug="sglang#24743",
            )
        if not bool(torch.isfinite(got[:start].float()).all()):
            raise _violation(f"a null page of {name} is not finite", forward, "NaN or infinity", "finite values")


def output(forward: ForwardCase, expected: Expected, out: torch.Tensor, what: str = "the output") -> None:
    """Live rows are within rounding of float64; padded rows are finite."""
    live, dtype = forward.live_rows, forward.geometry.attention.q_dtype
    bound = tolerance(expected.answer, dtype, forward.geometry.attention)[:live]
    error = (out[:live].to(bound.device).double() - expected.answer.out[:live]).abs()
    wrong = ~(error <= bound)
    if bool(wrong.any()):
        number, head, dim = (int(i) for i in wrong.nonzero()[0])
        n, row = forward.rows[number]
        rows = sorted({forward.rows[i] for i in wrong.nonzero()[:, 0].tolist()})
        raise _violation(
            f"{what} is wrong in (request, row) {rows[:8]}",
            forward,
            f"{float(out[number, head, dim]):.6g} at request {n}, row {row}, head {head}, dim {dim}",
            f"{float(expected.answer.out[number, head, dim]):.6g} ± {float(bound[number, head, dim]):.2g}",
            formula="softmax over the row's visible slots, in float64 (draftmark_contract.oracle.attention)",
        )
    finite_padding(forward, out, what)


def sparse(harness: Harness, forward: ForwardCase, out: torch.Tensor) -> None:
    """As `stored` and `output`, for a pool too large to copy: looks only at the slots that the forward touches."""
    truth, cache = truth_of(forward), harness.tensors.cache
    q, k, v, _ = harness.tensors.rows(forward)
    flat = [pool.view(-1, *pool.shape[2:]) for pool in (cache.k, cache.v)]
    for number, row in enumerate(forward.rows[: forward.live_rows]):
        for name, pool, rows in zip("kv", flat, (k, v), strict=True):
            if not torch.equal(pool[truth.writes[row]], rows[number].to(pool.dtype)):
                what = f"row {row[1]} of request {row[0]} was not stored in the {name} cache at its slot"
                raise _violation(what, forward, "other values", f"its {name} at slot {truth.writes[row]}")
    live = {row: truth.visible[row] for row in forward.rows[: forward.live_rows]}
    answer = answer_for(forward, q, flat, live, harness.tensors)
    output(forward, Expected(truth, flat[0], flat[1], answer), out)


def finite_padding(forward: ForwardCase, out: torch.Tensor, what: str = "the output") -> None:
    """Every padded row was written, with finite values."""
    if not bool(torch.isfinite(out[forward.live_rows :].float()).all()):
        raise _violation(
            f"{what} of padded rows is not finite, or was not written",
            forward,
            "NaN or infinity",
            "finite values in every row",
            bug="vllm#57094, vllm#56922",
        )


def guards(harness: Harness, forward: ForwardCase) -> None:
    """No byte before or behind any buffer changed."""
    from draftmark.errors import GuardError

    try:
        harness.arena.check()
    except GuardError as error:
        raise _violation(
            f"bytes around {', '.join(error.names)} were overwritten",
            forward,
            "a write outside the buffer",
            "every write inside its buffer",
            formula="the buffer's declared shape",
            bug="sglang#27338, sglang#22778",
        ) from error


def forward_holds(
    harness: Harness, forward: ForwardCase, batch: ForwardBatch, what: str = "the output"
) -> torch.Tensor:
    """Run one eager forward that is already on the tensors, and check everything above."""
    expected = harness.expected(forward)
    out = harness.run(forward, batch)
    found = metadata(harness, forward, batch)
    padding(forward, found)
    stored(harness, forward, expected)
    output(forward, expected, out, what)
    guards(harness, forward)
    return out


def _slots(what: str, forward: ForwardCase, got: tuple[int, ...], want: tuple[int, ...]) -> ContractViolation:
    missing = sorted(set(want) - set(got))
    extra = sorted(set(got) - set(want))
    twice = sorted({slot for slot in got if got.count(slot) > 1})
    shown = ", ".join(f"{k} {v[:12]}" for k, v in (("missing", missing), ("extra", extra), ("twice", twice)) if v)
    formula = "the prefix [0, L) and the row's tail ancestors, within the window"
    return _violation(what, forward, shown, f"{len(want)} slots", formula=formula)


def _violation(
    what: str, forward: ForwardCase, got: object, expected: object, *, formula: str = "", bug: str = ""
) -> ContractViolation:
    return ContractViolation(what, batch=forward, got=got, expected=expected, formula=formula, bug=bug)
