"""Hand-made reviews of survivors, in reviewed.toml.

Each entry names mutants and gives their kind. A run fails on a survivor without an entry. It also fails on an entry
for a mutant that is killed or no longer made, because a review applies only to one text of a statement.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FILE = Path(__file__).with_name("reviewed.toml")


class Kind(StrEnum):
    """A reviewer's classification of a survivor (a mutant that no item kills)."""

    EQUIVALENT = "equivalent"
    """No caller within the contract can see a difference: results and buffers are equal."""
    COST = "cost"
    """Equal results for more time or memory. The contract limits buffers, but not time."""
    NARROWER = "narrower"
    """Correct, but it serves less: the verdict leaves out a profile, or names the refusals."""
    OUT_OF_REACH = "out of reach"
    """Wrong, but invisible in the sizing and host tiers. The reason names the place where it would show."""
    HOLE = "hole"
    """Wrong, and the suite should have failed it."""

    @property
    def harmless(self) -> bool:
        """True if the mutant still computes correct results and declares nothing false."""
        return self in (Kind.EQUIVALENT, Kind.COST, Kind.NARROWER)


@dataclass(frozen=True)
class Review:
    """A reviewer's entry for a survivor: its kind and the reason."""

    kind: Kind
    reason: str


def reviews(target: str, file: Path = FILE) -> dict[str, Review]:
    """Return the reviews of one target, by mutant id.

    Raises:
        ValueError: an unknown kind, or two entries for one mutant.
    """
    found: dict[str, Review] = {}
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", []):
        if entry["target"] != target:
            continue
        for mutant in entry["mutants"]:
            if mutant in found:
                raise ValueError(f"{file.name} reviews {mutant} of {target} twice; keep one entry")
            found[mutant] = Review(Kind(entry["kind"]), " ".join(entry["reason"].split()))
    return found
