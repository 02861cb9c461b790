"""The command `draftmark warm`: compiles a backend's kernels for one geometry ahead of time. Needs no device."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace

from draftmark.backend_info import BackendInfo
from draftmark.geometry import Geometry, StateGeometry
from draftmark.kernels import CACHE_VARIABLE, WarmedKernels

from ..errors import FAILURE, SUCCESS, ArgumentError
from ..geometry_arguments import add_geometry_arguments, device_of, geometry_of
from ..model_shapes import model_shapes
from ..progress import progress_line
from ..rendering import human_bytes, show, show_json, stdout_for_results
from ..state_arguments import add_state_model, state_geometry_of

SCHEMA = 1
SUMMARY = "compile a backend's kernels for a geometry ahead of time; no device"
SHAPE = (
    *("num_qo_heads", "num_kv_heads", "head_dim", "window_left", "logits_soft_cap", "latent", "value_dim"),
    *("softmax_scale", "sinks"),
)
"""Arguments that --model replaces."""
EXAMPLES = f"""\
examples:
  draftmark warm cuda_triton
  draftmark warm cuda_triton --arch sm_80 --num-sms 108 --head-dim 64
  draftmark warm cuda_triton --modes extend,decode --forms engine_slots
  draftmark warm cuda_triton --model Qwen3-8B --ranks 2
  draftmark warm cuda_triton --state qwen3-next

Kernels go to {CACHE_VARIABLE}, by default ~/.cache/draftmark.
Opening a backend finds them there."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("backend", metavar="NAME", help="an installed backend (`draftmark list`)")
    add_geometry_arguments(parser)
    model = parser.add_argument_group("attention shapes of a model, in place of an attention shape")
    model.add_argument("--model", metavar="DIR", help="folder with the config.json of a model; reads no weights")
    model.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks, with --model or --state")
    add_state_model(parser.add_argument_group("recurrent layers of a model, in place of attention or with --model"))
    parser.set_defaults(usual={name: parser.get_default(name) for name in (*SHAPE, "dtype")})
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")


def run(args: argparse.Namespace) -> int:
    """Compile the kernels that are not stored yet, with progress on stderr."""
    from draftmark.registry import load

    with stdout_for_results():
        backend = load(args.backend)
    geometries = geometries_of(args, backend.info)
    start = time.perf_counter()
    with progress_line(f"listing the kernels of {args.backend}") as line, stdout_for_results():
        found = backend.warm(
            geometries, lambda done, count, kernel: line.milestone(f"{done} of {count} kernels compiled: {kernel}")
        )
    if args.json:
        show_json({"schema": SCHEMA, "backend": args.backend, "kernels": None if found is None else asdict(found)})
    else:
        show(sentence(backend.info, found, time.perf_counter() - start))
    return FAILURE if found is not None and found.failed else SUCCESS


def geometries_of(args: argparse.Namespace, info: BackendInfo) -> list[Geometry | StateGeometry]:
    """Return the geometry of the arguments, or those of the layers that --model and --state name.

    Raises:
        ArgumentError: --model next to an argument that it replaces, or a model without usable configuration.
        GeometryError: a value is out of range.
    """
    if args.ranks < 1:
        raise ArgumentError(f"--ranks is {args.ranks}, but it must be 1 or more; count the tensor-parallel ranks")
    if args.ranks > 1 and args.model is None and args.state is None:
        raise ArgumentError(
            f"--ranks is {args.ranks}, but it divides the heads of --model; add --model, or leave it out"
        )
    if args.state is None and (args.state_dtype or args.conv_dtype):
        raise ArgumentError("--state-dtype and --conv-dtype are of the layers of --state; add it, or leave them out")
    states = [] if args.state is None else [state_geometry_of(args, device_of(args, info), info.modes)[1]]
    return [*_attention(args, info), *states]


def _attention(args: argparse.Namespace, info: BackendInfo) -> list[Geometry]:
    """Return the geometries of layers with attention; none if only --state is given."""
    if args.model is None:
        return [] if args.state is not None else [geometry_of(args, info)]
    for name in SHAPE:
        if getattr(args, name) != args.usual[name]:
            flag = "--" + name.replace("_", "-")
            raise ArgumentError(f"{flag} is given next to --model, which describes the layers; leave one of them out")
    dtype = args.dtype if args.dtype != args.usual["dtype"] else None
    shapes = model_shapes(args.model, args.ranks, args.page_size, dtype, args.kv_dtype)
    if args.round_to_e4m3:
        shapes = [replace(shape, round_to_e4m3=True) for shape in shapes]
    return [geometry_of(args, info, shape) for shape in shapes]


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
