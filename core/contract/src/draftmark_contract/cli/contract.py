"""`draftmark contract NAME`: runs the contract suite on a plugin's backend and prints the verdict in one line."""

from __future__ import annotations

import argparse

from draftmark_tools.cli.errors import ArgumentError

from .judging import add_options, carry_out, check_options, limit_of

SUMMARY = "judge a backend: every check, one verdict"
EXAMPLES = """\
examples:
  draftmark contract reference
  draftmark contract my_npu --tier sizing
  draftmark contract cuda_triton --tier device --json verdict.json
  draftmark contract my_npu -k padding
  draftmark contract my_npu --item 'numerics.match_float64[mandatory-decode]'
  draftmark contract my_npu --sample 3 --workers 2
  draftmark contract my_npu --sample 3 --allow-part
  draftmark contract my_npu -k random_history --seed 20261122
  draftmark contract my_npu --journal run.jsonl
  draftmark contract my_npu --journal run.jsonl --tier device --json v.json

Each tier includes the ones before it: sizing (integers and proofs), host (CPU
tensors, recorded graphs), device (the hardware). The verdict names the tiers
that were not run. A run of some items of a tier (-k, --item, --sample) gives no
verdict and exit code 2, or 0 with --allow-part if no item failed.
With --journal a run continues where the last run with that file ended, also on
another machine: for example, two tiers on any machine and the third one on the
machine with the device."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="backend to judge; `draftmark list` shows all")
    parser.add_argument("--tier", choices=("sizing", "host", "device"), default="host", help="highest tier to run")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the suite and return its exit code."""
    from ..check import Tier
    from ..runner.plugin import environment, opening

    check_options(args)
    # --item accepts --device at any tier: the command that repeats a failed item names the device of the failed run.
    if args.device and not args.item and args.tier != Tier.DEVICE:
        raise ArgumentError(f"--device {args.device} needs --tier device; the {args.tier} tier runs on the CPU")
    tier = Tier(args.tier)
    variables = environment(tier, args.workers, args.seed)
    opened = opening(args.name, tier, args.device, args.item, limit_of(args), variables)
    return carry_out(args, args.name, opened, tier.includes)
