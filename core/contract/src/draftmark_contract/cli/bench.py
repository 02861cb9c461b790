"""`draftmark bench NAME …`: compares attention kernels of backends on one device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from draftmark.errors import DraftmarkError
from draftmark.geometry import DTYPE_BYTES, AttentionShape
from draftmark.geometry.checks import INT32_MAX
from draftmark_tools.cli.errors import SUCCESS, ArgumentError
from draftmark_tools.cli.progress import progress_line
from draftmark_tools.cli.rendering import Column, human_bytes, show, show_json, show_table, stdout_for_results

if TYPE_CHECKING:
    import torch

    from .measuring import Case, Row

SCHEMA = 1
CASE_NAMES = ("decode", "draft8", "verify16", "verify64", "extend")
DTYPES = ("float32", "float16", "bfloat16")
LARGE = {"requests": 64, "context": 8192, "chunk": 2048, "heads": (32, 8), "head_dim": 128, "page_size": 64}
TINY = {"requests": 2, "context": 48, "chunk": 16, "heads": (4, 2), "head_dim": 64, "page_size": 16}
"""Default sizes on CUDA, and elsewhere. The large ones are halved, requests first, until they fit the free memory."""
SHARE_OF_MEMORY = 16
"""KV uses at most 1/16 of the free memory, because the reference gathers KV and converts it to float32."""
EXTEND_REQUESTS = 4

SUMMARY = "compare the speed of backends' attention kernels on one device"
EXAMPLES = """\
examples:
  draftmark bench cuda_triton reference
  draftmark bench cuda_triton --cases decode,verify16 --context 32768
  draftmark bench cuda_triton --heads 64,8 --page-size 32 --json
  draftmark bench reference --device cpu --cases decode

