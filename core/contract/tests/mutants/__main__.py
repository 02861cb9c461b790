"""Runs mutants against the contract suite. Run as ``python -m core.contract.tests.mutants``.

A row is one mutant in one metadata layout. The program runs the rows that the current suite has not judged. It stores
each result in kills.json, and writes the page of kills to build/. An interrupted run continues. A row first runs the
checks that killed the mutant before, and the other checks only if none of these fails. A new row of a mutant by an
outside author starts with the check for its class of defects.
``python -m core.contract.tests.mutants W X01`` runs only mutants with ids that begin with W or X01. `--anew` also runs
rows that the current suite has judged, and ignores the record (after a change of the mutants, or of the core).
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from draftmark_contract.runner.identity import SUITE, identity_of

from . import catalog, suite
from .classes import section
from .kills_page import DATA, KillsPage, Pair
from .mutant import LAYOUTS

PAGE = Path(__file__).parents[4] / "build" / "contract-kills.md"
MOST = 2
"""Largest number of killing checks that a row lists."""
DIGITS = 12
"""Number of characters of the suite's digest in the record."""


def main() -> int:
    """Run mutants that the current suite has not judged, and write the page; return 1 if a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of mutant ids; all when none is given")
    parser.add_argument("--anew", action="store_true", help="run rows of today's suite too, and ignore the record")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="record of results (default: kills.json)")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write (default: build/contract-kills.md)")
    args = parser.parse_args()
    page = KillsPage(args.data, today())
    due = [(one.id, layout) for one, layout in catalog.pairs()] if args.anew else page.due()
    due = [pair for pair in due if pair[0].startswith(tuple(args.begins) or ("",))]
    with ProcessPoolExecutor(args.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(_killers, pair, () if args.anew else page.killers(pair)): pair for pair in due}
        for ended in as_completed(running):
            one, layout = running[ended]
            checks = ended.result()
            print(f"{one} {layout}: {', '.join(checks) or 'SURVIVES'}", flush=True)
            page.note((one, layout), checks)
    page.save()
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text(page.page() + section(), encoding="utf-8")
    survivors = [f"{one} in {layout}" for one, layout in page.survivors()]
    print(f"{page.counts()} Survivors: {', '.join(survivors) or 'none'}. Page: {args.page}")
    return 1 if survivors else 0


def today() -> str:
    """Return the digest of the current suite, shortened as in kills.json."""
    return identity_of(suite.original(next(iter(LAYOUTS))))[SUITE][:DIGITS]


def _killers(pair: Pair, known: tuple[str, ...]) -> list[str]:
    mutant = next(one for one in catalog.MUTANTS if one.id == pair[0])
    of_class = catalog.KILLER.get(mutant.id)
    return suite.killed_by(mutant, pair[1], MOST, known or ((of_class,) if of_class else ()))


if __name__ == "__main__":
    sys.exit(main())
