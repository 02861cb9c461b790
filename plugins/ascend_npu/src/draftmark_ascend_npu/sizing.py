"""Computes the sizes of the backend's buffers from integers, or from symbols in a sizing proof.

Only the block tables grow with the context; masks do not. A geometry without trees has the first five buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftmark import BufferSpec, Extent, Geometry, Mode, maximum, minimum

SLOTS, TABLES, TRIANGLE = "slot_mapping", "block_tables", "causal_mask"
TAIL_SLOTS, TAIL_MASK, TAIL_KV, HAS_PREFIX = "tail_slots", "tail_mask", "tail_kv", "has_prefix"
PARTS, LSES, WEIGHT, MERGE = "partial_out", "partial_lse", "merge_weight", "merge"
BITS, WORD_OF, HOST_LENS, SLOTS32 = "bit_weights", "word_of_bit", "recovered_lens", "slot_mapping_int32"
QUERIES, QUERY_RESTS, OUTPUTS = "padded_queries", "padded_query_rests", "padded_outputs"
PIECE_TABLES = "piece_tables"
PIECE_ROWS = 16
"""Most rows of one request of latent rows in TND. Longer requests of EXTEND are cut into pieces of this many rows."""
TRIANGLE_SIDE = 2048
"""Side of the mask of sparse_mode 2, 3 and 4 for every length (page, atten_mask)."""


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers of one geometry, for the modes that it serves."""
    table = (geometry.max_reqs, geometry.max_pages_per_req)
    side = TRIANGLE_SIDE
    specs = [
        BufferSpec(SLOTS, (geometry.max_rows_any,), "int64", "max_rows"),
        # A copy of the slots as int32, the operator's dtype. `rules.check_scatter` checks that the pool's slots fit.
        BufferSpec(SLOTS32, (geometry.max_rows_any,), "int32", "max_rows"),
        # At the context limit the tail (the draft tokens' KV) needs columns too: sglang#22778.
        BufferSpec(TABLES, table, "int32", "max_reqs x max_pages_per_req"),
        # The mask is written once, when the backend opens, so the arena must not fill it with poison values.
        BufferSpec(TRIANGLE, (side, side), "int8", "page: atten_mask", zeros=True),
        # Target of the copies of exact lengths from the device, if the host has only bounds (overlap).
        BufferSpec(HOST_LENS, table[:1], "int32", "max_reqs", pinned=True),
    ]
    if geometry.attention.latent:
        specs += _latent_buffers(geometry)
    return specs + (_tree_buffers(geometry) if tree_modes(geometry) else [])


def padded_heads(heads: Any) -> Any:
    """Return the smallest power of two that is not below `heads`, for 1 to 128 heads or a symbol.

    The fused operator takes only such numbers of heads for latent rows (vllm-ascend#9560).
    """
    doublings = [power * minimum(1, maximum(0, heads - power)) for power in (1, 2, 4, 8, 16, 32, 64)]
    return 1 + sum(doublings)


def _latent_buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the staging buffers of latent rows: contiguous parts of the queries, and outputs, with padded heads."""
    a = geometry.attention
    rows, heads, formula = geometry.max_rows_any, padded_heads(a.num_qo_heads), "rows x padded heads"
    shapes = {QUERIES: a.value_width, QUERY_RESTS: a.head_dim - a.value_width, OUTPUTS: a.value_width}
    specs = []
    if Mode.EXTEND in geometry.modes:
        table = (max_pieces(geometry), geometry.max_pages_per_req)
        pieces = f"max_reqs + max_extend_tokens / {PIECE_ROWS} x max_pages_per_req"
        specs.append(BufferSpec(PIECE_TABLES, table, "int32", pieces))
    # The parts of the queries begin as zeros and the padding heads are never written, so these heads stay finite.
    return specs + [
        BufferSpec(name, (rows, heads, width), a.q_dtype, formula, zeros=True) for name, width in shapes.items()
    ]


def pieces(q_lens: Sequence[int]) -> list[int]:
    """Return the number of pieces of each request of an EXTEND batch; a request without rows is one piece."""
    return [max(1, -(-n // PIECE_ROWS)) for n in q_lens]


def max_pieces(geometry: Geometry) -> Any:
    """Return an upper bound of the pieces of an EXTEND batch of latent rows."""
    return geometry.max_reqs + geometry.limits.max_extend_tokens // PIECE_ROWS


def tree_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that can have draft trees. Row counts can be symbols, so they are not compared."""
    return [mode for mode in geometry.modes if mode in (Mode.VERIFY, Mode.DRAFT)]


def _tree_buffers(geometry: Geometry) -> list[BufferSpec]:
    a = geometry.attention
    reqs, rows, slots, pairs = tree_extents(geometry, geometry.max_reqs)
    heads, kv_heads = (rows, a.num_qo_heads), (a.num_kv_heads, a.head_dim)
    bits = (32 * geometry.mask_words * tree_extents(geometry, 1)[0],)
    marks = [
        # Written once, when the backend opens: for each tail slot its word in a row's mask, and its bit in that word.
        BufferSpec(BITS, bits, "int32", "32 · mask_words", zeros=True),
        BufferSpec(WORD_OF, bits, "int32", "32 · mask_words", zeros=True),
        BufferSpec(TAIL_SLOTS, (slots,), "int64", "max_reqs · T"),
        BufferSpec(TAIL_MASK, (pairs,), "int8", "max_reqs · q · T"),
        BufferSpec(HAS_PREFIX, (reqs,), "float32", "max_reqs"),
    ]
    if a.latent:
        lse = (rows, padded_heads(a.num_qo_heads), 1)
        return [*marks, BufferSpec(LSES, lse, "float32", "rows x padded heads")]
    return [
        *marks,
        BufferSpec(TAIL_KV, (2, slots, *kv_heads), a.kv_dtype, "2 · max_reqs · T"),
        BufferSpec(PARTS, (2, *heads, a.head_dim), a.q_dtype, "2 · rows"),
        BufferSpec(LSES, (2, *heads, 1), "float32", "2 · rows"),
        BufferSpec(WEIGHT, (*heads, 1), "float32", "rows"),
        BufferSpec(MERGE, (2, *heads, a.head_dim), "float32", "2 · rows"),
    ]


def tree_extents(geometry: Geometry, reqs: Any) -> tuple[Any, ...]:
    """Return the largest (requests, rows, tail slots, row-slot pairs) of any mode with trees, for `reqs` requests."""
    found = [mode_extents(reqs, geometry.extent(mode, geometry.last_step(mode))) for mode in tree_modes(geometry)]
    return tuple(maximum(*each) for each in zip(*found, strict=True))


def mode_extents(reqs: Any, extent: Extent) -> tuple[Any, Any, Any, Any]:
    """Return (requests, rows, tail slots, row-slot pairs) of one mode's trees. All are 0 if a request has one row."""
    trees = reqs * minimum(1, extent.q_len - 1)
    return trees, trees * extent.q_len, trees * extent.tail_len, trees * extent.q_len * extent.tail_len
