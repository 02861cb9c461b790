"""A step as an engine runs it: a forward of the contract plus the engine's padding and upper bounds of lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from draftmark.geometry import Geometry, Mode

from ..cases.forwards import ForwardCase
from ..oracle.history import chain
from ..oracle.truth import Row, Truth, enumerate_truth


@dataclass(frozen=True)
class Step:
    """Holds one forward with the padding, length bounds and stored rows of an engine's step.

    Attributes:
        forward: the live requests. Drafts are chains if the engine has no trees.
        padding: number of padding requests after the live ones, each with `rows_each` rows.
        surplus: number of padding rows after the last request, added to reach a captured number of rows.
        loose: number of tokens by which the host's upper bounds exceed the lengths, up to the engine's maximum length.
        unstored: rows with slot -1, because the engine has already stored their KV.
    """

    forward: ForwardCase
    padding: int = 0
    surplus: int = 0
    loose: int = 0
    unstored: frozenset[Row] = frozenset()

    @property
    def geometry(self) -> Geometry:
        """Geometry that the forward was built for."""
        return self.forward.geometry

    @property
    def name(self) -> str:
        """Label of the forward."""
        return self.forward.name

    @property
    def mode(self) -> Mode:
        """Mode of the forward."""
        return self.forward.mode

    @property
    def num_pages(self) -> int:
        """Pages that the layer's memory must have."""
        return self.forward.num_pages

    @property
    def rows(self) -> list[Row]:
        """(request, row) of each live row, in order."""
        return self.forward.rows

    @property
    def live_rows(self) -> int:
        """Number of live rows."""
        return self.forward.live_rows

    @property
    def host(self) -> int:
        """The host's knowledge of the lengths: the excess of its upper bounds."""
        return self.loose

    @property
    def rows_each(self) -> int:
        """Number of rows per request, or 0 if requests have different numbers."""
        counts = {one.rows for one in self.forward.requests}
        return counts.pop() if len(counts) == 1 else 0

    @property
    def num_rows(self) -> int:
        """Number of rows that the layer receives, padding included."""
        return self.forward.live_rows + self.padding * self.rows_each + self.surplus

    @cached_property
    def truth(self) -> Truth:
        """KV slots that each live row sees, and the KV slot of its token."""
        a = self.geometry.attention
        return enumerate_truth(self.forward.requests, a.page_size, a.window_left)

    @property
    def writes(self) -> dict[Row, int]:
        """KV slot of each row that the layer stores. Rows with slot -1 are absent."""
        return {row: slot for row, slot in self.truth.writes.items() if row not in self.unstored}

    def __str__(self) -> str:
        more = {
            "padding requests": self.padding,
            "padding rows": self.surplus,
            "bounds above the lengths by": self.loose,
            "not stored": sorted(self.unstored),
        }
        said = ", ".join(f"{name} {value}" for name, value in more.items() if value)
        return f"{self.forward}" + (f"\n      {said}" if said else "")


def step_of(forward: ForwardCase, trees: bool = False, padding: int = 0, surplus: int = 0, loose: int = 0) -> Step:
    """Return a step with the live requests of a forward. Without `trees` every draft becomes a chain."""
    live = [one for one in forward.requests if one.live]
    if forward.mode is Mode.VERIFY and not trees:
        live = [replace(one, parents=chain(one.tail), masks=()) for one in live]
    causal = forward.causal or (forward.mode is Mode.VERIFY and not trees)
    return Step(replace(forward, requests=tuple(live), causal=causal), padding, surplus, loose)
