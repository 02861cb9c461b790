"""Command-line arguments that describe a `Geometry`."""

from __future__ import annotations

import argparse
import re

from ..geometry import DRAFT_MODES, TARGET_MODES, AttentionShape, DeviceProfile, DraftShape, Geometry, Limits
from ..hookspecs import BackendInfo
from .errors import ArgumentError

TYPICAL_DEVICES = {"cuda": DeviceProfile("cuda", 90, 132)}
"""Default device profile of --arch and --num-sms, by device type; commands do not access a driver."""
KIND = re.compile("[a-z]+")


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
    limits.add_argument("--modes", choices=("target", "draft"), default="target", help="model that runs the layer")
    device = parser.add_argument_group("device profile (no driver is accessed)")
    device.add_argument("--device", metavar="KIND", help="cpu, cuda, npu, …; default: the backend's device")
    device.add_argument("--arch", type=int, metavar="N", help="compute capability times ten (90 for sm_90)")
    device.add_argument("--num-sms", type=int, metavar="N", help="SMs of a GPU, or cores")


def _add_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-qo-heads", type=int, default=32, metavar="N", help="query heads")
    group.add_argument("--num-kv-heads", type=int, default=8, metavar="N", help="KV heads")
    group.add_argument("--head-dim", type=int, default=128, metavar="N", help="elements of one head")
    group.add_argument("--page-size", type=int, default=16, metavar="P", help="tokens per KV page")
    group.add_argument("--dtype", default="bfloat16", help="dtype of queries: bfloat16, float16 or float32")
    group.add_argument("--kv-dtype", metavar="DTYPE", help="dtype of the KV cache; default: --dtype")
    group.add_argument("--window-left", type=int, default=-1, metavar="W", help="visible positions left; -1 means all")
    group.add_argument("--logits-soft-cap", type=float, default=0.0, metavar="CAP", help="0 means no cap")
    group.add_argument("--sinks", action="store_true", help="query heads have attention sinks")


def geometry_of(args: argparse.Namespace, info: BackendInfo) -> Geometry:
    """Return the geometry that the arguments describe, for the backend's device unless --device names another.

    Raises:
        GeometryError: a value is out of range.
        ArgumentError: --device or --arch is not valid.
    """
    attention = AttentionShape(
        args.num_qo_heads,
        args.num_kv_heads,
        args.head_dim,
        args.page_size,
        args.dtype,
        args.dtype if args.kv_dtype is None else args.kv_dtype,
        window_left=args.window_left,
        logits_soft_cap=args.logits_soft_cap,
        sinks=args.sinks,
    )
    limits = Limits(
        args.max_num_reqs, args.max_context_len, args.max_extend_tokens, args.capture_batch_sizes, args.overlap
    )
    draft = DraftShape(args.topk, args.num_steps, args.num_draft_tokens)
    modes = DRAFT_MODES if args.modes == "draft" else TARGET_MODES
    return Geometry.create(attention, limits, draft, _device(args, info), modes)


def _device(args: argparse.Namespace, info: BackendInfo) -> DeviceProfile:
    own = "cpu" if info.device == "any" else info.device
    kind = own if args.device is None else args.device
    if not KIND.fullmatch(kind):
        raise ArgumentError(f"--device is {kind!r}, but it must be a torch device type; write cpu, cuda or npu")
    if args.arch is not None and args.arch < 0:
        raise ArgumentError(f"--arch is {args.arch}, but it must be >= 0; give the compute capability times ten")
    typical = TYPICAL_DEVICES.get(kind, DeviceProfile(kind))
    arch = typical.arch if args.arch is None else args.arch
    return DeviceProfile(kind, arch, typical.num_sms if args.num_sms is None else args.num_sms)


def integers(text: str) -> tuple[int, ...]:
    """Parse ``"1,2,4"`` into integers, for argparse."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers separated by commas") from None
