"""Judges a backend's source mutants, records their results, and writes build/contract-mutation.md.

    python -m core.contract.tests.source_mutants --backend reference --workers 2
    python -m core.contract.tests.source_mutants --backend reference backend.ReferenceBackend.plan

Ids, or beginnings of them, judge only those mutants, anew, and keep the other results. What was decided is kept in
`--journal`, so that a run which was cut goes on; it starts anew when the package, the core or the suite has changed.
With `--sample 4` a survivor has met four cases of each check; a later run without it shows it all the others, unless
a review says that it survives rightly.

Of a slow backend, `--draw 200` judges so many of its mutants, evenly over its files, the same ones for one
`--seed`, and `--cases 6` uses so many cases of each check alone; the page says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

from . import campaign, page, suite
from .draw import SEED, drawn
from .journal import Journal, identity
from .judge import Ended
from .order import of_each
from .review import Kind, reviews
from .score import complaints, score
from .targets import TARGETS


def main() -> int:
    """Judge, tell, write; 1 when a survivor is not reviewed or a review has no survivor."""
    asked = _asked()
    target = TARGETS[asked.backend]
    made = target.mutations()
    every = drawn(made, asked.draw, asked.seed) if asked.draw else made
    left = {one.id for one in made} - {one.id for one in every}
    reviewed = {name: one for name, one in reviews(target.name).items() if name not in left}
    plan = campaign.Plan(
        [one for one in every if one.id.startswith(tuple(asked.begins) or ("",)) and not asked.write_only],
        again=bool(asked.begins),
        sample=asked.sample,
        seconds=asked.seconds,
        suite=of_each(suite.items(), asked.cases) if asked.cases else (),
        reviewed=set() if asked.thorough else {name for name, one in reviewed.items() if one.kind is not Kind.HOLE},
        workers=asked.workers,
    )
    torch.set_num_threads(1)  # forks of a process with threads may hang
    shown = {one.id: one for one in every}

    def tell(one: Ended) -> None:
        mutant = shown[one.mutation]
        print(f"{one.status.value}: {mutant.id}: {mutant.before} → {mutant.after}  {one.item}", flush=True)

    journal = Journal(asked.journal, target.name)
    campaign.run(target, plan, journal, tell)
    ended = {name: one for name, one in journal.ended().items() if name in shown}
    judged_by = _judged_by(plan, identity(target)["suite"])
    page.record(asked.results, target.name, every, ended, reviewed, judged_by, len(made))
    page.write(asked.page, asked.results)
    whole = score(every, ended, reviewed)
    wrong = complaints(every, ended, reviewed)
    print(*wrong, sep="\n")
    print(
        f"{target.name}: {whole.killed} of {whole.judged - whole.stillborn} killed, "
        f"{whole.made - whole.judged} of {whole.made} not run yet"
    )
    return 1 if wrong else 0


def _judged_by(plan: campaign.Plan, digest: str) -> str:
    every = len(suite.items())
    items = f"{len(plan.suite)} of {every} items, some of each check" if plan.suite else f"{every} items"
    return f"contract {CONTRACT_MAJOR}.{CONTRACT_MINOR}, {items} (suite {digest})"


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of mutant ids; all when none is given")
    parser.add_argument("--backend", choices=TARGETS, default="reference")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=0, help="cases of each check that a mutant meets; 0 for all")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="with --sample: CPU time of a survivor's items at most"
    )
    parser.add_argument("--draw", type=int, default=0, help="mutants to judge, evenly over the files; 0 for all")
    parser.add_argument("--seed", type=int, default=SEED, help="with --draw: another draw")
    parser.add_argument("--cases", type=int, default=0, help="cases of each check that are used at all; 0 for all")
    parser.add_argument("--write-only", action="store_true", help="judge nothing: write what the journal has")
    parser.add_argument("--thorough", action="store_true", help="show reviewed survivors every item too")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="record of results")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="page to write")
    parser.add_argument("--journal", type=Path, default=Path("build/source-mutants"), help="folder of the journals")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
