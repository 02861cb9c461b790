"""Writes docs/contract-kills.md: which check kills which mutant. Run as ``python -m core.contract.tests.mutants``.

It runs the rows that today's suite has not judged, those first that none has, and writes the page after each: a run
that was cut goes on from there. A row meets the checks that the page names for it first, and all others only where
none of them fails any more; a new row of a stranger the check of its class.
``python -m core.contract.tests.mutants W X01`` looks only at the mutants whose id begins so. `--anew` runs what is of
today's suite too, and asks no page which checks come first (after a change of the mutants, or of the core).
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from draftmark_contract.runner.identity import SUITE, identity_of

from . import catalog, suite
from .kills_page import KillsPage, Pair
from .mutant import LAYOUTS

PAGE = Path(__file__).parents[4] / "docs" / "contract-kills.md"
MOST = 2
"""Killing checks that a row names."""
DIGITS = 12
"""Of the suite's digest, on the page."""


def main() -> int:
    """Run what is due, or the part of it that was asked for, and write the page; 1 when a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of mutant ids; all when none is given")
    parser.add_argument("--anew", action="store_true", help="rows of today's suite too, as if there were no page")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    page = KillsPage(asked.page, identity_of(suite.original(next(iter(LAYOUTS))))[SUITE][:DIGITS])
    due = [(one.id, layout) for one, layout in catalog.pairs()] if asked.anew else page.due()
    due = [pair for pair in due if pair[0].startswith(tuple(asked.begins) or ("",))]
    with ProcessPoolExecutor(asked.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(_killers, pair, () if asked.anew else page.killers(pair)): pair for pair in due}
        for ended in as_completed(running):
            one, layout = running[ended]
            checks = ended.result()
            print(f"{one} {layout}: {', '.join(checks) or 'SURVIVES'}", flush=True)
            page.note((one, layout), checks)
    page.write()
    survivors = [f"{one} in {layout}" for one, layout in page.survivors()]
    print(f"{page.counts()} Survivors: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


def _killers(pair: Pair, known: tuple[str, ...]) -> list[str]:
    mutant = next(one for one in catalog.MUTANTS if one.id == pair[0])
    of_class = catalog.KILLER.get(mutant.id)
    return suite.killed_by(mutant, pair[1], MOST, known or ((of_class,) if of_class else ()))


if __name__ == "__main__":
    sys.exit(main())
