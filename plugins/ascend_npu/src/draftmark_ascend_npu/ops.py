"""torch_npu's operators: the only file that names them. Every call is first held against the rules of its page.

FIA is the page torch_npu.npu_fused_infer_attention_score and SCATTER the page torch_npu.npu_scatter_pa_kv_cache, for
the products A2 and A3; CALLS is how vllm-ascend 0.23 (attention/attention_v1.py) calls the former. The operator's own
checks come late (in a queue, on the device) or not at all (its Meta kernel takes any block size): these come before it.

Not confirmed on hardware: FIA excludes pages from TND in one place and limits their size in another; CALLS use both
together, keys as [blocks, 128, heads · D], and so does this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from draftmark import BackendError

from .support import BLOCK, HEAD_DIM, MAX_GROUP, MAX_HEADS, MAX_REQUESTS, MAX_ROW

CAUSAL, FULL_MASK = 3, 0
"""sparse_mode: the mask's lower right corner meets the last query and the last key; a mask of Q_S x KV_S, or none."""
TRIANGLE = (2048, 2048)
INT32_MAX = 2**31 - 1


class OperatorRule(BackendError):
    """A call that the operator's page forbids. It never reached the operator."""


def _rule(holds: bool, what: str, source: str) -> None:
    if not holds:
        raise OperatorRule(f"{what} ({source})")


@cache
def _library() -> Any:
    """torch_npu, imported when the first operator is called."""
    import torch_npu

    return torch_npu


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without ownership: a captured call must not keep its graph's intermediates from reuse."""
    other: torch.Tensor = _library()._C._weak_ref_tensor(tensor)
    return other


