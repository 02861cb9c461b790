"""Wrappers of torch_npu's operators. `rules.py` checks every call first. No other file calls these operators.

The fused operator has two entry points in torch_npu for one kernel. npu_fused_infer_attention_score calls
aclnnFusedInferAttentionScoreV3, as vllm-ascend does. npu_fused_infer_attention_score_v2 calls V4. CANN 9 announces the
end of V3, so the plugin uses the second one if CANN has no V3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from draftmark import BackendError

from . import rules, switches
from .capability import FUSED_V3, FUSED_V4, has_operator

CAUSAL, NO_TRIANGLE = 3, 0
"""sparse_mode: CAUSAL aligns the mask's lower right corner with the last query and key; NO_TRIANGLE: dense or none."""
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
"""Names of this file's arguments in npu_fused_infer_attention_score_v2 where they differ."""


@cache
def _library() -> Any:
    """Import and return torch_npu. This runs when the first operator is called."""
    from .runtime import torch_npu

    return torch_npu


@dataclass(frozen=True)
class FusedEntry:
    """Holds one entry point of the operator, its workspace query, and its argument names.

    The queried workspace suits any later lists.
    """

    operator: Callable[..., Any]
    max_workspace: Callable[..., torch.Tensor]
    names: dict[str, str]

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Rename arguments to the names of this entry point."""
        return {self.names.get(name, name): value for name, value in given.items()}


@cache
def fused_version() -> str:
    """Return ``"v1"`` if CANN has V3, else ``"v2"``. DRAFTMARK_ASCEND_FUSED overrides this choice.

    Raises:
        BackendError: CANN has neither V3 nor V4.
    """
    if chosen := switches.fused():
        return chosen
    if has_operator(FUSED_V3):
        return "v1"
    if has_operator(FUSED_V4):
        return "v2"
    raise BackendError(
        f"neither {FUSED_V3} nor {FUSED_V4} is in CANN's operator libraries; source CANN's set_env.sh, or install CANN"
    )


@cache
def fused() -> FusedEntry:
    """Return the entry point for this installation of CANN."""
    library = _library()
    if fused_version() == "v1":
        query = library._npu_fused_infer_attention_score_get_max_workspace
        return FusedEntry(library.npu_fused_infer_attention_score.out, query, {})
    query = library._npu_fused_infer_attention_score_v2_get_max_workspace
    return FusedEntry(library.npu_fused_infer_attention_score_v2.out, query, V2_NAMES)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory without ownership: a captured call must not keep its graph's intermediates alive."""
    other: torch.Tensor = _library()._C._weak_ref_tensor(tensor)
    return other


def scatter_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store rows at their slots, K and V in one launch, with vllm-ascend's operator and slot dtype.

    Args:
        k, v: ``[rows, kv_heads, head_dim]`` in the cache's dtype; made contiguous if they are not.
        k_cache, v_cache: ``[num_pages, page_size, kv_heads, head_dim]``, contiguous; written in place.
        slots: int32 ``[rows]``, unique, each in 0 … num_pages · page_size - 1. The caller guarantees the values.

    Raises:
        OperatorRule: shapes, dtypes or layouts that SCATTER forbids.
    """
    k, v = k.contiguous(), v.contiguous()  # npu_scatter_pa_kv_cache does not support non-contiguous inputs
    rules.check_scatter(k, v, k_cache, v_cache, slots)
    # The default cache_mode is NZ: without "Norm" the rows would be stored in another layout, without an error.
    _library().npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")


def scatter_latent(k: torch.Tensor, values: torch.Tensor, rests: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latent rows at their slots, both parts in one launch.

    Args:
        k: ``[rows, 1, head_dim]``, whole rows.
        values, rests: ``[num_pages, page_size, elements]``, the two buffers of the cache; written in place.
        slots: as in `scatter_kv`.
    """
    width = values.shape[2]
    scatter_kv(k[..., :width], k[..., width:], values.unsqueeze(2), rests.unsqueeze(2), slots)


