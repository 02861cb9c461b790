"""Runs rounds on an engine's layer and on the oracle, and compares outputs, states, windows and other slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...check import ContractViolation
from ...harness.opening import open_harness
from ...oracle.state import SequentialState
from .driver import Kind, Part, Round, StateCapabilities
from .layer import Layer, Rows, outputs_of, rows_of, weights_of


class StateLayerHarness:
    """Runs rounds on an engine's layer, and for each request on the oracle.

    It has the methods of `harness.state_harness.StateHarness` that a check uses.

    Args:
        caps: the engine's layer.
        layer: shape of the layer.
        num_slots: requests for which it has slots.
    """

    finite_padding = True

    def __init__(self, caps: StateCapabilities, layer: Layer, num_slots: int) -> None:
        self.caps, self.layer, self._seed = caps, layer, 0
        self.weights = weights_of(layer, 0)
        self.driver = caps.open(layer, self.weights, caps.drafts, num_slots)
        self._oracles: dict[int, SequentialState] = {}
        self._said: list[str] = []

    def place(self, one: Round) -> Round:
        """Return the round: an engine chooses its own slots."""
        return one

    def load(self, one: Round, seed: int = 0) -> Rows:
        """Begin the round's new requests, and draw its rows. Each round of a sequence has its own."""
        for request in one.starts:
            self.driver.start(request)
            shape = self.layer.shape
            state = torch.zeros(shape.num_heads, shape.value_dim, shape.key_dim)
            window = torch.zeros(shape.conv_channels, self.layer.window)
            self._oracles[request] = SequentialState(state, window, delta=self.layer.delta)
            self._said.append(f"request {request} starts")
        self._seed += 1
        return rows_of(self.layer, one.rows, 1000 + self._seed)

    def spoil_padding(self, one: Round) -> None:
        """Do nothing: an engine fills its own padding rows."""

    def assert_rounds(self, rounds: Sequence[Round]) -> None:
        """Run the rounds of a sequence, and check each."""
        for one in rounds:
            self.assert_forward(one, self.load(one))

    def assert_forward(self, one: Round, rows: Rows) -> torch.Tensor:
        """Run a round and check its outputs, the states that it leaves, and every other slot.

        Raises:
            ContractViolation: a row, a state, a window or another slot is wrong.
        """
        self._said.append(str(one))
        live = [part.request for part in one.parts]
        before = self.driver.others(live)
        out = self.driver.run(one, rows)
        start = 0
        for part in one.parts:
            end = start + part.rows
            right = outputs_of(
                self.layer, self.weights, self._oracles[part.request], rows.part(start, end), part.parents
            )
            self._check_rows(part, out[start:end].double(), right)
            start = end
        if not torch.equal(before, self.driver.others(live)):
            raise self._violation("the round changes slots that belong to no request of it", "other bytes", "no change")
        done = [part for part in one.parts if part.kind is not Kind.VERIFY]
        for part in done:
            self._oracles[part.request].keep(part.rows - 1)
        self.check_states([part.request for part in done])
        if one.kept:
            self.commit(dict(one.kept))
        return out

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Keep rows of the last round's verifies, and check the states.

        Args:
            paths: rows on the accepted path of each request, the first row first.
        """
        self._said.append("; ".join(f"request {name} accepts rows {list(path)}" for name, path in paths.items()))
        self.driver.commit(paths)
        for request, path in paths.items():
            self._oracles[request].keep(path[-1])
        self.check_states(list(paths))

    def check_states(self, requests: Sequence[int]) -> None:
        """Check what the next forward of each request starts from.

        Raises:
            ContractViolation: a state or a window is wrong.
        """
        for request in requests:
            state, window = self.driver.state(request)
            oracle = self._oracles[request]
            assert oracle.state is not None and oracle.window is not None
            if not torch.equal(window.double(), oracle.window):
                wrong = (window.double() != oracle.window).any(0).nonzero().flatten().tolist()
                raise self._violation(
                    f"the convolution's window of request {request} is wrong",
                    f"other inputs in columns {wrong} of {oracle.window.shape[1]}",
                    "the last committed rows, bit for bit",
                )
            error = _error(state.double(), oracle.state)
            if not bool((error <= self.caps.rounded).all()):
                raise self._violation(
                    f"the state of request {request} is wrong",
                    f"a relative error of {float(error.max()):.3g} in head {int(error.argmax())}",
                    f"at most {self.caps.rounded:g}",
                )

    def _check_rows(self, part: Part, got: torch.Tensor, right: torch.Tensor) -> None:
        error = (got - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(right.norm(dim=-1).mean())
        if not bool((error <= self.caps.rounded).all()):
            wrong = (~(error <= self.caps.rounded)).any(1).nonzero().flatten().tolist()
            raise self._violation(
                f"{len(wrong)} of {part.rows} rows of request {part.request} are wrong",
                f"rows {wrong}, a relative error of {float(error[wrong[0]].max()):.3g} in the first",
                f"at most {self.caps.rounded:g}",
            )

    def _violation(self, what: str, got: str, expected: str) -> ContractViolation:
        said = "\n      ".join(f"{number}. {line}" for number, line in enumerate(self._said, 1))
        shape, rows = self.layer.shape, self.caps.drafts
        head = (
            f"{self.layer.family} layer, {shape.num_heads} heads, {shape.conv_kernel} taps, verifies up to {rows} rows"
        )
        return ContractViolation(what, batch=f"{head}\n      {said}", got=got, expected=expected)


def _error(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each head's state."""
    error: torch.Tensor = (got - right).flatten(1).norm(dim=-1) / right.flatten(1).norm(dim=-1).clamp_min(1e-6)
    return error


@open_harness.register(StateCapabilities)
def _(caps: StateCapabilities, geometry: Layer, num_slots: int) -> StateLayerHarness:
    return StateLayerHarness(caps, geometry, num_slots)
