"""Reasons for which the plugin refuses a geometry. Reads only integers, names and installed versions."""

from __future__ import annotations

import importlib.util

from draftmark import Geometry, Mode

from . import forms, versions

MAX_GROUP = 32
"""Query heads per KV head: the decode form keeps them in 16 KiB of shared memory, and a tree block has 32 rows."""
MAX_HEAD_DIM = 256
MAX_TAIL = 1024
MAX_GRID_Z = 65535
"""CUDA's bound on the third extent of a grid; XQA's grid counts requests there."""
GEN_PAGES = (16, 32, 64)
GEN_HEAD_DIMS = (64, 128)
LATENT_PAGES = (32, 64)
LATENT_ROW = (576, 512)
"""Elements of a latent row and of its value part in trtllm-gen's dense MLA kernels that are used here."""
LATENT_HEADS = (8, 16, 32, 64, 128)
LATENT_MODES = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND)


def reasons_against(geometry: Geometry) -> list[str]:
    """Return every reason for which the kernels cannot serve `geometry`; an empty list means that they can."""
    if geometry.attention.latent:
        return [*_device(geometry), *_version(geometry), *_latent(geometry)]
    reasons = [*_device(geometry), *_version(geometry), *_attention(geometry)]
    if forms.uses_gen(geometry):
        reasons += _gen(geometry)
        reasons += [
            f"mode {mode.value} on sm_{geometry.device.arch} is not served" for mode in forms.sibling_modes(geometry)
        ]
    # A sizing proof treats page_size as a symbol, so this comparison splits the proof into two cases.
    if geometry.attention.page_size not in forms.PAGES:
        return [*reasons, f"page_size {geometry.attention.page_size} is not served: XQA is built for 16, 32, 64 or 128"]
    return [*reasons, *_tail(geometry), *_sinks(geometry), *_counts(geometry), *_sibling(geometry)]


def _sibling(geometry: Geometry) -> list[str]:
    """Refuse modes that run on cuda_triton's kernels when cuda_triton is not installed."""
    if importlib.util.find_spec("draftmark_cuda_triton"):
        return []
    return [
        f"mode {mode.value} is not served here: it runs on cuda_triton's kernels; pip install draftmark-cuda-triton"
        for mode in forms.sibling_modes(geometry)
    ]


def _device(geometry: Geometry) -> list[str]:
    device = geometry.device
    if device.kind != "cuda":
        return [f"device kind {device.kind} is not served: the kernels are NVIDIA's, for cuda"]
    if device.arch not in (*forms.XQA_ARCHS, *forms.GEN_ARCHS):
        return [f"sm_{device.arch} is not served: XQA runs on sm_90, sm_120, sm_121 and trtllm-gen on sm_100, sm_103"]
    return []


def _version(geometry: Geometry) -> list[str]:
    found = versions.installed()
    if found is None or found in versions.ACCEPTED:
        return []
    reasons = [
        f"{versions.DISTRIBUTION} {found} is not served: accepted are {', '.join(versions.ACCEPTED)}; "
        f"pip install '{versions.DISTRIBUTION}{versions.RANGE}'"
    ]
    if forms.is_fp8(geometry) and forms.masked_modes(geometry) and versions.release(found) < versions.MASKED_FP8_SINCE:
        reasons.append(f"kv_dtype {forms.FP8} with tree masks on {found} is not served: it ignores them before 0.6.16")
    return reasons


def _attention(geometry: Geometry) -> list[str]:
    a = geometry.attention
    reasons = []
    if a.head_dim % 16 or a.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {a.head_dim} is not served: XQA is built for multiples of 16 up to {MAX_HEAD_DIM}")
    if a.group_size > MAX_GROUP:
        reasons.append(f"{a.group_size} query heads per KV head are not served: a block holds {MAX_GROUP} rows")
    if a.q_dtype not in ("bfloat16", "float16"):
        reasons.append(f"q_dtype {a.q_dtype} is not served: XQA takes bfloat16 or float16 queries")
    if a.kv_dtype not in (a.q_dtype, forms.FP8):
        reasons.append(f"kv_dtype {a.kv_dtype} with q_dtype {a.q_dtype} is not served: KV has q's dtype or {forms.FP8}")
    if a.logits_soft_cap > 0:
        reasons.append(f"logits_soft_cap {a.logits_soft_cap} is not served: XQA's softmax has no cap")
    if a.sinks and forms.uses_gen(geometry):
        reasons.append(f"sinks on sm_{geometry.device.arch} are not served: trtllm-gen was never run with them here")
    return reasons