def scatter_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store rows at their slots, K and V in one launch.

    Args:
        k, v: ``[rows, kv_heads, head_dim]`` in the cache's dtype; made contiguous if they are not.
        k_cache, v_cache: ``[num_pages, 128, kv_heads, head_dim]``, contiguous; written in place.
        slots: int64 ``[rows]``, unique, each in 0 … num_pages · 128 - 1. Their values are the caller's promise.

    Raises:
        OperatorRule: shapes, dtypes or layouts that SCATTER forbids.
    """
    k, v = k.contiguous(), v.contiguous()  # SCATTER: non-contiguous inputs are not supported
    for name, rows, pages in (("key", k, k_cache), ("value", v, v_cache)):
        _rule(rows.dim() == 3 and pages.dim() == 4, f"{name} must be 3-D and its cache 4-D", "SCATTER, parameters")
        _rule(rows.dtype == pages.dtype, f"{name} is {rows.dtype}, its cache {pages.dtype}", "SCATTER, limits")
        _rule(pages.is_contiguous(), f"{name}_cache must be contiguous", "SCATTER, limits")
        _rule(rows.shape[1:] == pages.shape[2:], f"{name} and its cache differ in heads or head_dim", "SCATTER, case 1")
    _rule(slots.shape == k.shape[:1] == v.shape[:1], "slot_mapping must have one slot for each row", "SCATTER, case 1")
    _rule(slots.dtype in (torch.int32, torch.int64), f"slot_mapping is {slots.dtype}", "SCATTER, slot_mapping")
    # The default cache_mode is NZ: without "Norm" the rows would land in another layout, silently.
    _library().npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")


@dataclass(frozen=True)
class PagedAttention:
    """One fused call over pages, in TND; all but the host lists, which an update brings anew.

    Attributes:
        q: ``[T, num_heads, 128]``, contiguous.
        k, v: ``[num_pages, 128, kv_heads, 128]``, contiguous.
        tables: int32 ``[R, max_pages_per_req]``, contiguous.
        causal: int8 ``[2048, 2048]`` with ones above the diagonal, or None: every row sees every key.
        out: like q.
        lse: float32 ``[T, num_heads, 1]``, natural logarithm; or ``[1]``, which the operator asks for all the same.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    causal: torch.Tensor | None
    scale: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def wants_lse(self) -> bool:
        """Whether `lse` is to be written."""
        return self.lse.dim() == 3

    def workspace(self, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """Scratch memory that serves any later lists of the same call."""
        self._check(rows, keys)
        query = _library()._npu_fused_infer_attention_score_get_max_workspace
        found: torch.Tensor = query(self.q, *self._kv(), **self._arguments(rows, keys))
        return found

    def launch(self, rows: Sequence[int], keys: Sequence[int], workspace: torch.Tensor | None = None) -> None:
        """Run, or, inside an update, replace what a graph will run.

        Args:
            rows: running sums of query rows, no leading 0. keys: keys of each request, not summed.
            workspace: from `workspace`; None lets torch_npu take one of its own, which no graph would keep.

        Raises:
            OperatorRule: what FIA forbids.
        """
        self._check(rows, keys)
        operator = _library().npu_fused_infer_attention_score.out
        arguments = self._arguments(rows, keys)
        operator(self.q, *self._kv(), **arguments, workspace=workspace, out=[self.out, self.lse])

    def weak(self) -> PagedAttention:
        """The same call, holding none of its memory."""
        return replace(self, q=alias(self.q), out=alias(self.out))

    def _kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """FIA: a paged cache is [blocks, block, heads · D]."""
        return self.k.flatten(2), self.v.flatten(2)

    def _arguments(self, rows: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
        return {
            "atten_mask": self.causal,
            "actual_seq_lengths": list(rows),
            "actual_seq_lengths_kv": list(keys),
            "block_table": self.tables,
            "num_heads": self.q.shape[1],
            "scale": self.scale,
            "input_layout": "TND",
            "num_key_value_heads": self.k.shape[2],
            "sparse_mode": FULL_MASK if self.causal is None else CAUSAL,
            "block_size": self.k.shape[1],
            "softmax_lse_flag": self.wants_lse,
        }

    def _check(self, rows: Sequence[int], keys: Sequence[int]) -> None:
        _check_tensors(self.q, self.k, self.v, self.out)
        q, k = self.q, self.k
        _rule(q.dim() == 3 and k.dim() == 4, "q is [T, heads, D], pages [blocks, block, heads, D]", "FIA, input_layout")
        _rule(q.shape[2] == HEAD_DIM, f"head_dim is {q.shape[2]}, but TND takes {HEAD_DIM}", "FIA, TND limits")
        _rule(k.shape[1] == BLOCK, f"block_size is {k.shape[1]}, but {BLOCK} is served", "FIA, block_size")
        _rule(k.shape[2] * k.shape[3] <= MAX_ROW, f"a token has {k.shape[2] * k.shape[3]} values", "FIA, PageAttention")
        _check_lists(rows, keys, q.shape[0])
        _check_tables(self.tables, keys, k.shape[1])
        if self.causal is not None:
            shape, kind = tuple(self.causal.shape), self.causal.dtype
            _rule(shape == TRIANGLE and kind == torch.int8, f"the mask is {kind} {list(shape)}", "FIA, atten_mask")


@dataclass(frozen=True)
class TailAttention:
    """One fused call over a tree's tail, in BSND with a dense mask. Its lengths are shapes, so no update is needed.

    Attributes:
        q: ``[R, q, num_heads, 128]``. k, v: ``[R, T, kv_heads, 128]``.
        mask: int8 ``[R, 1, q, T]``, 1 where a row must not look.
        out: like q. lse: float32 ``[R, num_heads, q, 1]``, natural logarithm.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor

    def launch(self) -> None:
        """Run."""
        self._check()
        arguments = {
            "atten_mask": self.mask,
            "num_heads": self.q.shape[2],
            "scale": self.scale,
            "input_layout": "BSND",
            "num_key_value_heads": self.k.shape[2],
            "sparse_mode": FULL_MASK,
            "softmax_lse_flag": True,
        }
        operator = _library().npu_fused_infer_attention_score.out
        operator(self.q, self.k, self.v, **arguments, out=[self.out, self.lse])

    def _check(self) -> None:
        _check_tensors(self.q, self.k, self.v, self.out)
        reqs, rows = self.q.shape[:2]
        shape = (reqs, 1, rows, self.k.shape[1])
        _rule(tuple(self.mask.shape) == shape, f"the mask is {list(self.mask.shape)}, not {shape}", "FIA, atten_mask")
        dense = self.mask.dtype == torch.int8 and self.mask.is_contiguous()
        _rule(dense, f"the mask must be int8 and contiguous, got {self.mask.dtype}", "FIA, atten_mask")
        _rule(self.lse.dtype == torch.float32, f"softmax_lse is {self.lse.dtype}", "FIA, softmax_lse")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    kinds = {one.dtype for one in (q, k, v, out)}
    _rule(len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}, f"dtypes are {kinds}", "FIA, query, key, value")
    _rule(all(one.is_contiguous() for one in (q, k, v, out)), "tensors must be contiguous", "FIA, query, key, value")
    _rule(k.shape == v.shape, f"key is {list(k.shape)}, value {list(v.shape)}", "FIA, general limits")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    fits = heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUP and heads <= MAX_HEADS
    _rule(fits, f"{heads} query heads on {kv_heads} KV heads", "FIA, num_key_value_heads")


def _check_lists(rows: Sequence[int], keys: Sequence[int], total: int) -> None:
    """The two lists look alike and mean different things: sums of rows, but keys of each request."""
    _rule(len(rows) == len(keys), f"{len(rows)} query and {len(keys)} key lengths", "FIA, TND limits")
    _rule(0 < len(rows) <= MAX_REQUESTS, f"{len(rows)} requests, but 1 … {MAX_REQUESTS} are served", "FIA, TND limits")
    ends = [0, *rows]
    falls = any(b < a for a, b in zip(ends, rows, strict=False))
    _rule(not falls, f"actual_seq_lengths {list(rows)} falls, but it is a running sum", "FIA, actual_seq_lengths")
    _rule(rows[-1] == total, f"actual_seq_lengths ends at {rows[-1]}, but q has {total} rows", "CALLS pad to agree")
    in_range = all(0 <= n <= INT32_MAX for n in keys)
    _rule(in_range, f"actual_seq_lengths_kv is {list(keys)}", "FIA, actual_seq_lengths_kv")


def _check_tables(tables: torch.Tensor, keys: Sequence[int], block: int) -> None:
    _rule(tables.dtype == torch.int32 and tables.dim() == 2, f"block_table is {tables.dtype}", "FIA, block_table")
    _rule(tables.is_contiguous(), "block_table must be contiguous", "FIA, block_table")
    rows, width = tables.shape
    _rule(rows == len(keys), f"block_table has {rows} rows for {len(keys)} requests", "FIA, block_table")
    columns = -(-max(keys) // block)
    _rule(
        columns <= width,
        f"block_table has {width} columns, but {max(keys)} tokens need {columns}; size it from max_kv_len",
        "FIA, block_table; sglang#22778",
    )
