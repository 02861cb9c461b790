"""Validation of a geometry's fields.

The checks branch on values. The formulas are in another module, because proofs run them on symbolic integers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from ..errors import GeometryError
from .shapes import (
    KV_DTYPES,
    PLAIN_ROWS,
    Q_DTYPES,
    ROW_FORMATS,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Form,
    Limits,
    Mode,
)

if TYPE_CHECKING:
    from .batch_geometry import BatchGeometry

INT32_MAX = 2**31 - 1
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
"""Common short names of dtypes, with torch's names."""


def check(geometry: BatchGeometry, attention: AttentionShape, forms: tuple[Form, ...]) -> None:
    """Raise `GeometryError` for the first field of a layer's geometry that is out of range."""
    if not isinstance(attention, AttentionShape):
        limit = "it must be an instance of AttentionShape"
        raise GeometryError("attention", attention, limit, "write AttentionShape(…)")
    _check_attention(attention)
    _check_values(attention)
    _check_chosen(attention)
    check_batch_fields(geometry)
    if not isinstance(forms, tuple) or not all(isinstance(form, Form) for form in forms):
        raise GeometryError("forms", forms, "it must be a tuple of Form", "write (Form.ENGINE_SLOTS,), or leave it out")
    if Form.LATENT_PARTS in forms:
        _check_parts(attention, forms)
    _check_row_format(attention, forms)
    longest = geometry.max_kv_len
    if longest > INT32_MAX:
        raise GeometryError(
            "limits.max_context_len",
            geometry.limits.max_context_len,
            f"positions up to {longest} must fit int32",
            "lower max_context_len or the draft shape",
        )


def check_batch_fields(geometry: BatchGeometry) -> None:
    """Raise `GeometryError` for the first field out of range that a batch of any layer has."""
    parts = {"limits": Limits, "draft": DraftShape, "device": DeviceProfile}
    for name, kind in parts.items():
        value = getattr(geometry, name)
        if not isinstance(value, kind):
            raise GeometryError(name, value, f"it must be an instance of {kind.__name__}", f"write {kind.__name__}(…)")
    _check_draft(geometry.draft)
    _check_limits(geometry.limits)
    _check_device(geometry.device)
    modes = geometry.modes
    if not isinstance(modes, (tuple, list)) or not modes or not all(isinstance(mode, Mode) for mode in modes):
        raise GeometryError(
            "modes", modes, "it must be a tuple of one Mode or more", "pass TARGET_MODES or DRAFT_MODES"
        )
    if Mode.DRAFT_BLOCK in modes:
        block = geometry.draft.block_size
        at_least("draft.block_size", block, 1, "set the rows of a block, or remove DRAFT_BLOCK from the modes")


def _check_attention(a: AttentionShape) -> None:
    for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
        at_least(f"attention.{name}", getattr(a, name), 1, f"set the model's {name}")
    at_least("attention.page_size", a.page_size, 1, "use the KV cache's tokens per page, such as 16 or 64")
    if a.num_qo_heads % a.num_kv_heads:
        raise GeometryError(
            "attention.num_qo_heads",
            a.num_qo_heads,
            f"it must be a multiple of num_kv_heads = {a.num_kv_heads}",
            "take both numbers from one model, per tensor-parallel rank",
        )
    check_dtype("attention.q_dtype", a.q_dtype, Q_DTYPES)
    check_dtype("attention.kv_dtype", a.kv_dtype, KV_DTYPES)
    if a.softmax_scale is not None and not (is_number(a.softmax_scale) and a.softmax_scale > 0):
        remedy = "use draftmark_tools.models.latent_shape" if a.latent else "use head_dim ** -0.5"
        raise GeometryError("attention.softmax_scale", a.softmax_scale, "it must be finite and positive", remedy)
    at_least("attention.window_left", a.window_left, -1, "use -1 for no window")
    if not (is_number(a.logits_soft_cap) and a.logits_soft_cap >= 0):
        raise GeometryError(
            "attention.logits_soft_cap", a.logits_soft_cap, "it must be finite and >= 0", "use 0 for no cap"
        )
    check_bool("attention.sinks", a.sinks, "pass the sink logits in KVCache.sinks")
    check_bool("attention.round_to_e4m3", a.round_to_e4m3, "use True to allow that q and weights are rounded")
    if a.round_to_e4m3 and a.kv_dtype != "float8_e4m3fn":
        limit = f"only K and V in float8_e4m3fn are multiplied in e4m3, and kv_dtype is {a.kv_dtype}"
        raise GeometryError("attention.round_to_e4m3", True, limit, "set kv_dtype to float8_e4m3fn, or this to False")


