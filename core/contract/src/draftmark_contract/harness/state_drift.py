"""A long run of one request over recurrent state, with an oracle that is never set to the backend's state."""

from __future__ import annotations

import torch

from draftmark.geometry import Mode, Recurrence

from ..cases.state import verify
from ..check import ContractViolation
from ..oracle.history import NO_PARENT
from ..oracle.state import SequentialState
from .state_expected import EXACT
from .state_harness import StateHarness
from .state_tensors import StateRows

SLOWEST = 2e-4
"""Largest decay exponent of a token: a state forgets two thirds of an update in 5,000 tokens or more."""
ROUNDINGS = 1500
"""Roundings of float32 in units of the largest state. A decay close to 1 is rounded to the same side in every token."""
KEPT = (16, 16, 16, 5, 16, 1, 16, 16, 0, 16, 16, 15)
"""Accepted rows of the rounds, in turn."""
REUSED = 40
"""Rounds with the same random numbers, in another order and with other signs each time."""
LOOK = 125
"""Rounds between two comparisons."""


def assert_no_drift(harness: StateHarness, tokens: int) -> None:
    """Run rounds of a chain until `tokens` are committed, and compare the slot with the oracle on the way."""
    s, tensors = harness.geometry.state, harness.tensors
    state, window = (torch.zeros(one.shape[2:], dtype=torch.float64) for one in tensors.memory)
    oracle = SequentialState(state, window, delta=s.recurrence is Recurrence.DELTA)
    harness.start()
    length, number, largest = 0, 0, torch.zeros(1, dtype=torch.float64)
    while length < tokens:
        count = KEPT[number % len(KEPT)]
        forward = verify(harness.geometry, (length,), tree="chain", choice=lambda n, one, c=count: c - 1)  # type: ignore[misc]
        batch, rows = harness.set(forward), tensors.layers[0]
        if number % REUSED == 0:
            tensors.fill_rows(forward, number)
            decays = rows.log_decay[: forward.num_rows]  # type: ignore[index]
            decays *= SLOWEST / decays.abs().max()
        _mix(rows, forward.num_rows)
        harness.run(forward, batch)
        n, parents = slice(forward.num_rows), forward.requests[0].parents
        if rows.x is not None:
            oracle.convolve(rows.x[n], parents, rows.weight, rows.bias, s.conv_silu)  # type: ignore[arg-type]
        beta = None if rows.beta is None else rows.beta[n]
        oracle.recur(rows.q[n], rows.k[n], rows.v[n], decays, beta, parents)  # type: ignore[index]
        oracle.keep(count - 1 if count else NO_PARENT)
        largest = torch.maximum(largest, oracle.strain[0].max())
        length, number = length + count, number + 1
        if number % LOOK == 0 or length >= tokens:
            _compare(harness, oracle, largest, length, forward.requests[0].pages[0])


def _mix(rows: StateRows, count: int) -> None:
    """Exchange the inputs of the rows, and of some their signs, so that no round repeats one before it."""
    for name in ("x", "q", "k", "v"):
        one = getattr(rows, name)
        if one is not None:
            mixed = one[:count].roll(1, 0)
            mixed[::3] *= -1
            one[:count] = mixed


def _compare(harness: StateHarness, oracle: SequentialState, largest: torch.Tensor, length: int, slot: int) -> None:
    state, window = (one[0, slot].cpu().double() for one in harness.tensors.memory)
    assert oracle.state is not None and oracle.window is not None
    bound = ROUNDINGS * EXACT["float32"] * largest
    error = (state - oracle.state).abs().max()
    if harness.kernels and not (error <= bound and torch.equal(window, oracle.window)):
        raise ContractViolation(
            f"after {length:,} tokens the state has drifted from the state of the same tokens one by one",
            batch=f"{Mode.VERIFY.value} rounds of one request, {harness.geometry.state}",
            got=f"largest error {float(error):.3g}",
            expected=f"at most {float(bound):.3g}, and an exact window",
            formula="float32 arithmetic, and one rounding a round",
            bug="sglang#28695, sglang#33630",
            remedy="keep records and states in float32, and compute gates as the forward does",
        )
