"""The command `draftmark size`: prints every buffer of a backend. Needs no device and no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from draftmark.buffers import BufferSpec
from draftmark.geometry import PLAIN_ROWS, AttentionShape, Geometry

from ..errors import SUCCESS, ArgumentError
from ..geometry_arguments import add_geometry_arguments, geometry_of
from ..rendering import Column, human_bytes, show, show_json, show_table, stdout_for_results
from ..shares import Part, show_shares
from ..sizing import LENGTHS, Sizing, sizing
from ..state_arguments import add_state_arguments, check_accepted, refuse_without_state, state_geometry_of
from ..state_sizing import show_state, state_json

SCHEMA = 1
SUMMARY = "print every buffer of a backend: formula, shape, bytes; no device, no torch"
EXAMPLES = """\
examples:
  draftmark size reference
  draftmark size reference --max-num-reqs 256 --topk 8 --num-draft-tokens 64
  draftmark size cuda_triton --page-size 64 --capture-batch-sizes 1,2,4,8
  draftmark size reference --latent --head-dim 512 --softmax-scale 0.0625
  draftmark size reference --modes draft --num-steps 5 --topk 4 --json
  draftmark size --state qwen3-next --num-draft-tokens 64 --ranks 4"""

COLUMNS = (
    Column("buffer", style="bold"),
    Column("shape", right=True),
    Column("dtype"),
    Column("bytes", right=True),
    Column("formula", wrap=True, style="dim"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    named = "an installed backend (`draftmark list`); optional with --state"
    parser.add_argument("backend", metavar="NAME", nargs="?", help=named)
    add_geometry_arguments(parser)
    add_state_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the memory that one geometry needs on one backend, or that the recurrent layers of a model need."""
    from draftmark.registry import load

    if args.state is not None:
        return _run_state(args)
    refuse_without_state(args)
    if args.backend is None:
        raise ArgumentError("the following arguments are required: NAME; see `draftmark size --help`")
    with stdout_for_results():
        backend = load(args.backend)
    geometry = geometry_of(args, backend.info)
    sized = sizing(backend, geometry)
    if args.json:
        show_json(as_json(args.backend, geometry, sized))
    else:
        _show(args.backend, geometry, sized)
    return SUCCESS


def _run_state(args: argparse.Namespace) -> int:
    """Print a model's state slots, the schemes, and the state buffers of the backend, if one is named."""
    from draftmark.registry import load

    check_accepted(args)
    facts, geometry = state_geometry_of(args)
    buffers: list[BufferSpec] = []
    if args.backend is not None:
        with stdout_for_results():
            backend = load(args.backend)
        backend.require_state(geometry)
        buffers = backend.state_buffers(geometry)
    if args.json:
        report = state_json(facts, geometry, args.scheme, args.accepted)
        show_json({"schema": SCHEMA, "backend": args.backend, **report, "buffers": [_row(spec) for spec in buffers]})
        return SUCCESS
    show_state(facts, geometry, args.scheme, args.accepted)
    if args.backend is not None:
        show()
        _show_buffers(f"state buffers of {args.backend}", buffers, sum(spec.nbytes for spec in buffers))
    return SUCCESS


def as_json(name: str, geometry: Geometry, sized: Sizing) -> dict[str, object]:
    """Return the report as one JSON object."""
    return {
        "schema": SCHEMA,
        "backend": name,
        "geometry": asdict(geometry),
        "lengths": sized.lengths,
        "buffers": [_row(spec) for spec in sized.buffers],
        "total_bytes": sized.buffer_bytes,
        "batch": [_row(spec) for spec in sized.batch],
        "batch_bytes": sized.batch_bytes,
        "kv_pages": asdict(sized.pages) | {"bytes_per_layer": sized.pages.bytes},
    }


def _row(spec: BufferSpec) -> dict[str, object]:
    names = ("name", "shape", "dtype", "formula")
    return {name: getattr(spec, name) for name in names} | {"bytes": spec.nbytes}


def _show(name: str, geometry: Geometry, sized: Sizing) -> None:
    show(f"{name} on {_device(geometry)}, for {', '.join(mode.name for mode in geometry.modes)}", "bold")
    show(_shape(geometry))
    show()
    lengths = [(length, f"{value:,}", LENGTHS[length]) for length, value in sized.lengths.items()]
    show_table((Column("length"), Column("value", right=True), COLUMNS[-1]), lengths)
    show()
    _show_buffers("the backend's buffers", sized.buffers, sized.buffer_bytes)
    show()
    _show_buffers("the core's batch tensors", sized.batch, sized.batch_bytes)
    show()
    show(f"shares of the {human_bytes(sized.buffer_bytes + sized.batch_bytes)} of buffers and batch tensors", "bold")
    batch = [Part(f"batch: {one.name}", one.nbytes) for one in sized.batch]
    show_shares([*(Part(one.name, one.nbytes) for one in sized.buffers), *batch])
    show()
    pages = sized.pages
    show(f"KV cache: {human_bytes(pages.page_bytes)} per page and layer; {human_bytes(pages.bytes)} per layer")
    show(f"{pages.pages:,} pages hold every request at its longest context: {pages.formula}")


def _show_buffers(title: str, specs: Sequence[BufferSpec], total: int) -> None:
    show(f"{title}: {human_bytes(total)}", "bold")
    rows = [(one.name, "×".join(map(str, one.shape)), one.dtype, f"{one.nbytes:,}", one.formula) for one in specs]
    show_table(COLUMNS, rows, footer=("total", "", "", f"{total:,}", ""))


def _device(geometry: Geometry) -> str:
    device = geometry.device
    return f"{device.kind} sm_{device.arch} with {device.num_sms} SMs" if device.kind == "cuda" else device.kind


def _scale(a: AttentionShape) -> str:
    assert a.softmax_scale is not None, "Geometry.create resolves it"
    rounds = ", q and weights may be rounded to e4m3" if a.round_to_e4m3 else ""
    return f"softmax_scale {a.softmax_scale:.6g}{' with sinks' if a.sinks else ''}{rounds}"


def _keys(a: AttentionShape) -> str:
    if a.latent:
        stored = f" in {a.row_width} bytes ({a.row_format})" if a.row_format != PLAIN_ROWS else ""
        return f"latent rows of {a.head_dim}{stored}, values of {a.value_width}"
    narrow = f", values of {a.value_width}" if a.value_width != a.head_dim else ""
    return f"{a.num_kv_heads} KV heads × {a.head_dim}{narrow}"


def _shape(geometry: Geometry) -> str:
    a, d, limits = geometry.attention, geometry.draft, geometry.limits
    window = "no window" if a.window_left < 0 else f"window of {a.window_left} to the left"
    window = f"lists of {a.chosen_width} keys" if a.chosen_width else window
    captured = ", ".join(map(str, limits.capture_batch_sizes)) or "none"
    return (
        f"{a.num_qo_heads} query heads over {_keys(a)}, {a.q_dtype} (KV {a.kv_dtype}), {window}, {_scale(a)}\n"
        f"k = topk {d.topk}, S = num_steps {d.num_steps}, D = num_draft_tokens {d.num_draft_tokens}, "
        f"P = page_size {a.page_size}, C = max_context_len {limits.max_context_len}\n"
        f"max_num_reqs {limits.max_num_reqs}, max_extend_tokens {limits.max_extend_tokens}, captured {captured}, "
        f"overlap {'on' if limits.overlap else 'off'}"
    )
