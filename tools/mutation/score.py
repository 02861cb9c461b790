"""Counts a target's mutants by result, and finds missing or outdated reviews."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .judge import Ended, Status
from .mutation import Mutation
from .review import Kind, Review

LIVE = (Status.SURVIVED, Status.UNREACHED, Status.NARROWER)
DEAD = (Status.KILLED, Status.HUNG)


@dataclass(frozen=True)
class Score:
    """Counts mutants by their result.

    Attributes:
        made: all mutants.
        judged: mutants that were run.
        stillborn: mutants that cannot be loaded as backends; they do not count.
        killed: mutants with a failing item, hung ones included.
        kinds: survivors by the kind in their review; None for survivors without a review.
    """

    made: int
    judged: int
    stillborn: int
    killed: int
    kinds: Mapping[Kind | None, int]

    @property
    def survived(self) -> int:
        """Number of mutants that load and are not killed."""
        return sum(self.kinds.values())

    @property
    def raw(self) -> float:
        """Killed mutants divided by mutants that load."""
        return self.killed / max(1, self.judged - self.stillborn)

    @property
    def reviewed(self) -> float:
        """Killed mutants divided by mutants that load. Survivors that a review found harmless are not counted."""
        harmless = sum(count for kind, count in self.kinds.items() if kind is not None and kind.harmless)
        return self.killed / max(1, self.judged - self.stillborn - harmless)


def score(some: Sequence[Mutation], ended: Mapping[str, Ended], reviewed: Mapping[str, Review]) -> Score:
    """Count the results of some mutants; mutants without a result count only in `made`."""
    mine = [ended[one.id] for one in some if one.id in ended]
    status = Counter(one.status for one in mine)
    live = [one.mutation for one in mine if one.status in LIVE]
    kinds = Counter(reviewed[one].kind if one in reviewed else None for one in live)
    return Score(len(some), len(mine), status[Status.STILLBORN], sum(status[one] for one in DEAD), kinds)


def complaints(every: Sequence[Mutation], ended: Mapping[str, Ended], reviewed: Mapping[str, Review]) -> list[str]:
    """Return the reasons to fail a run: survivors without a review, and reviews without a survivor."""
    ids = {one.id for one in every}
    found = [
        f"{one.id} survives and is not reviewed: {one.before} → {one.after}"
        for one in every
        if one.id in ended and ended[one.id].status in LIVE and one.id not in reviewed
    ]
    found += [
        f"{name} is reviewed, but no longer made: remove it from reviewed.toml" for name in reviewed if name not in ids
    ]
    found += [
        f"{name} is reviewed, but it is {ended[name].status.value}: remove it from reviewed.toml"
        for name in reviewed
        if name in ids and name in ended and ended[name].status not in LIVE
    ]
    return found
