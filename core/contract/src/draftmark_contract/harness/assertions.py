"""Assertions that every harness makes about a forward: output, guard bytes, and bytes after `usage()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from draftmark.arena import Arena
from draftmark.errors import GuardError
from draftmark.geometry import AttentionShape

from ..cases.forwards import ForwardCase
from ..check import ContractViolation, Wrong
from ..oracle.attention import Answer, tolerance
from ..oracle.roundoffs import ROUNDOFFS
from ..oracle.truth import Row
from .poison import poison_in
from .pools import words
from .watch import bits_of


def wrong_elements(
    out: torch.Tensor, answer: Answer, attention: AttentionShape, roundoffs: int = ROUNDOFFS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare an output with float64.

    Args:
        out: ``[rows, heads, value_width]``, the first rows of the answer.
        roundoffs: bound of an element in 16 bit, in unit roundoffs (`tolerance`).

    Returns:
        True for each element that differs by more than rounding, and the largest difference that rounding allows. If
        the layer allows rows in e4m3, an element may equal the answer for exact rows or for rounded rows.
    """
    bound = tolerance(answer, attention.q_dtype, attention, roundoffs)[: len(out)]
    wrong = ~((out.to(bound.device).double() - answer.out[: len(out)]).abs() <= bound)
    if answer.rounded is not None:
        wrong &= wrong_elements(out, answer.rounded, attention, roundoffs)[0]
    return wrong, bound


def assert_output(
    out: torch.Tensor,
    answer: Answer,
    attention: AttentionShape,
    forward: ForwardCase,
    batch: object = None,
    what: str = "the output",
    roundoffs: int = ROUNDOFFS,
) -> None:
    """Check that live rows of `out` match float64 within rounding, and that the rows after them are finite.

    Args:
        batch: object that a violation prints; by default the forward.
        roundoffs: bound of an element in 16 bit, in unit roundoffs; the plugin declares another than the usual one.
    """
    live = forward.live_rows
    wrong, bound = wrong_elements(out[:live], answer, attention, roundoffs)
    if bool(wrong.any()):
        number, head, dim = (int(i) for i in wrong.nonzero()[0])
        of_number = forward.rows
        n, row = of_number[number]
        declared = (
            f"; the bound is {roundoffs} unit roundoffs, as the plugin's contract notes declare"
            if roundoffs != ROUNDOFFS
            else ""
        )
        rows = sorted(of_number[i] for i in wrong.flatten(1).any(dim=1).nonzero()[:, 0].tolist())
        raise ContractViolation(
            f"{what} is wrong in (request, row) {rows[:8]}",
            batch=batch or forward,
            got=f"{float(out[number, head, dim]):.6g} at request {n}, row {row}, head {head}, dim {dim}",
            expected=f"{float(answer.out[number, head, dim]):.6g} ± {float(bound[number, head, dim]):.2g}",
            poison=poison_in(float("nan")) if bool(out[number, head, dim].isnan()) else "",
            formula=f"softmax over the row's visible slots, in float64 (draftmark_contract.oracle.attention){declared}",
            wrong=Wrong("output", rows),
        )
    if not bool(torch.isfinite(out[live:].float()).all()):
        raise ContractViolation(
            f"{what} of padded rows is not finite, or was not written",
            batch=batch or forward,
            got="NaN or infinity",
            expected="finite values in every row",
            poison=poison_in("NaN or infinity"),
            bug="vllm#57094, vllm#56922",
        )


def assert_stored(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    owners: Mapping[int, Row],
    batch: object,
    *,
    first: int = 0,
    allowed: Callable[[int], bool] = lambda slot: False,
    more: str = "",
) -> None:
    """Check that each row is stored at its own KV slot, bit for bit, and that no other slot has changed.

    Args:
        name: name of the cache in the message.
        got, want: the cache as it is and as it must be, ``[slots, ...]``.
        owners: row of each slot that a row owns.
        batch: object that a violation prints.
        first: slots before this one may hold anything.
        allowed: returns True for a slot that may differ.
        more: further explanation of the expected value.
    """
    one, other = words(got[first:], want[first:])
    changed = (one != other).flatten(1).any(1).nonzero().flatten() + first
    slots = [slot for slot in changed.tolist() if not allowed(slot)]
    if not slots:
        return
    rows = [owners[slot] for slot in slots if slot in owners]
    shown = [owners[slot] for slot in slots[:8] if slot in owners]
    raise ContractViolation(
        f"the {name} cache differs from the expected one, in which each row is stored at its own slot",
        batch=batch,
        got=f"differences at slots {slots[:8]}" + (f" and {len(slots) - 8} more" if len(slots) > 8 else ""),
        expected=f"no difference; {f'rows {shown} own' if shown else 'no row owns'} some of these slots{more}",
        formula="row j is stored at the slot of token L + T - q + j; a row with slot -1 is not stored",
        bug="sglang#24743",
        wrong=Wrong("store", rows, extra=[slot for slot in slots[:8] if slot not in owners]),
    )


class BytesPastUsage:
    """Checks that a batch does not write a plugin-sized buffer after the bytes that `usage()` declares.

    Args:
        used: bytes that `usage()` declares, by buffer name. Other buffers are not checked.
    """

    def __init__(self, arena: Arena, used: Mapping[str, int]) -> None:
        self._arena, self._used, self._before = arena, used, {name: bits_of(arena[name]).clone() for name in used}

    def assert_unchanged(self, batch: object) -> None:
        """Raise a ContractViolation if a byte changed since the snapshot."""
        for name, before in self._before.items():
            start = self._used[name]
            changed = (bits_of(self._arena[name])[start:] != before[start:]).nonzero().flatten()
            if changed.numel():
                raise ContractViolation(
                    f"a forward writes buffer {name!r} past the bytes that usage() declares for it",
                    batch=batch,
                    got=f"a write to byte {start + int(changed[-1])} of {name!r}",
                    expected=f"writes to its first {start} bytes",
                    formula="usage(geometry, batch) of the plugin's contract notes",
                    bug="TRT-LLM#17026, vllm#40383",
                    remedy="compute the size of the buffer, and usage(), from what the kernels write",
                )


def assert_guards(arena: Arena, batch: object) -> None:
    """Check that no byte before or after any buffer changed."""
    try:
        arena.check()
    except GuardError as error:
        raise ContractViolation(
            f"bytes around {', '.join(error.names)} were overwritten",
            batch=batch,
            got="a write outside the buffer",
            expected="every write inside its buffer",
            formula="the buffer's declared shape",
            bug="sglang#27338, sglang#22778",
        ) from error