def _check_values(a: AttentionShape) -> None:
    """Raise `GeometryError` unless value_dim and latent fit the rest of the shape."""
    check_bool("attention.latent", a.latent, "use True for an MLA layer")
    if a.value_dim is not None:
        at_least("attention.value_dim", a.value_dim, 1, "set the elements of a value, or None for head_dim")
        if a.value_dim > a.head_dim:
            remedy = "set head_dim to the whole row of a latent layer, or to the elements of a key"
            raise GeometryError("attention.value_dim", a.value_dim, f"it must be <= head_dim = {a.head_dim}", remedy)
    if not a.latent:
        return
    if a.num_kv_heads != 1:
        limit = "a latent layer has one KV head on every rank"
        raise GeometryError("attention.num_kv_heads", a.num_kv_heads, limit, "set num_kv_heads to 1")
    if a.softmax_scale is None:
        limit = "a latent layer's scale comes from the heads before absorption, not from the row"
        remedy = "set the model's, such as 192 ** -0.5 for DeepSeek V3, or use draftmark_tools.models.latent_shape"
        raise GeometryError("attention.softmax_scale", None, limit, remedy)


def _check_chosen(a: AttentionShape) -> None:
    remedy = "set the entries of a row's list (index_topk), or 0 for a layer that attends to all keys"
    at_least("attention.chosen_width", a.chosen_width, 0, remedy)
    if a.chosen_width and a.window_left >= 0:
        limit = "a layer with chosen keys has no window: a row attends to every key of its list"
        remedy = "set it to -1, and leave keys outside of the window out of the lists"
        raise GeometryError("attention.window_left", a.window_left, limit, remedy)


def _check_parts(a: AttentionShape, forms: tuple[Form, ...]) -> None:
    if not a.latent:
        limit = "only a latent layer has rows in two parts"
        raise GeometryError("forms", forms, limit, "set AttentionShape.latent, or remove LATENT_PARTS")
    if a.value_width == a.head_dim:
        limit = f"the rows have no rest: value_dim and head_dim are both {a.head_dim}"
        raise GeometryError("forms", forms, limit, "remove LATENT_PARTS: one buffer stores the whole row")


FP8_DS_MLA_SHAPE = {
    "latent": True,
    "head_dim": 576,
    "value_dim": 512,
    "q_dtype": "bfloat16",
    "kv_dtype": "float8_e4m3fn",
    "round_to_e4m3": False,
}
"""Fields of every layer with `FP8_DS_MLA`: its writers and kernels have this one shape."""


def _check_row_format(a: AttentionShape, forms: tuple[Form, ...]) -> None:
    if a.row_format not in ROW_FORMATS:
        remedy = f"write {' or '.join(ROW_FORMATS)}"
        raise GeometryError("attention.row_format", a.row_format, "it must be a known format", remedy)
    if a.row_format == PLAIN_ROWS:
        return
    for name, want in FP8_DS_MLA_SHAPE.items():
        if getattr(a, name) != want:
            limit = f"rows of row_format {a.row_format} need {want}"
            remedy = f"set it to {want!r}, or row_format to {PLAIN_ROWS!r}"
            raise GeometryError(f"attention.{name}", getattr(a, name), limit, remedy)
    if Form.ENGINE_STORES not in forms or Form.LATENT_PARTS in forms:
        limit = f"the engine stores rows of row_format {a.row_format}, in one buffer"
        raise GeometryError("forms", forms, limit, "add Form.ENGINE_STORES, and remove Form.LATENT_PARTS")


