"""The verdicts that people gave on survivors, in reviewed.toml.

Each entry names mutants and says what they are. A run fails on a survivor that no entry names, and on an entry whose
mutant does not survive any more or does not exist: a review speaks of one statement as it was read.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FILE = Path(__file__).with_name("reviewed.toml")


class Kind(StrEnum):
    """What a survivor is."""

    EQUIVALENT = "equivalent"
    """No caller within the contract can tell: the same results, the same buffers."""
    COST = "cost"
    """The same results for more time or memory; the contract bounds buffers, not that."""
    NARROWER = "narrower"
    """Right where it serves, and serves less: the verdict leaves that profile out, or names what was refused."""
    OUT_OF_REACH = "out of reach"
    """Wrong, but not where sizing or host tests could see it; the reason says where it would show."""
    HOLE = "hole"
    """Wrong, and the suite should have said so."""

    @property
    def harmless(self) -> bool:
        """Whether every result is right, and nothing is claimed that is not so."""
        return self in (Kind.EQUIVALENT, Kind.COST, Kind.NARROWER)


@dataclass(frozen=True)
class Review:
    """What one entry says of each of its mutants."""

    kind: Kind
    reason: str


def reviews(target: str, file: Path = FILE) -> dict[str, Review]:
    """Reviews of one target, by mutant.

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
