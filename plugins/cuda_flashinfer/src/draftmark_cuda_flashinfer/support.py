"""Reasons for which the plugin refuses a geometry. Reads only integers, names and the installed version."""

from __future__ import annotations

from draftmark import Geometry, Mode, maximum

from . import latent_plan, levels
from .version import ACCEPTED, DISTRIBUTION, RANGE, installed

HEAD_DIMS = (64, 128, 256)
VALUE_DIMS, RESTS = (512,), (0, 64)
"""Elements of the value part and of the rest of a latent row that the MLA kernels are served with."""
DTYPES = ("bfloat16", "float16")
INT32_MAX = 2**31 - 1
MERGE_THREADS = 1024
"""Threads of a block. `merge_state_in_place` takes one block per row, with 8 elements of all heads per thread."""


def reasons_against(geometry: Geometry) -> list[str]:
    """Return every reason for which FlashInfer cannot serve `geometry`; an empty list means that it can."""
    if geometry.attention.latent:
        return [*_version(), *_device(geometry), *_dtypes(geometry), *_latent(geometry)]
    return [*_version(), *_device(geometry), *_shape(geometry), *_dtypes(geometry), *_indices(geometry)]


def _version() -> list[str]:
    found = installed()
    if found in (None, *ACCEPTED):  # the registry reports a missing library, with the command that installs it
        return []
    accepted = f"accepted are {', '.join(ACCEPTED)}"
    return [f"{DISTRIBUTION} {found} is not served: {accepted}; pip install '{DISTRIBUTION}{RANGE}'"]


def _device(geometry: Geometry) -> list[str]:
    device = geometry.device
    if device.kind not in ("cuda", "cpu"):
        return [f"device kind {device.kind} is not served: the kernels are for cuda; metadata also runs on cpu"]
    if device.kind == "cuda" and device.arch < 80:
        return [f"sm_{device.arch} is not served: FA2's row tiles are for sm_80 and newer"]
    return []


def _shape(geometry: Geometry) -> list[str]:
    a = geometry.attention
    reasons = []
    if a.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim {a.head_dim} is not served: FA2 is built here for {', '.join(map(str, HEAD_DIMS))}")
    if a.window_left >= 0 and Mode.DRAFT_BLOCK in geometry.modes:
        reasons.append(f"window_left {a.window_left} with mode draft_block is not served: FA2's windows are causal")
    threads = a.num_qo_heads * a.head_dim // 8
    if levels.masked_modes(geometry) and threads > MERGE_THREADS:
        reasons.append(
            f"num_qo_heads {a.num_qo_heads} of head_dim {a.head_dim} is not served for trees: the merge needs "
            f"{threads} threads a row and a block has {MERGE_THREADS}; split the heads over more ranks"
        )
    return reasons


def _dtypes(geometry: Geometry) -> list[str]:
    a = geometry.attention
    reasons = []
    if a.q_dtype not in DTYPES:
        reasons.append(f"q_dtype {a.q_dtype} is not served: FlashInfer takes {' and '.join(DTYPES)}")
    if a.kv_dtype != a.q_dtype:
        reasons.append(
            f"kv_dtype {a.kv_dtype} with q_dtype {a.q_dtype} is not served: FlashInfer takes KV scales as host "
            "numbers, and draftmark's are on the device"
        )
    if a.sinks:
        reasons.append("attention sinks are not served: FlashInfer's paged run ignores them without an error")
    return reasons


def _latent(geometry: Geometry) -> list[str]:
    """Refuse latent rows that the MLA kernels are not served with, and batches beyond their plan's arrays."""
    a = geometry.attention
    rest = a.head_dim - a.value_width
    reasons = []
    if a.value_width not in VALUE_DIMS:
        served = ", ".join(map(str, VALUE_DIMS))
        reasons.append(f"value_dim {a.value_width} is not served: the MLA kernels are built here for {served}")
    if rest not in RESTS:
        served = " and ".join(map(str, RESTS))
        reasons.append(f"a rest of {rest} elements (head_dim - value_dim) is not served: the MLA kernels take {served}")
    if a.window_left >= 0:
        reasons.append(f"window_left {a.window_left} is not served for latent rows: the MLA kernels have no window")
    if a.logits_soft_cap > 0:
        reasons.append(f"logits_soft_cap {a.logits_soft_cap} is not served for latent rows: the MLA kernels have none")
    for mode in geometry.modes:
        works = latent_plan.max_works(geometry, mode)
        if works > latent_plan.MAX_WORKS:
            limit = "max_extend_tokens" if mode is Mode.EXTEND else "max_num_reqs or the draft tokens"
            reasons.append(
                f"{works} work items of {mode.name} are not served: FlashInfer's plan holds {latent_plan.MAX_WORKS} "
                f"and does not check (flashinfer#5170); lower {limit}, or split the heads over more ranks"
            )
    tokens = geometry.max_reqs * geometry.max_pages_per_req * a.page_size
    if tokens > INT32_MAX:
        reasons.append(f"{tokens} tokens in all page tables are not served: the MLA kernels count up to {INT32_MAX}")
    return reasons


def _indices(geometry: Geometry) -> list[str]:
    """Refuse geometries with more pages, and for trees more KV slots or mask bytes, than int32 indices can address."""
    pages = geometry.max_reqs * geometry.max_pages_per_req
    modes = levels.masked_modes(geometry)
    if not modes:
        if pages > INT32_MAX:
            return [f"{pages} pages over all requests are not served: FlashInfer's indptr holds {INT32_MAX}"]
        return []
    slots = (1 + pages) * geometry.attention.page_size - 1
    extents = [geometry.extent(mode, geometry.last_step(mode)) for mode in modes]
    masks = [levels.mask_bytes(one.q_len, levels.masked_len(geometry, one.tail_len)) for one in extents]
    largest = maximum(slots, *(geometry.max_reqs * size for size in masks))
    if largest > INT32_MAX:
        return [
            f"token slots or mask bytes up to {largest} are not served for trees: FlashInfer's indices hold {INT32_MAX}"
        ]
    return []
