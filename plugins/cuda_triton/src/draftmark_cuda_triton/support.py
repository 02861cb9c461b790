"""Geometries that the plugin rejects, with reasons, and page sizes that need gathered loads. No torch."""

from __future__ import annotations

from draftmark import AttentionShape, Geometry

MAX_HEAD_DIM = 256
MAX_LATENT_VALUE, MAX_LATENT_REST = 512, 256
"""Most elements of both parts of a latent row. An accumulator of 64 x 512 elements takes half of an SM's registers."""
MAX_TAIL = 1024
MAX_GRID_Y = 65535
"""CUDA's limit on a grid's y and z extents."""
FP8 = "float8_e4m3fn"
TMA_PAGE_MULTIPLE = 8
"""TMA loads K and V only if the page size, in tokens, is a multiple of 8: a swizzle atom has 8 rows in one page."""


def gathers_kv(shape: AttentionShape) -> bool:
    """Check whether the Hopper kernels gather keys with cp.async because TMA cannot load such pages.

    False for an e4m3 cache with such pages: the Triton kernels in `kernels` serve that case.
    """
    return shape.page_size % TMA_PAGE_MULTIPLE != 0 and shape.kv_dtype == shape.q_dtype


def reasons_against(geometry: Geometry) -> list[str]:
    """Return every reason why the kernels do not serve `geometry`; an empty list means they do."""
    a, device = geometry.attention, geometry.device
    reasons = []
    if device.kind not in ("cuda", "cpu"):
        reasons.append(f"device kind {device.kind} is not served: the kernels run on cuda, or interpreted on cpu")
    if device.kind == "cuda" and device.arch < 80:
        reasons.append(f"sm_{device.arch} is not served: the kernels need sm_80 or newer")
    if a.latent:
        reasons += _reasons_against_latent(a)
    elif a.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {a.head_dim} is not served: the largest row tile has {MAX_HEAD_DIM} columns")
    if a.kv_dtype not in (a.q_dtype, FP8):
        reasons.append(f"kv_dtype {a.kv_dtype} with q_dtype {a.q_dtype} is not served: KV has q's dtype or {FP8}")
    if a.kv_dtype == FP8 and device.kind == "cuda" and device.arch < 89:
        reasons.append(f"kv_dtype {FP8} on sm_{device.arch} is not served: e4m3 conversions need sm_89 or newer")
    if geometry.max_tail > MAX_TAIL:
        reasons.append(f"a tail of {geometry.max_tail} slots is not served: masks are tested up to {MAX_TAIL}")
    if a.num_kv_heads > MAX_GRID_Y:
        reasons.append(f"num_kv_heads {a.num_kv_heads} is not served: a CUDA grid has at most {MAX_GRID_Y} in y")
    if geometry.limits.batch_invariant and geometry.max_reqs > MAX_GRID_Y:
        reasons.append(
            f"{geometry.max_reqs} requests with batch invariance are not served: one CTA each in z, where a CUDA grid "
            f"has at most {MAX_GRID_Y}"
        )
    return reasons


def _reasons_against_latent(a: AttentionShape) -> list[str]:
    """Return every reason why the kernels do not serve latent rows of this shape."""
    rest, reasons = a.head_dim - a.value_width, []
    if a.value_width > MAX_LATENT_VALUE:
        reasons.append(
            f"value_dim {a.value_width} is not served: the largest accumulator has {MAX_LATENT_VALUE} columns"
        )
    if rest > MAX_LATENT_REST:
        limit = f"a latent row has at most {MAX_LATENT_REST} elements after its value"
        reasons.append(f"head_dim {a.head_dim} with value_dim {a.value_width} is not served: {limit}")
    return reasons
