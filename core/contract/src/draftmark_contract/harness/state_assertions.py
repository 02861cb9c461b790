"""Assertions on outputs and stored states of layers with recurrent state."""

from __future__ import annotations

import torch

from ..cases.forwards import ForwardCase
from ..check import ContractViolation, Wrong
from .poison import poison_in
from .state_expected import Bounded, half_spacing


def assert_rows(got: torch.Tensor, want: Bounded | None, forward: ForwardCase, what: str, finite: bool) -> None:
    """Check rows of an output within their bounds, and on request that padded rows are finite."""
    live, found = forward.live_rows, got.cpu().double()
    if want is not None:
        wrong = ~((found[:live] - want.value).abs() <= want.bound)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            n, row = forward.rows[at[0]]
            rows = sorted({forward.rows[i] for i in wrong.flatten(1).any(1).nonzero()[:, 0].tolist()})
            raise ContractViolation(
                f"{what} is wrong in (request, row) {rows[:8]}",
                batch=forward,
                got=f"{float(found[at]):.6g} at request {n}, row {row}, element {list(at[1:])}",
                expected=f"{float(want.value[at]):.6g} ± {float(want.bound[at]):.2g}",
                poison=poison_in(float(found[at])) if bool(found[at].isnan()) else "",
                formula="each row from its parent's state, in float64 (draftmark_contract.oracle.state)",
                wrong=Wrong("output", rows),
            )
    if finite and not bool(torch.isfinite(found[live:]).all()):
        raise ContractViolation(
            f"{what} in padded rows is not finite, or was not written",
            batch=forward,
            got="NaN or infinity",
            expected="finite values in every row",
            poison=poison_in("NaN or infinity"),
            bug="sglang#30974, flashinfer#2793",
        )


def assert_state(got: torch.Tensor, want: Bounded, dtype: str, forward: ForwardCase, where: str) -> None:
    """Check a stored state within its bound and one rounding to `dtype`."""
    bound = want.bound[..., None] + half_spacing(want.value, dtype)
    wrong = ~((got.double() - want.value).abs() <= bound)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ContractViolation(
            f"{where} stores another state than the one after the request's tokens",
            batch=forward,
            got=f"{float(got[at]):.6g} at (head, value, key) {list(at)}, {int(wrong.sum())} of {wrong.numel()} wrong",
            expected=f"{float(want.value[at]):.6g} ± {float(bound[at]):.2g}",
            poison=poison_in(float(got[at])) if bool(got[at].isnan()) else "",
            formula="the state after the last kept row, rounded once to state_dtype",
            bug="vllm#39273, sglang#26351",
        )
