"""Command-line arguments that describe a `Geometry`."""

from __future__ import annotations

import argparse

from draftmark.backend_info import BackendInfo
from draftmark.geometry import (
    DRAFT_MODES,
    PLAIN_ROWS,
    ROW_FORMATS,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Form,
    Geometry,
    Limits,
    Mode,
)
from draftmark.geometry.checks import SHORT_DTYPES

from ..models.latent import cache_dtype
from .errors import ArgumentError

TYPICAL_DEVICES = {"cuda": DeviceProfile("cuda", 90, 132)}
"""Default device profile of --arch and --num-sms, by device type; commands do not access a driver."""
MODELS = {"target": TARGET_MODES, "draft": DRAFT_MODES}
"""Modes of a layer, by the model that runs it."""
DEVICES = ("cpu", "cuda", "npu", "xpu", "mps", "hpu", "mlu", "musa", "mtia", "xla", "privateuseone")
"""Device types of torch and of its plugins; a backend's own device type is valid too."""


def add_geometry_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for attention shape, draft shape, limits and device profile."""
    _add_attention(parser.add_argument_group("attention shape, per tensor-parallel rank"))
    draft = parser.add_argument_group("draft shape")
    draft.add_argument("--topk", type=int, default=1, metavar="K", help="branches of the draft tree")
    draft.add_argument("--num-steps", type=int, default=1, metavar="S", help="draft steps; 1 means no draft model")
    draft.add_argument("--num-draft-tokens", type=int, default=8, metavar="D", help="rows verified per request")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-num-reqs", type=int, default=64, metavar="N", help="requests of one batch")
    limits.add_argument("--max-context-len", type=int, default=8192, metavar="C", help="tokens of a request")
    limits.add_argument("--max-extend-tokens", type=int, default=2048, metavar="N", help="rows of one prefill forward")
    limits.add_argument("--capture-batch-sizes", type=integers, default=(), metavar="N,N,…", help="padded graph sizes")
    limits.add_argument("--overlap", action="store_true", help="the device may be one step ahead of the host")
    limits.add_argument(
        "--modes", type=modes, default="target", metavar="MODE,…", help="target, draft, or modes separated by commas"
    )
    limits.add_argument("--forms", type=forms, default=(), metavar="FORM,…", help=f"engine's data: {', '.join(Form)}")
    device = parser.add_argument_group("device profile (no driver is accessed)")
    device.add_argument("--device", metavar="KIND", help="cpu, cuda, npu, …; default: the backend's device")
    device.add_argument("--arch", type=arch, metavar="N", help="compute capability times ten: 90 or sm_90")
    device.add_argument("--num-sms", type=int, metavar="N", help="SMs of a GPU, or cores")


def _add_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-qo-heads", type=int, default=32, metavar="N", help="query heads")
    group.add_argument("--num-kv-heads", type=int, metavar="N", help="KV heads; default: 8, or 1 with --latent")
    group.add_argument("--head-dim", type=int, default=128, metavar="N", help="elements of a head or latent row")
    group.add_argument("--page-size", type=int, default=16, metavar="P", help="tokens per KV page")
    group.add_argument("--dtype", type=dtype, default="bfloat16", help="dtype of queries: bfloat16, float16 or float32")
    group.add_argument("--kv-dtype", type=dtype, metavar="DTYPE", help="dtype of the KV cache; default: --dtype")
    group.add_argument("--window-left", type=int, default=-1, metavar="W", help="visible positions left; -1 means all")
    group.add_argument("--logits-soft-cap", type=float, default=0.0, metavar="CAP", help="0 means no cap")
    group.add_argument("--latent", action="store_true", help="a token has one row: key and value (MLA)")
    group.add_argument("--value-dim", type=int, metavar="N", help="elements of a value; default: --head-dim")
    group.add_argument(
        "--row-format",
        choices=ROW_FORMATS,
        default=PLAIN_ROWS,
        metavar="FORMAT",
        help="format of a latent row: plain, or fp8_ds_mla (656 bytes)",
    )
    group.add_argument(
        "--softmax-scale",
        type=float,
        metavar="X",
        help="factor on q·k; default: head_dim ** -0.5; required with --latent",
    )
    group.add_argument("--chosen-width", type=int, default=0, metavar="N", help="keys that an indexer gives a row")
    group.add_argument("--sinks", action="store_true", help="query heads have attention sinks")
    group.add_argument("--round-to-e4m3", action="store_true", help="q and weights may be rounded to KV's e4m3")


def geometry_of(args: argparse.Namespace, info: BackendInfo, attention: AttentionShape | None = None) -> Geometry:
    """Return the geometry that the arguments describe, for the backend's device unless --device names another.

    Args:
        attention: an attention shape in place of the one that the arguments describe.

    Raises:
        GeometryError: a value is out of range.
        ArgumentError: --device or --arch is not valid, or a draft is longer than a request.
    """
    attention = _attention(args) if attention is None else attention
    limits = Limits(
        args.max_num_reqs, args.max_context_len, args.max_extend_tokens, args.capture_batch_sizes, args.overlap
    )
    draft = DraftShape(args.topk, args.num_steps, args.num_draft_tokens)
    geometry = Geometry.create(attention, limits, draft, device_of(args, info), args.modes, args.forms)
    check_draft_tokens(args.num_draft_tokens, args.max_context_len)
    return geometry


def _attention(args: argparse.Namespace) -> AttentionShape:
    return AttentionShape(
        args.num_qo_heads,
        (1 if args.latent else 8) if args.num_kv_heads is None else args.num_kv_heads,
        args.head_dim,
        args.page_size,
        args.dtype,
        cache_dtype(args.kv_dtype, args.dtype, args.row_format),
        window_left=args.window_left,
        logits_soft_cap=args.logits_soft_cap,
        sinks=args.sinks,
        softmax_scale=args.softmax_scale,
        value_dim=args.value_dim,
        latent=args.latent,
        chosen_width=args.chosen_width,
        round_to_e4m3=args.round_to_e4m3,
        row_format=args.row_format,
    )


def device_of(args: argparse.Namespace, info: BackendInfo) -> DeviceProfile:
    """Return the device profile that the arguments describe; by default a usual one of the backend's device.

    Raises:
        ArgumentError: --device or --arch is not valid.
    """
    own = "cpu" if info.device == "any" else info.device
    kind = own if args.device is None else args.device
    if kind not in (own, *DEVICES):
        remedy = "write cuda" if kind.partition(":")[0] in ("gpu", "nvidia", "cuda") else "write cpu, cuda or npu"
        raise ArgumentError(f"--device is {kind!r}, but it must be a torch device type; {remedy}")
    if args.arch is not None and args.arch < 0:
        raise ArgumentError(f"--arch is {args.arch}, but it must be >= 0; give the compute capability times ten")
    typical = TYPICAL_DEVICES.get(kind, DeviceProfile(kind))
    arch = typical.arch if args.arch is None else args.arch
    return DeviceProfile(kind, arch, typical.num_sms if args.num_sms is None else args.num_sms)


def check_draft_tokens(num_draft_tokens: int, max_context_len: int) -> None:
    """Raise `ArgumentError` if one draft is longer than the longest request."""
    if num_draft_tokens > max_context_len:
        raise ArgumentError(
            f"--num-draft-tokens is {num_draft_tokens:,}, but a request has at most {max_context_len:,} tokens "
            "(--max-context-len); lower it"
        )


def dtype(text: str) -> str:
    """Return torch's name of a dtype, for argparse; ``"bf16"`` becomes ``"bfloat16"``."""
    return SHORT_DTYPES.get(text, text)


def modes(text: str) -> tuple[Mode, ...]:
    """Parse ``"target"``, ``"draft"`` or ``"decode,ragged_verify"`` into modes, for argparse."""
    if text in MODELS:
        return MODELS[text]
    try:
        return tuple(Mode(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; write {', '.join((*MODELS, *Mode))}") from None


def arch(text: str) -> int:
    """Parse ``"90"`` or ``"sm_90"`` into a compute capability times ten, for argparse."""
    digits = text.removeprefix("sm_")
    if not digits.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability times ten; write 90 or sm_90")
    return int(digits)


def forms(text: str) -> tuple[Form, ...]:
    """Parse ``"engine_slots,strided_kv"`` into engine forms, for argparse."""
    try:
        return tuple(Form(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; write {', '.join(Form)}, separated by commas") from None


def integers(text: str) -> tuple[int, ...]:
    """Parse ``"1,2,4"`` into integers, for argparse."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers separated by commas") from None