def _check_device(device: DeviceProfile) -> None:
    if not isinstance(device.kind, str) or not device.kind:
        raise GeometryError("device.kind", device.kind, "it must be a torch device type", "write cpu, cuda or npu")
    at_least("device.arch", device.arch, 0, "set the compute capability times ten, or 0 on other devices")
    at_least("device.num_sms", device.num_sms, 1, "set the device's number of multiprocessors or cores")


def _check_draft(d: DraftShape) -> None:
    at_least("draft.topk", d.topk, 1, "use topk = 1 for a chain")
    at_least("draft.num_steps", d.num_steps, 1, "use num_steps = 1 for no draft forward")
    at_least("draft.num_draft_tokens", d.num_draft_tokens, 1, "use num_draft_tokens = 1 for no speculation")
    at_least("draft.block_size", d.block_size, 0, "use block_size = 0 for a draft model without blocks")
    at_least("draft.num_modules", d.num_modules, 1, "use num_modules = 1 without MTP modules")


def _check_limits(limits: Limits) -> None:
    at_least("limits.max_num_reqs", limits.max_num_reqs, 1, "allow at least one request")
    at_least("limits.max_context_len", limits.max_context_len, 1, "set the longest prompt plus its output")
    at_least("limits.max_extend_tokens", limits.max_extend_tokens, 1, "set the tokens of the largest prefill chunk")
    for name in ("overlap", "overshoot", "host_lag", "batch_invariant"):
        value = getattr(limits, name)
        if not isinstance(value, bool) and (name not in ("overshoot", "host_lag") or value is not None):
            raise GeometryError(f"limits.{name}", value, "it must be True or False", "use a bool")
    for name, least in (("capture_batch_sizes", "request"), ("row_budgets", "row")):
        sizes = getattr(limits, name)
        if not isinstance(sizes, (tuple, list)):
            raise GeometryError(f"limits.{name}", sizes, "it must be a tuple of sizes", "write (8,) for one size")
        for size in sizes:
            at_least(f"limits.{name}", size, 1, f"capture batches of at least one {least}")
    at_least("limits.state_interval", limits.state_interval, 0, "use 0 for no checkpoints of states")
    if limits.max_kv_len is not None:
        remedy = "set at least max_context_len, or leave it out for the default"
        at_least("limits.max_kv_len", limits.max_kv_len, limits.max_context_len, remedy)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if `value` is an int or a float that has a finite float value."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # math.isfinite converts to float, which fails for a larger integer
        return False


def at_least(field: str, value: object, low: int, remedy: str) -> None:
    """Raise `GeometryError` unless `value` is an integer from `low` to the largest int32."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise GeometryError(field, value, "it must be an integer", remedy)
    if value < low:
        raise GeometryError(field, value, f"it must be >= {low}", remedy)
    if value > INT32_MAX:
        raise GeometryError(field, value, "it must fit int32", remedy)


def check_bool(field: str, value: object, remedy: str) -> None:
    """Raise `GeometryError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise GeometryError(field, value, "it must be True or False", remedy)


def check_dtype(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `GeometryError` unless `value` is one of the dtype names in `allowed`."""
    if value in allowed:
        return
    name = SHORT_DTYPES.get(value) if isinstance(value, str) else None
    if name in allowed:
        others = ", ".join(dtype for dtype in reversed(allowed) if dtype != name)
        raise GeometryError(field, value, "that is an unknown dtype", f"write {name} (or {others})")
    raise GeometryError(field, value, f"it must be one of {', '.join(allowed)}", "convert the tensors to one of these")
