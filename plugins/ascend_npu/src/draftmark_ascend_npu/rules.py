"""Rules of the operators, checked before any call. The operators' own checks come late (queue, device) or never.

Sources of the rules, for the products A2 and A3:

* FIA: torch_npu's page of npu_fused_infer_attention_score. SCATTER: its page of npu_scatter_pa_kv_cache.
* HOST: checks in the public host code of CANN 8.5 to 9.1.
* CALLS: calls of npu_fused_infer_attention_score in vllm-ascend 0.23 (attention/attention_v1.py).
* MLA: its calls with query_rope and key_rope (attention/mla_v1.py), main of August 2026.

Not confirmed on hardware: FIA excludes pages from TND in one place and limits their size in another. HOST accepts the
two together, with keys as [blocks, block, heads · D]. CALLS use that with blocks of 128, and so does this plugin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark import BackendError

from .support import (
    BLOCK_STEP,
    HEAD_STEP,
    LATENT_BLOCK,
    LATENT_HEADS,
    LATENT_REST,
    LATENT_ROWS,
    LATENT_VALUE,
    MAX_BLOCK,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_REQUESTS,
    MAX_ROW,
    MAX_SLOTS,
    UNGROUPED_HEAD_DIMS,
)

TRIANGLE = (2048, 2048)
INT32_MAX = 2**31 - 1


class OperatorRule(BackendError):
    """Error for a call that an operator's page forbids, raised before the operator is called."""


def rule(holds: bool, what: str, source: str) -> None:
    """Raise `OperatorRule` with `what` and the rule's source if `holds` is false."""
    if not holds:
        raise OperatorRule(f"{what} ({source})")


def check_scatter(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Check SCATTER's rules for rows, caches and slots. The caller guarantees the slots' values."""
    for name, rows, pages in (("key", k, k_cache), ("value", v, v_cache)):
        rule(rows.dim() == 3 and pages.dim() == 4, f"{name} must be 3-D and its cache 4-D", "SCATTER, parameters")
        rule(rows.dtype == pages.dtype, f"{name} is {rows.dtype}, its cache {pages.dtype}", "SCATTER, limits")
        rule(pages.is_contiguous(), f"{name}_cache must be contiguous", "SCATTER, limits")
        rule(rows.shape[1:] == pages.shape[2:], f"{name} and its cache differ in heads or head_dim", "SCATTER, case 1")
    rule(slots.shape == k.shape[:1] == v.shape[:1], "slot_mapping must have one slot for each row", "SCATTER, case 1")
    rule(slots.dtype == torch.int32, f"slot_mapping is {slots.dtype}, but int32 is passed", "CALLS, slot_mapping")
    capacity = k_cache.shape[0] * k_cache.shape[1]
    rule(capacity <= MAX_SLOTS, f"the cache has {capacity} slots, more than int32 can index", "CALLS, slot_mapping")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Check FIA's rules for queries, keys, values and outputs in every layout."""
    kinds = {one.dtype for one in (q, k, v, out)}
    rule(len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}, f"dtypes are {kinds}", "FIA, query, key, value")
    rule(all(one.is_contiguous() for one in (q, k, v, out)), "tensors must be contiguous", "FIA, query, key, value")
    rule(k.shape == v.shape, f"key is {list(k.shape)}, value {list(v.shape)}", "FIA, general limits")
    rule(k.shape[-1] == q.shape[-1], f"query heads have {q.shape[-1]} values, keys {k.shape[-1]}", "HOST, head sizes")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    fits = heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUP and heads <= MAX_HEADS
    rule(fits, f"{heads} query heads on {kv_heads} KV heads", "FIA, num_key_value_heads")