def _gen(geometry: Geometry) -> list[str]:
    a, arch = geometry.attention, geometry.device.arch
    reasons = []
    if a.head_dim not in GEN_HEAD_DIMS:
        reasons.append(f"head_dim {a.head_dim} on sm_{arch} is not served: trtllm-gen is used for 64 and 128")
    if a.kv_dtype != a.q_dtype:
        reasons.append(f"kv_dtype {a.kv_dtype} on sm_{arch} is not served: trtllm-gen needs fp8 queries with it")
    return reasons


def _latent(geometry: Geometry) -> list[str]:
    """Refuse latent layers outside trtllm-gen's dense MLA decode kernels."""
    a, arch = geometry.attention, geometry.device.arch
    others = "use cuda_triton or cuda_flashinfer"
    if arch not in forms.GEN_ARCHS:
        return [f"latent rows on sm_{arch} are not served: trtllm-gen's MLA kernels run on sm_100 and sm_103; {others}"]
    reasons = []
    if (a.head_dim, a.value_width) != LATENT_ROW:
        reasons.append(
            f"head_dim {a.head_dim} with value_dim {a.value_width} is not served: trtllm-gen's MLA kernels are used "
            f"for {LATENT_ROW[0]} and {LATENT_ROW[1]}; {others}"
        )
    if a.num_qo_heads not in LATENT_HEADS:
        served = ", ".join(map(str, LATENT_HEADS))
        reasons.append(f"num_qo_heads {a.num_qo_heads} of a latent layer is not served: it must be one of {served}")
    if a.q_dtype != "bfloat16" or a.kv_dtype != a.q_dtype:
        reasons.append(f"kv_dtype {a.kv_dtype} with q_dtype {a.q_dtype} is not served for latent rows: use bfloat16")
    for name, value, off in (("window_left", a.window_left, -1), ("logits_soft_cap", a.logits_soft_cap, 0)):
        if value > off:
            reasons.append(f"{name} {value} is not served for latent rows: trtllm-gen's MLA call has no such argument")
    if a.sinks:
        reasons.append("sinks are not served for latent rows: trtllm-gen was never run with them here")
    if a.page_size not in LATENT_PAGES:
        reasons.append(f"page_size {a.page_size} is not served for latent rows: trtllm-gen's MLA takes 32 or 64")
    reasons += [
        f"mode {mode.value} is not served for latent rows: trtllm-gen's MLA kernels decode; {others}"
        for mode in geometry.modes if mode not in LATENT_MODES
    ]  # fmt: skip
    if _has_trees(geometry):
        reasons.append(f"topk {geometry.draft.topk} is not served for latent rows: trtllm-gen has no mask; use topk 1")
    return [*reasons, *_counts(geometry)]


def _tail(geometry: Geometry) -> list[str]:
    a, draft, arch = geometry.attention, geometry.draft, geometry.device.arch
    reasons = []
    if (a.window_left >= 0 or forms.uses_gen(geometry)) and _has_trees(geometry):
        if a.window_left >= 0:
            reasons.append(
                f"window_left {a.window_left} with topk {draft.topk} is not served: XQA places row r of a tail at "
                "position L + r, which is wrong for a tree; use topk 1"
            )
        if forms.uses_gen(geometry):
            reasons.append(f"topk {draft.topk} on sm_{arch} is not served: trtllm-gen ignores masks; use topk 1")
    if forms.uses_gen(geometry) and a.page_size not in GEN_PAGES:
        reasons.append(f"page_size {a.page_size} on sm_{arch} is not served: trtllm-gen is built for 16, 32 or 64")
    return reasons


def _sinks(geometry: Geometry) -> list[str]:
    """Refuse attention sinks if several blocks compute a KV head and 32 is no multiple of the GQA group size.

    The tree form reads the sink of head r % group for row r of a block, but only the first block begins with head 0.
    """
    group = geometry.attention.group_size
    if not geometry.attention.sinks or forms.BLOCK_ROWS % group == 0:
        return []
    modes = [mode for mode in forms.masked_modes(geometry) if forms.blocks(group, forms.q_rows(geometry, mode)) > 1]
    return [
        f"sinks with {group} query heads per KV head are not served in mode {mode.value}: XQA reads the sinks of wrong "
        f"heads if a request has more than {forms.BLOCK_ROWS} (row, head) pairs; use a group that divides "
        f"{forms.BLOCK_ROWS}"
        for mode in modes
    ]


def _has_trees(geometry: Geometry) -> bool:
    uniform = [mode for mode in geometry.modes if mode in (Mode.VERIFY, Mode.DRAFT)]
    return bool(uniform) and bool(geometry.draft.topk > 1)


def _counts(geometry: Geometry) -> list[str]:
    if geometry.max_tail > MAX_TAIL:
        return [f"a tail of {geometry.max_tail} slots is not served: masks are tested up to {MAX_TAIL}"]
    if geometry.max_reqs > MAX_GRID_Z:
        return [f"{geometry.max_reqs} requests of a forward are not served: a grid holds {MAX_GRID_Z}"]
    return []
