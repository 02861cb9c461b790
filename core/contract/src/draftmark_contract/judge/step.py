"""One step as an engine would run it: a forward of the contract, and what engines bring beside the live requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from draftmark.geometry import Geometry, Mode

from ..cases.forwards import ForwardCase
from ..oracle.history import chain
from ..oracle.truth import Row, Truth, enumerate_truth


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        forward: its live requests alone, with causal tails unless the engine has trees.
        padding: requests of nobody that a captured size has beside them, each with as many rows.
        surplus: rows of nobody behind the last request's, as a captured number of rows brings them.
        loose: by how much the host's bounds pass the lengths, as far as the engine lets a length grow.
        unstored: rows whose KV the engine has already, so that it gives slot -1.
    """

    forward: ForwardCase
    padding: int = 0
    surplus: int = 0
    loose: int = 0
    unstored: frozenset[Row] = frozenset()

    @property
    def geometry(self) -> Geometry:
        """Of the forward."""
        return self.forward.geometry

    @property
    def rows_each(self) -> int:
        """Rows of every request where each has as many; else 0."""
        counts = {one.rows for one in self.forward.requests}
        return counts.pop() if len(counts) == 1 else 0

    @property
    def num_rows(self) -> int:
        """Rows that the layer is given."""
        return self.forward.live_rows + self.padding * self.rows_each + self.surplus

    @cached_property
    def truth(self) -> Truth:
        """What each live row sees, and the slot of its token."""
        a = self.geometry.attention
        return enumerate_truth(self.forward.requests, a.page_size, a.window_left)

    @property
    def writes(self) -> dict[Row, int]:
        """The slot at which each row is stored; a row that is not stored has none."""
        return {row: slot for row, slot in self.truth.writes.items() if row not in self.unstored}

    def __str__(self) -> str:
        more = {
            "requests of nobody": self.padding,
            "rows of nobody": self.surplus,
            "bounds above the lengths by": self.loose,
            "not stored": sorted(self.unstored),
        }
        said = ", ".join(f"{name} {value}" for name, value in more.items() if value)
        return f"{self.forward}" + (f"\n      {said}" if said else "")


def step_of(forward: ForwardCase, trees: bool = False, padding: int = 0, surplus: int = 0, loose: int = 0) -> Step:
    """A step of a forward's live requests; without trees a verify tail is a chain."""
    live = [one for one in forward.requests if one.live]
    if forward.mode is Mode.VERIFY and not trees:
        live = [replace(one, parents=chain(one.tail), masks=()) for one in live]
    causal = forward.causal or (forward.mode is Mode.VERIFY and not trees)
    return Step(replace(forward, requests=tuple(live), causal=causal), padding, surplus, loose)
