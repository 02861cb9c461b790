"""`draftmark judge ENGINE:TARGET`: runs the contract's rules on an attention backend that is part of an engine."""

from __future__ import annotations

import argparse
from dataclasses import replace

from .judging import add_options, carry_out, check_options, limit_of

SUMMARY = "judge a backend of vLLM or SGLang as it is installed here"
EXAMPLES = """\
Without a target the command lists the engines, their backends and the packages
that are missing here. A target is one of these, a class of another package
(vllm:package.module.Class), or the backend of a plugin (vllm:CUSTOM).
A backend is checked through its engine's own interface.
Items that cannot run there are unjudged, and inputs that the engine's own
capability checks reject are refused. Exit code 0: every item that could run
passed; 1: an item failed, or no item could run; 2: wrong arguments, or no
verdict, as after -k, --item or --sample. With --allow-part a run of some items
without a failure gives 0. With --against, only an item that became worse gives
1.

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
    parser.add_argument("--release", metavar="VERSION", default="", help="release of the engine; downloaded once")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """List the backends that can be judged, or judge one."""
    from draftmark_tools.cli.errors import ArgumentError

    from ..cases.histories import SEED
    from ..judge.engines import find
    from ..judge.layer import opening

    if args.target is None:
        _check_overview(args)
        return _overview()
    check_options(args)
    engine, info = find(args.target, args.release)
    device = args.device or info.devices[0]
    if not info.any_device and device.partition(":")[0] not in info.devices:
        raise ArgumentError(f"--device is {device!r}, but {args.target} can be judged on {', '.join(info.devices)}")
    more = {} if args.seed is None else {SEED: str(args.seed)}
    opened = opening(engine, info.name, device, limit_of(args))
    return carry_out(args, f"{engine.name}:{info.name}", replace(opened, environment={**opened.environment, **more}))


def _check_overview(args: argparse.Namespace) -> None:
    """Reject options that need a target (the backend to judge) when the command line has no target."""
    from draftmark_tools.cli.errors import ArgumentError

    files = ("json", "record", "html", "against", "journal")
    names = ("device", "release", "list", *files, "limit", "seed", "stop_at_first", "k", "sample", "item")
    if given := [name for name in names if getattr(args, name)]:
        option = {"k": "-k", "stop_at_first": "-x"}.get(given[0], f"--{given[0]}")
        raise ArgumentError(f"{option} needs a target, e.g. vllm:TRITON_ATTN; `draftmark judge` lists the targets")


def _overview() -> int:
    """Print the engines, their backends, and the packages that each needs."""
    from draftmark_tools.cli.rendering import Column, show, show_table

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