@dataclass(frozen=True)
class PagedAttention:
    """Holds the arguments of one fused call over pages in TND (tokens, heads, dim), except the host lists.

    Latent rows (MLA) have two more tensors, `q_rest` and `rest`. Then k and v are the value parts, and a logit is the
    sum of both products.

    Attributes:
        q: ``[T, num_heads, D]``, contiguous.
        k, v: ``[num_pages, page_size, kv_heads, D]``, contiguous.
        tables: int32 ``[R, max_pages_per_req]``, contiguous.
        causal: int8 ``[2048, 2048]`` with ones above the diagonal, or None if every row sees every key.
        scale: factor of the logits.
        out: shape of q.
        lse: float32 ``[T, num_heads, 1]``, natural logarithm; or a placeholder ``[1]``, which the operator needs.
        q_rest: ``[T, num_heads, E]``, contiguous, of latent rows; else None. num_heads is then a power of two.
        rest: ``[num_pages, page_size, 1, E]``, contiguous, of latent rows; else None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    causal: torch.Tensor | None
    scale: float
    out: torch.Tensor
    lse: torch.Tensor
    q_rest: torch.Tensor | None = None
    rest: torch.Tensor | None = None

    @property
    def wants_lse(self) -> bool:
        """True if the call writes `lse`."""
        return self.lse.dim() == 3

    def workspace(self, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """Return scratch memory that suits any later lists of this call."""
        self._check(rows, keys)
        entry = fused()
        return entry.max_workspace(self.q, *self._kv(), **entry.arguments(self._arguments(rows, keys)))

    def launch(self, rows: Sequence[int], keys: Sequence[int], workspace: torch.Tensor | None = None) -> None:
        """Run the call or, inside an update, replace the call that a graph runs.

        Args:
            rows: running sums of query rows, without a leading 0.
            keys: keys of each request, not summed.
            workspace: from `workspace`; with None torch_npu allocates one, which no graph would keep alive.

        Raises:
            OperatorRule: arguments that FIA forbids.
        """
        self._check(rows, keys)
        entry = fused()
        arguments = entry.arguments(self._arguments(rows, keys))
        entry.operator(self.q, *self._kv(), **arguments, workspace=workspace, out=[self.out, self.lse])

    def weak(self) -> PagedAttention:
        """Return this call without ownership of q and out."""
        rest = None if self.q_rest is None else alias(self.q_rest)
        return replace(self, q=alias(self.q), out=alias(self.out), q_rest=rest)

    def _kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as FIA needs a paged cache: [blocks, block, heads · D]; latent rows [blocks, 1, block, D]."""
        if self.rest is not None:
            return self.k.transpose(1, 2), self.v.transpose(1, 2)
        return self.k.flatten(2), self.v.flatten(2)

    def _arguments(self, rows: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
        rope = {} if self.rest is None else {"query_rope": self.q_rest, "key_rope": self.rest.transpose(1, 2)}
        return rope | {
            "atten_mask": self.causal,
            "actual_seq_lengths": list(rows),
            "actual_seq_lengths_kv": list(keys),
            "block_table": self.tables,
            "num_heads": self.q.shape[1],
            "scale": self.scale,
            "input_layout": "TND",
            "num_key_value_heads": self.k.shape[2],
            "sparse_mode": NO_TRIANGLE if self.causal is None else CAUSAL,
            "block_size": self.k.shape[1],
            "softmax_lse_flag": self.wants_lse,
        }

    def _check(self, rows: Sequence[int], keys: Sequence[int]) -> None:
        if self.rest is None:
            rules.check_pages(self.q, self.k)
            rules.check_tensors(self.q, self.k, self.v, self.out)
        else:
            rules.check_latent(self.q, self.q_rest, self.k, self.rest, self.out)
            rules.check_latent_rows(rows)
        rules.check_lists(rows, keys, self.q.shape[0], self.causal is not None)
        rules.check_tables(self.tables, keys, self.k.shape[1])
        if self.causal is not None:
            rules.check_triangle(self.causal)


@dataclass(frozen=True)
class TailAttention:
    """Holds the arguments of one fused call over draft trees, in BSND (batch, rows, heads, dim) with a dense mask.

    Its lengths are its shapes, so a replay needs no update of this call.

    Attributes:
        q: ``[R, q, num_heads, D]``. k, v: ``[R, T, kv_heads, D]``.
        mask: int8 ``[R, 1, q, T]``, 1 for a slot that a row does not see.
        scale: factor of the logits.
        out: shape of q. lse: float32 ``[R, num_heads, q, 1]``, natural logarithm.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor

    def launch(self) -> None:
        """Run the call."""
        rules.check_tensors(self.q, self.k, self.v, self.out)
        rules.check_dense_mask(self.mask, self.q, self.k)
        rules.rule(self.lse.dtype == torch.float32, f"softmax_lse is {self.lse.dtype}", "FIA, softmax_lse")
        entry = fused()
        arguments = entry.arguments(
            {
                "atten_mask": self.mask,
                "num_heads": self.q.shape[2],
                "scale": self.scale,
                "input_layout": "BSND",
                "num_key_value_heads": self.k.shape[2],
                "sparse_mode": NO_TRIANGLE,
                "softmax_lse_flag": True,
            }
        )
        entry.operator(self.q, self.k, self.v, **arguments, out=[self.out, self.lse])
