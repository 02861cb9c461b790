"""The command `draftmark warm`: compiles a backend's kernels for one geometry ahead of time. Needs no device."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from ...hookspecs import BackendInfo
from ...kernels import CACHE_VARIABLE, WarmedKernels
from ..errors import FAILURE, SUCCESS
from ..geometry_arguments import add_geometry_arguments, geometry_of
from ..progress import progress_line
from ..rendering import human_bytes, show, show_json, stdout_for_results

SCHEMA = 1
SUMMARY = "compile a backend's kernels for a geometry ahead of time; no device"
EXAMPLES = f"""\
examples:
  draftmark warm cuda_triton
  draftmark warm cuda_triton --arch sm_80 --num-sms 108 --head-dim 64
  draftmark warm cuda_triton --modes extend,decode --forms engine_slots

Kernels go to {CACHE_VARIABLE}, by default ~/.cache/draftmark.
Opening a backend finds them there."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("backend", metavar="NAME", help="an installed backend (`draftmark list`)")
    add_geometry_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")


def run(args: argparse.Namespace) -> int:
    """Compile the kernels of one geometry that are not stored yet, with progress on stderr."""
    from ...registry import load

    with stdout_for_results():
        backend = load(args.backend)
    geometry = geometry_of(args, backend.info)
    start = time.perf_counter()
    with progress_line(f"listing the kernels of {args.backend}") as line, stdout_for_results():
        found = backend.warm(
            [geometry], lambda done, count, kernel: line.milestone(f"{done} of {count} kernels compiled: {kernel}")
        )
    if args.json:
        show_json({"schema": SCHEMA, "backend": args.backend, "kernels": None if found is None else asdict(found)})
    else:
        show(sentence(backend.info, found, time.perf_counter() - start))
    return FAILURE if found is not None and found.failed else SUCCESS


def sentence(info: BackendInfo, found: WarmedKernels | None, seconds: float) -> str:
    """Return the result as text."""
    if found is None:
        return f"{info.name} has no kernels to compile ahead of time"
    ready = f"{found.kernels} kernels of {info.name} are ready ({human_bytes(found.num_bytes)})"
    shipped = f", {found.shipped} in installed packages" if found.shipped else ""
    stored = found.kernels - found.compiled - found.shipped
    failed = f"; {found.failed} could not be compiled" if found.failed else ""
    compiled = f"{found.compiled} compiled" + (f" in {seconds:.1f} s" if found.compiled else "")
    return f"{ready}: {compiled}, {stored} found in {found.folder}{shipped}{failed}"
