"""Judges a backend's source mutants, records their results, and writes build/contract-mutation.md.

    python -m tools.mutation --backend reference --workers 2
    python -m tools.mutation --backend reference backend.ReferenceBackend.plan

Positional arguments are beginnings of mutant ids: they judge only those mutants again and keep the other results.
`--journal` keeps finished results, so an interrupted run continues. The journal starts anew when the package, the core
or the suite has changed. With `--sample 4` a survivor has passed four cases of each check. A later run without
`--sample` runs all other cases, unless a review accepts the survivor.

For a slow backend, `--draw 200` judges 200 of its mutants, spread evenly over its files and fixed by `--seed`.
`--cases 6` uses only six cases of each check. The page states both.
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
    """Judge mutants, report and record their results, and return 1 if reviews and survivors do not match."""
    args = _arguments()
    target = TARGETS[args.backend]
    made = target.mutations()
    every = drawn(made, args.draw, args.seed) if args.draw else made
    left = {one.id for one in made} - {one.id for one in every}
    reviewed = {name: one for name, one in reviews(target.name).items() if name not in left}
    plan = campaign.Plan(
        [one for one in every if one.id.startswith(tuple(args.begins) or ("",)) and not args.write_only],
        again=bool(args.begins),
        sample=args.sample,
        seconds=args.seconds,
        suite=of_each(suite.items(), args.cases) if args.cases else (),
        reviewed=set() if args.thorough else {name for name, one in reviewed.items() if one.kind is not Kind.HOLE},
        workers=args.workers,
    )
    torch.set_num_threads(1)  # a fork of a process with several threads can hang
    shown = {one.id: one for one in every}

    def report(one: Ended) -> None:
        mutant = shown[one.mutation]
        print(f"{one.status.value}: {mutant.id}: {mutant.before} → {mutant.after}  {one.item}", flush=True)

    journal = Journal(args.journal, target.name)
    campaign.run(target, plan, journal, report)
    ended = {name: one for name, one in journal.ended().items() if name in shown}
    judged_by = _judged_by(plan, identity(target)["suite"])
    page.record(args.results, target.name, every, ended, reviewed, judged_by, len(made))
    page.write(args.page, args.results)
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of mutant ids; all mutants if none is given")
    parser.add_argument("--backend", choices=TARGETS, default="reference")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=0, help="cases of each check to run on a mutant; 0 for all")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="with --sample: most CPU time that a survivor's items may take"
    )
    parser.add_argument("--draw", type=int, default=0, help="mutants to judge, evenly over the files; 0 for all")
    parser.add_argument("--seed", type=int, default=SEED, help="with --draw: seed of the draw")
    parser.add_argument("--cases", type=int, default=0, help="cases of each check in the whole run; 0 for all")
    parser.add_argument("--write-only", action="store_true", help="judge nothing; write the results of the journal")
    parser.add_argument("--thorough", action="store_true", help="run every item on reviewed survivors too")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="record of results")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="page to write")
    parser.add_argument("--journal", type=Path, default=Path("build/source-mutants"), help="folder of the journals")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
