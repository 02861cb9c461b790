"""The command `draftmark explain`: prints which kernels a backend launches for a batch, and why. Needs no device."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from draftmark.geometry import Geometry, Mode
from draftmark.kernels import BatchSize

from ..errors import SUCCESS, ArgumentError
from ..geometry_arguments import add_geometry_arguments, geometry_of
from ..rendering import Column, show, show_json, show_table, stdout_for_results

SCHEMA = 1
SUMMARY = "print which kernels a backend launches for a batch, and why; no device"
EXAMPLES = """\
examples:
  draftmark explain cuda_triton --mode decode --num-reqs 64
  draftmark explain cuda_triton --mode verify --num-draft-tokens 16 --tree
  draftmark explain cuda_triton --mode extend --rows 512 --arch sm_80"""
COLUMNS = (
    Column("choice", style="bold"),
    Column("chosen"),
    Column("reason", wrap=True),
    Column("candidates", wrap=True, style="dim"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("backend", metavar="NAME", help="an installed backend (`draftmark list`)")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--mode", type=mode, default="decode", metavar="MODE", help=f"one of {', '.join(Mode)}")
    batch.add_argument("--num-reqs", type=int, default=8, metavar="N", help="requests of the batch")
    batch.add_argument("--rows", type=int, metavar="Q", help="rows of each request; default: the most of the mode")
    batch.add_argument("--prefix-len", type=int, default=4096, metavar="L", help="committed tokens; -1 means unknown")
    batch.add_argument("--tree", action="store_true", help="the rows are a draft tree")
    add_geometry_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the choices that lead to the kernels of one batch."""
    from draftmark.registry import load

    with stdout_for_results():
        backend = load(args.backend)
        geometry = geometry_of(args, backend.info)
        batch = batch_of(args, geometry)
        choices = backend.explain(geometry, batch)
    if args.json:
        found = None if choices is None else [asdict(one) for one in choices]
        show_json({"schema": SCHEMA, "backend": args.backend, "batch": asdict(batch), "choices": found})
    elif choices is None:
        show(f"{args.backend} does not explain its kernels")
    else:
        rows = [(one.subject, one.chosen, one.reason, " | ".join(one.candidates)) for one in choices]
        show_table(COLUMNS, rows)
    return SUCCESS


def mode(text: str) -> Mode:
    """Parse a mode, for argparse."""
    try:
        return Mode(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; write {', '.join(Mode)}") from None


def batch_of(args: argparse.Namespace, geometry: Geometry) -> BatchSize:
    """Return the batch that the arguments describe.

    Raises:
        ArgumentError: the geometry has no such batch.
    """
    wanted = args.mode
    if wanted not in geometry.modes:
        served = ",".join((*geometry.modes, wanted))
        raise ArgumentError(f"--mode is {wanted}, which the geometry does not have; add --modes {served}")
    most = int(geometry.extent(wanted).q_len)
    rows = most if args.rows is None else args.rows
    for name, value, limit, reason in (
        ("--rows", rows, most, f"{wanted} has at most that many rows of a request"),
        ("--num-reqs", args.num_reqs, int(geometry.max_reqs), "--max-num-reqs is the limit"),
    ):
        if not 1 <= value <= limit:
            raise ArgumentError(f"{name} is {value}, but it must be from 1 to {limit}: {reason}")
    longest = int(geometry.max_prefix_len)
    if not -1 <= args.prefix_len <= longest:
        raise ArgumentError(
            f"--prefix-len is {args.prefix_len}, but it must be from -1 to {longest}; raise --max-context-len"
        )
    return BatchSize(wanted, args.num_reqs, rows, args.prefix_len, args.tree)
