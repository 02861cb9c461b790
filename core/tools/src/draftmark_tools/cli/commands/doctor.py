"""The command `draftmark doctor`: tests each backend on this machine and prints why it does not work."""

from __future__ import annotations

import argparse
import importlib.metadata as md
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftmark.version import __version__

from ..adapters import adapters
from ..errors import FAILURE, SUCCESS, ArgumentError
from ..rendering import Column, console, show, show_json, show_table

if TYPE_CHECKING:
    from ..probing import Report

SCHEMA = 1
SUMMARY = "test each backend in its own process: versions, device, reasons"
EXAMPLES = """\
Each backend is tested in its own process, so one that crashes, hangs or
exits does not stop the others. Without NAME, the adapters to vLLM and SGLang
follow: the installed release, and the releases that were tested.
  ready    a sample geometry was opened on the device
  refuses  loads, but does not serve the sample geometry
  absent   loads, but its vendor packages or its device are absent
  broken   cannot be loaded, raises, crashes, hangs or exits
Exit code 0: with NAME, that backend is ready; without NAME, none is broken.

examples:
  draftmark doctor
  draftmark doctor reference --json"""

COLUMNS = (
    Column("backend", style="bold"),
    Column("verdict"),
    Column("plugin", wrap=True),
    Column("torch"),
    Column("device"),
    Column("runtime", wrap=True),
)

ADAPTER_COLUMNS = (
    Column("engine", style="bold"),
    Column("adapter"),
    Column("installed"),
    Column("tested releases"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("backend", metavar="NAME", nargs="?", help="only this backend")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="limit for each backend")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Test the backends one after the other, print the result, and return the exit code."""
    from draftmark.registry import available

    from ..processes import examine

    if not args.timeout > 0:
        raise ArgumentError(f"--timeout is {args.timeout:g}, but it must be > 0; give seconds")
    if args.backend == "":
        raise ArgumentError("NAME is empty; name a backend (`draftmark list`), or omit NAME to test all")
    plugins = {row.name: f"{row.distribution} {row.version}" for row in available()}
    reports = []
    for name in [args.backend] if args.backend else sorted(plugins):
        with _waiting(name):
            reports.append(examine(name, args.timeout))
    if args.json:
        rows = [] if args.backend else [asdict(one) for one in adapters()]
        backends = [asdict(report) for report in reports]
        show_json({"schema": SCHEMA, **_machine(), "backends": backends, "adapters": rows})
    else:
        _show(reports, plugins)
        if not args.backend:
            _show_adapters()
    wanted = ("ready",) if args.backend else ("ready", "refuses", "absent")
    return SUCCESS if all(report.verdict in wanted for report in reports) else FAILURE


def _waiting(name: str) -> AbstractContextManager[Any]:
    terminal = console(stderr=True)
    return terminal.status(f"testing {name} …") if terminal.is_terminal else nullcontext()


def _machine() -> dict[str, str | None]:
    """Return versions from installed metadata; does not import torch."""
    try:
        torch: str | None = md.version("torch")
    except md.PackageNotFoundError:
        torch = None
    return {"draftmark": __version__, "python": platform.python_version(), "platform": sys.platform, "torch": torch}


def _show(reports: Sequence[Report], plugins: dict[str, str]) -> None:
    machine = _machine()
    torch = f"torch {machine['torch']}" if machine["torch"] else "no torch"
    show(f"draftmark {machine['draftmark']} · Python {machine['python']} · {torch} · {platform.platform(terse=True)}")
    show()
    rows = [
        (r.backend, r.verdict.value, plugins.get(r.backend, "-"), r.torch or "-", r.device or "-", _runtime(r))
        for r in reports
    ]
    show_table(COLUMNS, rows)
    for report in reports:
        for reason in report.reasons:
            show(f"{report.backend} {report.verdict.value}: {reason}")


def _show_adapters() -> None:
    found = adapters()
    show()
    show_table(ADAPTER_COLUMNS, [(a.name, a.adapter or "absent", a.engine or "absent", a.tested or "-") for a in found])
    for one in found:
        if one.note:
            show(f"{one.name}: {one.note}")


def _runtime(report: Report) -> str:
    if not report.runtime:
        return "none needed" if report.torch else "-"
    return ", ".join(f"{name} {version or 'absent'}" for name, version in report.runtime.items())
