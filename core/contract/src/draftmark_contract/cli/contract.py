"""`draftmark contract NAME`: judge a backend, a vendor's included, and say so in one line."""

from __future__ import annotations

import argparse

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

Tiers build on each other: sizing (integers and proofs), host (CPU tensors,
recorded graphs), device (the hardware). A tier that was not run limits the
verdict and is printed. With --journal a run goes on where the last one with
that file ended: two tiers on any machine, the third on the one with the
device."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="a backend; `draftmark list` shows them")
    parser.add_argument("--tier", choices=("sizing", "host", "device"), default="host", help="run up to this tier")
    parser.add_argument("--device", help="torch device of the device tier, e.g. cuda:1")
    parser.add_argument("--json", metavar="FILE", help="write the verdict with every item")
    parser.add_argument("--record", metavar="FILE", help="write the verdict in short, as a repository keeps it")
    parser.add_argument("--html", metavar="FILE", help="write a report, one self-contained page")
    parser.add_argument("--journal", metavar="FILE", help="keep results here; a later run goes on, elsewhere too")
    parser.add_argument("-k", metavar="EXPRESSION", help="run some items only (pytest's -k); gives no verdict")
    parser.add_argument(
        "--item", action="append", default=[], metavar="ID", help="run this very item; gives no verdict"
    )
    drawn = "what the drawn histories follow from (default: 0); a nightly run changes it"
    parser.add_argument("--seed", type=int, metavar="N", help=drawn)
    few = "at most N cases of each check, evenly spread; gives no verdict"
    parser.add_argument("--sample", type=int, default=0, metavar="N", help=few)
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes (needs pytest-xdist)")
    known = "exit code 0 for a backend that conforms with known failures"
    parser.add_argument("--allow-known", action="store_true", help=known)


def run(args: argparse.Namespace) -> int:
    """Run the suite; its exit code is the command's."""
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
    )
