"""Computes the result of a forward of layers with recurrent state: outputs, and slots before and after a commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from draftmark.geometry import Gate, Mode, Recurrence, StateShape

from ..cases.forwards import ForwardCase
from ..oracle.attention import UNIT
from ..oracle.formulas import checkpoint
from ..oracle.history import NO_PARENT, Request
from ..oracle.state import FLOAT32, SequentialState
from .state_tensors import StateRows, StateTensors

Place = tuple[int, int]
"""A layer and a slot."""
EXACT = {**UNIT, "float64": 2.0**-53}
"""Unit roundoff of each dtype."""
SUBNORMAL = {"float16": 2.0**-25}
"""Half the spacing of the smallest numbers of a dtype, if a test meets such numbers."""
SLOPE, SUM = 1.1, 8
"""Steepest slope of SiLU; roundings of a convolution's sum, in addition to one for each tap."""
ROUNDED = 8
"""Roundings of operands to the activations' dtype that a prompt may add up to. Kernels that multiply chunks of 64 rows
reached 2.0 in the states and 1.2 in the outputs of 200 rows."""
LEAVES_STATE = (Mode.EXTEND, Mode.DECODE)
"""Modes with rows that write the slot themselves."""


@dataclass(frozen=True)
class Bounded:
    """A float64 value, with the largest error of a right result."""

    value: torch.Tensor
    bound: torch.Tensor

    @staticmethod
    def joined(parts: list[Bounded]) -> Bounded | None:
        """Return the parts one after another, or None without any."""
        if not parts:
            return None
        return Bounded(torch.cat([one.value for one in parts]), torch.cat([one.bound for one in parts]))


@dataclass(frozen=True)
class SlotAnswer:
    """Holds what one slot stores in one layer: its state, and its window, which is exact. None where there is none."""

    state: Bounded | None
    window: torch.Tensor | None


@dataclass
class StateExpected:
    """Expected result of one forward.

    Attributes:
        before: all slots as integers before the forward, and before the rounds that have not run yet.
        convolved, out: outputs of the live rows of each layer; None where the layer has none.
        verified: slots that rows of the forward write themselves.
        committed: slots after the commit, `verified` included. Every other slot keeps its bytes.
    """

    before: dict[str, torch.Tensor]
    convolved: list[Bounded | None] = field(default_factory=list)
    out: list[Bounded | None] = field(default_factory=list)
    verified: dict[Place, SlotAnswer] = field(default_factory=dict)
    committed: dict[Place, SlotAnswer] = field(default_factory=dict)


def state_expected(forward: ForwardCase, tensors: StateTensors, after: StateExpected | None = None) -> StateExpected:
    """Return the expected result of a forward that is loaded into the tensors. Call it before the backend runs.

    Args:
        after: expected result of the rounds before, if they have not run yet.
    """
    earlier = after.committed if after else {}
    found = StateExpected(after.before if after else tensors.bits())
    found.verified, found.committed = dict(earlier), dict(earlier)
    for layer, rows in enumerate(tensors.layers):
        convolved, out, first = list[Bounded](), list[Bounded](), 0
        for request in forward.requests[: forward.live]:
            here = slice(first, first + request.rows)
            first += request.rows
            rounds = tensors.state_geometry.state.round_prompts and forward.mode is Mode.EXTEND
            one = _Oracle(request, tensors, layer, earlier.get((layer, request.pages[0])), rounds)
            if rows.x is not None:
                convolved.append(one.convolve(rows, here))
            if rows.q is not None:
                out.append(one.recur(rows, here))
            for slot, row in _kept(forward, request):
                found.committed[layer, slot] = one.leaves(row)
                if forward.mode in LEAVES_STATE and slot == request.pages[0]:
                    found.verified[layer, slot] = found.committed[layer, slot]
        found.convolved.append(Bounded.joined(convolved))
        found.out.append(Bounded.joined(out))
    return found


