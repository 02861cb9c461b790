"""`draftmark judge ENGINE:TARGET`: runs the contract's rules on an attention backend that is part of an engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..judge.against import Comparison
    from ..judge.verdict import Verdict

SUMMARY = "judge a backend of vLLM or SGLang as it is installed here"
EXAMPLES = """\
Without a target the command lists the engines, their backends and the packages
that are missing here. A target is one of these, a class of another package
(vllm:package.module.Class), or the backend of a plugin (vllm:CUSTOM).
A backend is checked through its engine's own interface.
Items that cannot run there, and items that the engine's own capability checks
reject, are counted separately. Exit code 0: every item that ran is right; 1:
an item is wrong, or no item could run; 2: wrong arguments, or a stopped run.
With --against, only an item that became worse gives 1.

examples:
  draftmark judge
  draftmark judge vllm:CPU_ATTN
  draftmark judge vllm:TRITON_ATTN --json verdict.json --html report.html
  draftmark judge vllm:TRITON_ATTN --list
  draftmark judge vllm:TRITON_ATTN --sample 3
  draftmark judge vllm:FLASH_ATTN --device cuda -k graphs
  draftmark judge vllm:my_package.attention.MyBackend --device npu
  draftmark judge vllm:CUSTOM --json new.json --against old.json
  draftmark judge sglang:flashinfer --release 0.5.12.post1 -k sizing
  draftmark judge sglang:triton --item 'numerics.match_float64[page16-decode]'"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", metavar="ENGINE:TARGET", nargs="?", help="backend, by the engine's name for it")
    parser.add_argument("--device", help="torch device, e.g. cuda (default: the backend's first device)")
    parser.add_argument("--release", metavar="VERSION", default="", help="release of the engine; downloaded once")
    parser.add_argument("--list", action="store_true", help="list the items without running any")
    parser.add_argument("--json", metavar="FILE", help="write the full verdict with every item")
    parser.add_argument("--html", metavar="FILE", help="write a report as one self-contained page")
    against = "earlier --json of this target; exit code 1 only if an item became worse"
    parser.add_argument("--against", metavar="FILE", help=against)
    limit = "seconds for one item (default: 600)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limit)
    parser.add_argument("-x", action="store_true", dest="stop_at_first", help="stop at the first wrong item")
    parser.add_argument("-k", metavar="TEXT", help="run items with this text in their id; gives no verdict")
    few = "run at most N items of each rule, evenly spread; gives no verdict"
    parser.add_argument("--sample", type=int, default=0, metavar="N", help=few)
    parser.add_argument(
        "--item", action="append", default=[], metavar="ID", help="run only this item; gives no verdict"
    )


def run(args: argparse.Namespace) -> int:
    """List the backends that can be judged, or judge one."""
    from ..judge.engines import find

    if args.target is None:
        _check_overview(args)
        return _overview()
    engine, info = find(args.target, args.release)
    device = args.device or info.devices[0]
    _check(args, () if info.any_device else info.devices, device)
    if args.list:
        return _list(engine, info.name, device)
    return _judge(args, engine, info.name, device)


def _check_overview(args: argparse.Namespace) -> None:
    """Reject options that need a target (the backend to judge) when the command line has no target."""
    from draftmark.cli.errors import ArgumentError

    names = ("device", "release", "list", "json", "html", "against", "limit", "stop_at_first", "k", "sample", "item")
    if given := [name for name in names if getattr(args, name)]:
        option = {"k": "-k", "stop_at_first": "-x"}.get(given[0], f"--{given[0]}")
        raise ArgumentError(f"{option} needs a target, e.g. vllm:TRITON_ATTN; `draftmark judge` lists the targets")


def _check(args: argparse.Namespace, devices: tuple[str, ...], device: str) -> None:
    """Reject options that do not fit; `devices` is empty if the target can be judged on every device."""
    from draftmark.cli.errors import ArgumentError

    if devices and device.partition(":")[0] not in devices:
        raise ArgumentError(f"--device is {device!r}, but {args.target} can be judged on {', '.join(devices)}")
    if args.limit is not None and not args.limit > 0:
        raise ArgumentError(f"--limit is {args.limit:g}, but it must be more than 0")
    if args.sample < 0:
        raise ArgumentError(f"--sample is {args.sample}, but it must be 0 or more; 0 means all")
    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ArgumentError(f"{option} {path} names no file in a folder that exists; create the folder first")


def _judge(args: argparse.Namespace, engine: object, target: str, device: str) -> int:
    from ..judge.against import compare, read
    from ..judge.report import lines_of
    from ..judge.run import judge
    from ..runner.limits import LIMIT_S
    from ..runner.stopped import WITHOUT_VERDICT

    earlier = read(args.against, args.target) if args.against else None
    chosen = (args.item, args.k or "", args.sample, args.stop_at_first, args.limit or LIMIT_S)
    verdict = judge(engine, target, device, *chosen)  # type: ignore[arg-type]
    print("\n".join(lines_of(verdict)), flush=True)
    compared = compare(verdict, earlier) if earlier and not verdict.stopped and not verdict.error else None
    if compared:
        print("\n".join(compared.lines()), flush=True)
    problems = [] if verdict.stopped else _write(verdict, compared, args.json, args.html)
    for problem in problems:
        print(f"draftmark judge: {problem}", file=sys.stderr)
    code = int(bool(compared.worse)) if compared and verdict.ran else verdict.exit_code
    return code or (WITHOUT_VERDICT if problems else 0)


def _write(verdict: Verdict, compared: Comparison | None, json_path: str | None, html_path: str | None) -> list[str]:
    """Write the requested files. Return one sentence for each file that could not be written."""
    from ..judge.page import page
    from ..runner.outputs import write_whole

    texts = []
    if json_path is not None:
        record = {**verdict.as_json(), **({"against": compared.as_json()} if compared else {})}
        texts.append((json_path, json.dumps(record, indent=1, ensure_ascii=False) + "\n"))
    if html_path is not None:
        texts.append((html_path, page(verdict)))
    return [problem for path, text in texts if (problem := write_whole(Path(path), text))]


def _list(engine: object, target: str, device: str) -> int:
    from ..judge.rules import rules
    from ..judge.run import listed

    items, error = listed(engine, target, device)  # type: ignore[arg-type]
    if error:
        print(f"the backend could not be opened: {error}")
        return 1
    for item in items:
        rule = rules().get(item["rule"])
        print(f"{item['id']}  (rule {rule.number if rule else '?'})")
    print(f"{len(items)} items")
    return 0


def _overview() -> int:
    """Print the engines, their backends, and the packages that each needs."""
    from draftmark.cli.rendering import Column, show, show_table

    from ..judge.engines import absent, engines, lacks

    rows = []
    for name, engine in engines().items():
        show(f"{name}: {engine.version() or 'not installed'}")
        for info in engine.targets():
            state = lacks(engine, info) or "ready"
            rows.append((f"{name}:{info.name}", ", ".join(info.devices), state, info.what))
    for name, remedy in absent().items():
        show(f"{name}: its judge is not installed; {remedy}")
    if rows:
        show_table((Column("target", style="bold"), Column("devices"), Column("here"), Column("what", wrap=True)), rows)
    return 0