def check_pages(q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the rules for shapes in TND over pages."""
    rule(q.dim() == 3 and k.dim() == 4, "q is [T, heads, D], pages [blocks, block, heads, D]", "FIA, input_layout")
    dim, block = q.shape[2], k.shape[1]
    grouped = q.shape[1] != k.shape[2]
    known = (dim % HEAD_STEP == 0 and dim <= MAX_HEAD_DIM) if grouped else dim in UNGROUPED_HEAD_DIMS
    rule(known, f"head_dim is {dim}, which TND does not accept with these heads", "HOST, TND")
    rule(block % BLOCK_STEP == 0 and block <= MAX_BLOCK, f"block_size is {block}", "HOST, TND")
    rule(k.shape[2] * k.shape[3] <= MAX_ROW, f"a token has {k.shape[2] * k.shape[3]} values", "FIA, PageAttention")


def check_latent(
    q: torch.Tensor, q_rest: torch.Tensor | None, values: torch.Tensor, rest: torch.Tensor, out: torch.Tensor
) -> None:
    """Check the rules for latent rows: query and cache in two parts, heads a power of two."""
    rule(q_rest is not None, "key_rope is given without query_rope", "MLA, query_rope")
    assert q_rest is not None
    tensors = (q, q_rest, values, rest, out)
    kinds = {one.dtype for one in tensors}
    rule(len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}, f"dtypes are {kinds}", "FIA, query, key, value")
    rule(all(one.is_contiguous() for one in tensors), "tensors must be contiguous", "FIA, query, key, value")
    rule(q.dim() == 3 and q.shape == out.shape, f"query is {list(q.shape)}, output {list(out.shape)}", "MLA, query")
    heads, width = q.shape[1:]
    rule(heads in LATENT_HEADS, f"{heads} query heads, but they are a power of two up to 128", "MLA, num_heads")
    rule(width == LATENT_VALUE, f"query has {width} values, but latent rows have {LATENT_VALUE}", "MLA, query")
    rule(q_rest.shape == (*q.shape[:2], LATENT_REST), f"query_rope is {list(q_rest.shape)}", "MLA, query_rope")
    pages = (values.shape[0], LATENT_BLOCK, 1)
    rule(tuple(values.shape) == (*pages, LATENT_VALUE), f"the value parts are {list(values.shape)}", "MLA, key")
    rule(tuple(rest.shape) == (*pages, LATENT_REST), f"the rests are {list(rest.shape)}", "MLA, key_rope")


def check_latent_rows(rows: Sequence[int]) -> None:
    """Check the rows of each request of latent rows in TND; `rows` has running sums."""
    most = max((end - start for start, end in zip([0, *rows[:-1]], rows, strict=True)), default=0)
    rule(most <= LATENT_ROWS, f"a request has {most} rows, but at most {LATENT_ROWS} are served", "MLA, TND")


def check_triangle(mask: torch.Tensor) -> None:
    """Check the constant mask of sparse_mode 3."""
    fits = tuple(mask.shape) == TRIANGLE and mask.dtype == torch.int8
    rule(fits, f"the mask is {mask.dtype} {list(mask.shape)}", "FIA, atten_mask")


def check_dense_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the dense mask of a tail: all rows of q by all keys."""
    shape = (q.shape[0], 1, q.shape[1], k.shape[1])
    rule(tuple(mask.shape) == shape, f"the mask is {list(mask.shape)}, not {shape}", "FIA, atten_mask")
    dense = mask.dtype == torch.int8 and mask.is_contiguous()
    rule(dense, f"the mask must be int8 and contiguous, got {mask.dtype}", "FIA, atten_mask")


def check_lists(rows: Sequence[int], keys: Sequence[int], total: int, causal: bool) -> None:
    """Check the two lists: `rows` has running sums of query rows, `keys` has keys of each request."""
    rule(len(rows) == len(keys), f"{len(rows)} query and {len(keys)} key lengths", "FIA, TND limits")
    rule(0 < len(rows) <= MAX_REQUESTS, f"{len(rows)} requests, but 1 … {MAX_REQUESTS} are served", "FIA, TND limits")
    starts = [0, *rows[:-1]]
    falls = any(end < start for start, end in zip(starts, rows, strict=True))
    rule(not falls, f"actual_seq_lengths {list(rows)} decreases, but it is a running sum", "FIA, actual_seq_lengths")
    rule(rows[-1] == total, f"actual_seq_lengths ends at {rows[-1]}, but q has {total} rows", "CALLS pad to agree")
    in_range = all(0 <= n <= INT32_MAX for n in keys)
    rule(in_range, f"actual_seq_lengths_kv is {list(keys)}", "FIA, actual_seq_lengths_kv")
    short = causal and any(n < end - start for start, end, n in zip(starts, rows, keys, strict=True))
    rule(not short, f"a request has fewer keys than rows: {list(keys)}, {list(rows)}", "HOST, sparse_mode 3")


def check_tables(tables: torch.Tensor, keys: Sequence[int], block: int) -> None:
    """Check the block table. For a short row the device reads past it: HOST has no check in TND (sglang#22778)."""
    rule(tables.dtype == torch.int32 and tables.dim() == 2, f"block_table is {tables.dtype}", "FIA, block_table")
    rule(tables.is_contiguous(), "block_table must be contiguous", "FIA, block_table")
    rows, width = tables.shape
    rule(rows == len(keys), f"block_table has {rows} rows for {len(keys)} requests", "FIA, block_table")
    columns = -(-max(keys) // block)
    what = f"block_table has {width} columns, but {max(keys)} tokens need {columns}; size it from max_kv_len"
    rule(columns <= width, what, "FIA, block_table; sglang#22778")
