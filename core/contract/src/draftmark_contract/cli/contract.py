"""`draftmark contract NAME`: runs the contract suite on a plugin's backend and prints the verdict in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

SUMMARY = "judge a backend: every check, one verdict"
EXAMPLES = """\
examples:
  draftmark contract reference
  draftmark contract my_npu --tier sizing
  draftmark contract cuda_triton --tier device --json verdict.json
  draftmark contract my_npu -k padding
  draftmark contract my_npu --item 'numerics.match_float64[mandatory-decode]'
  draftmark contract my_npu --sample 3 --workers 2
  draftmark contract my_npu -k random_history --seed 20261122
  draftmark contract my_npu --journal run.jsonl
  draftmark contract my_npu --journal run.jsonl --tier device --json v.json

Each tier includes the ones before it: sizing (integers and proofs), host (CPU
tensors, recorded graphs), device (the hardware). The verdict names the tiers
that were not run. With --journal a run continues where the last run with that
file ended, also on another machine: for example, two tiers on any machine and
the third one on the machine with the device."""


class _PrintSchema(argparse.Action):
    """Option that prints the schema and ends the command, as --version does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the JSON schema of the records, and end the command."""
        from ..schema import schema_text

        print(schema_text(), end="")
        parser.exit()
        raise AssertionError("exit raises SystemExit")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="backend to judge; `draftmark list` shows all")
    parser.add_argument("--tier", choices=("sizing", "host", "device"), default="host", help="highest tier to run")
    parser.add_argument("--device", help="torch device of the device tier, e.g. cuda:1")
    parser.add_argument("--json", metavar="FILE", help="write the full verdict with every item")
    parser.add_argument("--record", metavar="FILE", help="write the short record, as repositories keep it")
    schema = "print the JSON Schema of --json and --record, and of `draftmark judge --json`"
    parser.add_argument("--schema", action=_PrintSchema, nargs=0, help=schema)
    parser.add_argument("--html", metavar="FILE", help="write a report as one self-contained page")
    parser.add_argument("--journal", metavar="FILE", help="keep results in FILE; a later run with it continues")
    parser.add_argument("-k", metavar="EXPRESSION", help="run matching items only (pytest's -k); gives no verdict")
    parser.add_argument(
        "--item", action="append", default=[], metavar="ID", help="run only this item; gives no verdict"
    )
    drawn = "seed of the random histories (default: 0); nightly runs change it"
    parser.add_argument("--seed", type=int, metavar="N", help=drawn)
    few = "run at most N cases of each check, evenly spread; gives no verdict"
    parser.add_argument("--sample", type=int, default=0, metavar="N", help=few)
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="number of processes (needs pytest-xdist)")
    parser.add_argument("-x", action="store_true", dest="stop_at_first", help="stop at the first failed item")
    known = "exit with 0 if the backend conforms with known failures"
    parser.add_argument("--allow-known", action="store_true", help=known)


def run(args: argparse.Namespace) -> int:
    """Run the suite and return its exit code."""
    from ..runner.run import run_contract

    return run_contract(
        args.name,
        args.tier,
        json_path=args.json,
        html_path=args.html,
        k=args.k,
        device=args.device,
        workers=args.workers,
        sample=args.sample,
        journal_path=args.journal,
        items=args.item,
        record_path=args.record,
        allow_known=args.allow_known,
        seed=args.seed,
        stop_at_first=args.stop_at_first,
    )
