"""Options and output that `draftmark contract` and `draftmark judge` share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from draftmark_tools.cli.errors import ArgumentError

from ..runner.stopped import WITHOUT_VERDICT

if TYPE_CHECKING:
    from ..check import Tier
    from ..runner.run import RunOptions
    from ..runner.subject import Opening


class _PrintSchema(argparse.Action):
    """Option that prints the schema and ends the command, as --version does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the JSON schema of the records, and end the command."""
        from ..schema import schema_text

        print(schema_text(), end="")
        parser.exit()
        raise AssertionError("exit raises SystemExit")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands. Exit code 1 is a verdict, so a run that loses its output has another one."""
    parser.set_defaults(failure=WITHOUT_VERDICT)
    parser.add_argument("--device", help="torch device, e.g. cuda:1")
    parser.add_argument("--list", action="store_true", help="list the selected items without running any")
    parser.add_argument("--json", metavar="FILE", help="write the full verdict with every item")
    parser.add_argument("--record", metavar="FILE", help="write the short record, as repositories keep it")
    parser.add_argument("--html", metavar="FILE", help="write a report as one self-contained page")
    parser.add_argument("--schema", action=_PrintSchema, nargs=0, help="print the JSON Schema of --json and --record")
    against = "earlier --json of this backend; exit code 1 only if an item became worse"
    parser.add_argument("--against", metavar="FILE", help=against)
    parser.add_argument("--journal", metavar="FILE", help="keep results in FILE; a later run with it continues")
    matching = "run items that match, e.g. 'graphs and not wide'; gives no verdict"
    parser.add_argument("-k", metavar="EXPRESSION", default="", help=matching)
    parser.add_argument(
        "--item", action="append", default=[], metavar="ID", help="run only this item; gives no verdict"
    )
    drawn = "seed of the random histories (default: 0); nightly runs change it"
    parser.add_argument("--seed", type=int, metavar="N", help=drawn)
    few = "run at most N cases of each check, evenly spread; gives no verdict"
    parser.add_argument("--sample", type=int, default=0, metavar="N", help=few)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of processes (default: 1)")
    longest = "seconds for one item; a longer one fails from 600 on (default: 600)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=longest)
    parser.add_argument("-x", action="store_true", dest="stop_at_first", help="stop at the first failed item")
    known = "exit with 0 if the backend conforms with known failures"
    parser.add_argument("--allow-known", action="store_true", help=known)
    part = "exit with 0 if only some items ran and none failed, and write --json and --html; still no verdict"
    parser.add_argument("--allow-part", action="store_true", help=part)


def check_options(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` for the first option that would prevent the run, or lose its verdict."""
    if args.sample < 0:
        raise ArgumentError(f"--sample is {args.sample}, but it must be 0 or more; 0 means all")
    if args.workers < 1:
        raise ArgumentError(f"--workers is {args.workers}, but it must be 1 or more")
    if args.limit is not None and not args.limit > 0:
        raise ArgumentError(f"--limit is {args.limit:g}, but it must be more than 0")
    if args.allow_part and args.record:
        raise ArgumentError("--allow-part cannot be used with --record, which keeps verdicts; write --json instead")
    if args.seed is not None and args.journal:
        raise ArgumentError("--seed cannot be used with --journal, which would mix results of two seeds; drop one")
    for option in ("json", "record", "html", "journal"):
        if (path := getattr(args, option)) is not None:
            _check_output(f"--{option}", Path(path).absolute())


def carry_out(args: argparse.Namespace, name: str, opening: Opening, tiers: tuple[Tier, ...] = ()) -> int:
    """Judge one backend: print the verdict, write the files, and return the exit code."""
    from draftmark_tools.cli.rendering import printable

    from ..runner.against import compare, read
    from ..runner.outputs import write_outputs
    from ..runner.report import failure_lines, verdict_lines
    from ..runner.run import RunOptions, run
    from ..runner.verdict import Word

    options = RunOptions(
        tiers,
        tuple(args.item),
        args.k,
        args.sample,
        args.workers,
        limit_of(args),
        Path(args.journal).absolute() if args.journal else None,
        args.stop_at_first,
    )
    if args.list:
        return _list(name, opening, options)
    earlier = read(args.against, name) if args.against else None
    verdict = run(name, opening, options, f"draftmark {args.command}")
    # Messages contain text of the backend, which may have control characters of a terminal.
    print(printable("\n".join([*failure_lines(verdict), *verdict_lines(verdict)])), flush=True)
    compared = compare(verdict, earlier) if earlier and not verdict.error else None
    if compared:
        print(printable("\n".join(compared.lines())), flush=True)
    more = {"against": compared.as_json()} if compared else None
    problems = []
    if verdict.recorded(args.allow_part):
        problems = write_outputs(verdict, args.json, args.record, args.html, more)
    elif not verdict.error and (files := [one for one in (args.json, args.record, args.html) if one]):
        every = "run every item, or add --allow-part for --json and --html" if verdict.is_part else "see the line above"
        problems = [f"{', '.join(files)}: not written, because the run gives no verdict; {every}"]
    for problem in problems:
        print(f"draftmark {args.command}: {problem}", file=sys.stderr)
    code = verdict.exit_code(args.allow_known, args.allow_part)
    if compared and verdict.ran:
        # A failure that the earlier verdict also has does not count. A run of some items still has no verdict.
        code = 1 if compared.worse else code * (verdict.word is Word.NONE)
    return code or (WITHOUT_VERDICT if problems else 0)


def limit_of(args: argparse.Namespace) -> float:
    """Return the seconds for one item."""
    from ..runner.limits import LIMIT_S

    return args.limit or LIMIT_S


def _list(name: str, opening: Opening, options: RunOptions) -> int:
    from ..judge.rules import ON_DEVICE, rules
    from ..runner.run import listed

    items = listed(name, opening, options)
    for item in items:
        rule = rules().get(item.id.partition("[")[0].removesuffix(ON_DEVICE))
        print(f"{item.id}  (rule {rule.number if rule else '?'})")
    print(f"{len(items):,} items" if items[1:] else "1 item")
    return 0


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise ArgumentError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} {path} lies in a folder that does not exist; create the folder first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"{option} {path} cannot be written; name another file")