Each output is compared with the reference backend's before it is timed. On
CUDA a time is the median of CUDA graph replays. The calls rotate through KV
sets that together exceed L2. TB/s counts K and V once. Without CUDA, outputs
are compared at tiny sizes, and wall clock times are no measure of speed. Exit
code 1 if an output is wrong or a kernel fails."""

COLUMNS = (
    Column("case", style="bold"),
    Column("backend"),
    Column("requests", right=True),
    Column("context", right=True),
    Column("rows", right=True),
    Column("K and V", right=True),
    Column("us", right=True),
    Column("TB/s", right=True),
    Column("error", right=True),
    Column("note", wrap=True, style="yellow"),
)


class WrongAnswer(DraftmarkError):
    """A backend's output differs from the reference, or its kernel failed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("names", metavar="NAME", nargs="+", help="backend; `draftmark list` shows all")
    parser.add_argument("--cases", type=_cases, default=CASE_NAMES, metavar="CASE,…", help=", ".join(CASE_NAMES))
    parser.add_argument("--device", metavar="DEVICE", help="torch device; default: cuda if there is one, else cpu")
    sizes = parser.add_argument_group("sizes; the default fits the device")
    sizes.add_argument("--requests", type=_positive, metavar="N", help="requests in a forward")
    sizes.add_argument("--context", type=_positive, metavar="N", help="committed tokens of each request")
    sizes.add_argument("--chunk", type=_positive, metavar="N", help="new tokens of each request in extend")
    sizes.add_argument("--heads", type=_heads, metavar="QO,KV", help="query heads and KV heads")
    sizes.add_argument("--head-dim", type=_positive, metavar="N", help="head dimension")
    sizes.add_argument("--page-size", type=_positive, metavar="P", help="tokens per KV page")
    sizes.add_argument(
        "--dtype", choices=DTYPES, help="dtype of queries and KV; default: bfloat16 on CUDA, else float32"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Compare and time the backends, and print the results."""
    from draftmark.registry import load

    with stdout_for_results():
        for name in args.names:
            load(name)
    with progress_line("importing torch") as line:
        measuring = _measuring()
        device = _device(args)
        shape, cases = _sizes(args, device)
        if not args.json:
            show("\n".join(_headline(device, shape)), "dim")
            show()
        rows: list[Row] = []
        for case in cases:
            line.say(f"{case.name}: {', '.join(args.names)}")
            rows += measuring.measure(case, list(dict.fromkeys(args.names)), shape, device)
    if args.json:
        show_json(_as_json(rows, device, shape))
    else:
        _show(rows, device)
    failed = [f"{row.backend} in {row.case}" for row in rows if row.failed]
    if failed:
        raise WrongAnswer(f"{len(failed)} of {len(rows)} rows failed ({', '.join(failed[:3])}); see their notes")
    return SUCCESS


def _measuring() -> Any:
    try:
        from . import measuring
    except Exception as error:  # A broken torch installation can raise any exception.
        cause = " ".join(str(error).split())
        raise DraftmarkError(
            f"importing torch failed ({type(error).__name__}: {cause}); run `pip install 'draftmark-contract[torch]'`"
        ) from error
    return measuring


def _device(args: argparse.Namespace) -> torch.device:
    import torch

    try:
        named = ("cuda" if torch.cuda.is_available() else "cpu") if args.device is None else args.device
        device = torch.device(named)
    except RuntimeError:
        raise ArgumentError(f"torch has no device {args.device!r}; name one such as cpu or cuda:1") from None
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and (module is None or not module.is_available()):
        raise ArgumentError(
            f"torch sees no {device.type} device, but --device is {args.device}; leave it out to run on the CPU"
        )
    return device


def _sizes(args: argparse.Namespace, device: torch.device) -> tuple[AttentionShape, list[Case]]:
    from .measuring import case_of, free_bytes

    default: dict[str, Any] = LARGE if device.type == "cuda" else TINY

    def chosen(name: str) -> Any:
        value = getattr(args, name)
        return default[name] if value is None else value

    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    qo_heads, kv_heads = chosen("heads")
    shape = AttentionShape(qo_heads, kv_heads, chosen("head_dim"), chosen("page_size"), dtype, dtype)
    requests, context, chunk = chosen("requests"), chosen("context"), chosen("chunk")
    token = 2 * kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
    free = free_bytes(device)
    while free and requests * context * token * SHARE_OF_MEMORY > free:
        if args.requests is None and requests > 1:
            requests //= 2
        elif args.context is None and context > 1024:
            context //= 2
        else:
            break
    cases = []
    for name in args.cases:
        prefill = name == "extend" and args.requests is None
        cases.append(case_of(name, min(requests, EXTEND_REQUESTS) if prefill else requests, context, chunk))
    return shape, cases


def _headline(device: torch.device, shape: AttentionShape) -> list[str]:
    described = (
        f"{shape.num_qo_heads} query heads over {shape.num_kv_heads} KV heads x {shape.head_dim}, {shape.q_dtype}, "
        f"page size {shape.page_size}"
    )
    return [f"{_device_name(device)}: {described}", _method(device)]


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _method(device: torch.device) -> str:
    if device.type == "cuda":
        return "Times are medians of CUDA graph replays of one layer's attention; metadata is written before."
    if device.type == "cpu":
        return (
            "Without a CUDA device the sizes are tiny and Triton kernels run in Triton's interpreter: outputs are "
            "compared, but the wall clock times are no measure of speed."
        )
    return "Times are medians of the wall clock around eager calls; a graph would be faster."


def _as_json(rows: list[Row], device: torch.device, shape: AttentionShape) -> dict[str, object]:
    import torch

    return {
        "schema": SCHEMA,
        "device": _device_name(device),
        "torch": torch.__version__,
        "method": _method(device),
        "shape": {
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "dtype": shape.q_dtype,
        },
        "rows": [_row_json(row, device) for row in rows],
    }


def _row_json(row: Row, device: torch.device) -> dict[str, object]:
    # JSON has no NaN and no infinity, so such an error becomes None.
    error = row.error if row.error is not None and row.error < float("inf") else None
    speed = row.tb_per_s if device.type != "cpu" else None
    return {
        "case": row.case, "backend": row.backend, "requests": row.requests, "context": row.context, "rows": row.rows,
        "bytes": row.bytes, "us": row.us, "tb_per_s": speed, "max_err": error, "checked": row.checked,
        "note": row.note,
    }  # fmt: skip


def _show(rows: list[Row], device: torch.device) -> None:
    cells = [
        (
            row.case, row.backend, row.requests, f"{row.context:,}", row.rows, human_bytes(row.bytes),
            "-" if row.us is None else f"{row.us:,.1f}",
            "-" if row.tb_per_s is None or device.type == "cpu" else f"{row.tb_per_s:.2f}",
            "-" if row.error is None else f"{row.error:.1e}", row.note,
        )
        for row in rows
    ]  # fmt: skip
    columns = COLUMNS if any(row.note for row in rows) else COLUMNS[:-1]
    show_table(columns, [line[: len(columns)] for line in cells])


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in CASE_NAMES]
    if unknown or not names:
        wrong = ", ".join(unknown) or "nothing"
        raise argparse.ArgumentTypeError(f"{wrong} is no case; choose from {', '.join(CASE_NAMES)}")
    return names


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= INT32_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 … {INT32_MAX}")
    return int(text)


def _heads(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not query heads and KV heads, such as 32,8")
    heads = _positive(parts[0]), _positive(parts[1])
    if heads[0] % heads[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: query heads must be a multiple of KV heads, as in 32,8")
    return heads