def half_spacing(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return half the distance between neighboring numbers of a dtype around each value."""
    exponent = torch.frexp(value)[1] - 1
    return torch.ldexp(torch.full_like(value, EXACT[dtype]), exponent) + SUBNORMAL.get(dtype, 0.0)


def _kept(forward: ForwardCase, request: Request) -> Iterator[tuple[int, int]]:
    """Yield each slot that a round writes for a request, with the row after which it stores the state."""
    own = forward.mode in LEAVES_STATE
    path = [*range(request.rows)] if own else _path(request)
    if not path:
        return
    yield request.pages[0], path[-1]
    interval = forward.geometry.limits.state_interval
    at = checkpoint(request.prefix, len(path), interval) - request.prefix if interval else 0
    if at > 0 and request.save and (not own or at == len(path)):
        yield request.save, path[at - 1]


def _path(request: Request) -> list[int]:
    return [] if request.leaf == NO_PARENT else request.lineage(request.leaf)[::-1]


class _Oracle:
    """Runs the oracle on one request in one layer, and bounds the rounding errors of a right backend.

    Args:
        rounds: products may round their operands to the activations' dtype.
    """

    def __init__(
        self, request: Request, tensors: StateTensors, layer: int, before: SlotAnswer | None, rounds: bool
    ) -> None:
        self.shape: StateShape = tensors.state_geometry.state
        self.eps = FLOAT32 if self.shape.compute_dtype == "float32" else 2.0**-53
        self.rounded = ROUNDED * EXACT[self.shape.dtype] if rounds else 0.0
        self.parents, self.error = request.parents, torch.zeros(1, dtype=torch.float64)
        state, window = (None if not pool.numel() else pool[layer, request.pages[0]].cpu() for pool in tensors.memory)
        if before is not None and before.state is not None:
            state = before.state.value
            self.error = before.state.bound + half_spacing(state, self.shape.state_dtype).norm(dim=-1)
        if before is not None and before.window is not None:
            window = before.window
        if not request.prefix:
            state, window = (None if one is None else torch.zeros_like(one) for one in (state, window))
            self.error = torch.zeros_like(self.error)
        self.run = SequentialState(state, window, delta=self.shape.recurrence is Recurrence.DELTA)

    def convolve(self, rows: StateRows, here: slice) -> Bounded:
        """Return the convolution of a request's rows."""
        s = self.shape
        assert rows.x is not None and rows.weight is not None and self.run.window is not None
        found = self.run.convolve(rows.x[here], self.parents, rows.weight, rows.bias, s.conv_silu)
        inputs = torch.cat((rows.x[here].cpu().double(), self.run.window.double().T)).abs().amax(0)
        size = rows.weight.abs().sum(-1).cpu() * inputs
        size = size if rows.bias is None else size + rows.bias.abs().cpu()
        bound = EXACT[s.dtype] * found.abs() + self.eps * (s.conv_kernel + SUM) * SLOPE * size
        return Bounded(found.double(), bound + SUBNORMAL.get(s.dtype, 0.0))

    def recur(self, rows: StateRows, here: slice) -> Bounded:
        """Return the recurrence of a request's rows."""
        s, run = self.shape, self.run
        q, k, v, decay, beta = rows.q, rows.k, rows.v, rows.log_decay, rows.beta
        assert q is not None and k is not None and v is not None and decay is not None
        decay = decay[None].expand(len(q), -1) if s.gate is Gate.CONSTANT else decay
        strengths = None if beta is None else beta[here]
        found = run.recur(q[here], k[here], v[here], decay[here], strengths, self.parents)
        if not len(found):
            return Bounded(found.double(), found.double())
        lengths = q[here].double().cpu().norm(dim=-1).repeat_interleave(s.heads_per_key, -1)[..., None]
        bounds = torch.stack([self._bound(row) for row in range(len(found))])
        return Bounded(found, EXACT[s.dtype] * found.abs() + bounds * lengths + SUBNORMAL.get(s.dtype, 0.0))

    def leaves(self, row: int) -> SlotAnswer:
        """Return what a slot stores that keeps the state of one row."""
        state = Bounded(self.run.states[row], self._bound(row)) if self.run.states else None
        window = self.run.windows[row].to(getattr(torch, self.shape.conv_dtype)) if self.run.windows else None
        return SlotAnswer(state, window)

    def _bound(self, row: int) -> torch.Tensor:
        return (self.eps * self.run.roundings[row] + self.rounded) * self.run.strain[row] + self.error
