"""Every call into FlashInfer, and nothing else.

The wrappers are not used: outside graph mode they bind tensors that `plan()` makes, in graph mode they freeze the rows
of the first plan and take the ragged worst case for its size, and each brings 16 MiB of its own. What is used is the
level below, which vLLM and SGLang reach through the wrappers' private fields:

* `flashinfer.prefill.get_batch_prefill_module`, a module-level function;
* of what it returns, `plan` and `workspace_size` by position (`PLAN_ARGUMENTS`, `WORKSPACE_ARGUMENTS`), and
  `paged_run` by name (`RUN_ARGUMENTS`);
* `flashinfer.merge_state_in_place`, public.

No name with an underscore. The version is pinned (`version.TESTED`), and `tests/test_version_drift.py` reads these
signatures out of the installed package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from draftmark import AttentionShape
from draftmark.runtime import KVCache

from .partition import Partition

WORKSPACE_ARGUMENTS = (
    "qo_indptr", "kv_indptr", "kv_len_arr", "total_num_rows", "batch_size", "num_qo_heads", "num_kv_heads",
    "page_size", "enable_cuda_graph", "head_dim_qk", "head_dim_vo", "causal", "window_left", "fixed_split_size",
    "disable_split_kv", "num_colocated_ctas", "uniform_q_len",
)  # fmt: skip
"""Of `workspace_size`, behind ``device_buffer``; and of `plan`, behind its three workspaces."""
PLAN_ARGUMENTS = (
    "float_workspace_buffer", "int_workspace_buffer", "page_locked_int_workspace_buffer", *WORKSPACE_ARGUMENTS
)  # fmt: skip
RUN_ARGUMENTS = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q", "paged_k_cache", "paged_v_cache",
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "o", "maybe_lse", "mask_mode",
    "layout", "window_left", "enable_pdl", "maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes",
    "maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr", "logits_soft_cap", "sm_scale",
    "scale_q", "scale_k", "scale_v", "rope_scale", "rope_theta", "token_pos_in_items_len", "workspace_size",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Attributes:
        qo_indptr, kv_indptr: int32 ``[R + 1]`` on the host: rows, and pages of `page_size` tokens.
        rows: query rows of the batch.
        page_size: 1 for single tokens.
        causal, window_left: as the pass will run.
        partition: how it is cut.
        q_len: rows of every request, if that is what the grid may count on.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    rows: int
    page_size: int
    causal: bool
    window_left: int
    partition: Partition
    q_len: int = 0


@dataclass(frozen=True)
class Pages:
    """What one pass reads: int32 indptr ``[R + 1]``, ids, tokens of each last page ``[R]``; mask bits, their indptr."""

    indptr: torch.Tensor
    ids: torch.Tensor
    last_page_len: torch.Tensor
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


class Vendor:
    """FlashInfer's FA2 for one attention shape: plans, passes, the merge.

    Args:
        shape: heads, dtype, window, cap, scale.
        pdl: programmatic dependent launch, sm_90 and newer.
        masked: a level without the window is needed too.
    """

    def __init__(self, shape: AttentionShape, *, pdl: bool, masked: bool) -> None:
        self._shape = shape
        self._pdl = pdl
        self._scale = shape.softmax_scale if shape.softmax_scale is not None else shape.head_dim**-0.5
        windows = {shape.window_left >= 0, *((False,) if masked else ())}
        self._modules = {window: _module(*_key(shape, window)) for window in windows}
        self._mask_modes, self._layout = _constants()

    def plan(self, asked: Request, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor) -> Sequence[int]:
        """Write the plan to `pinned`, enqueue its copy to `ints`; returns where its arrays lie, for `run`.

        No wait: what FlashInfer needs of the batch is on the host already.
        """
        module = self._modules[asked.window_left >= 0]
        found: Sequence[int] = module.plan(floats, ints, pinned, *_arguments(self._shape, asked))
        return found

    def workspace_size(self, asked: Request, device_buffer: torch.Tensor) -> tuple[int, int]:
        """Bytes of the float and the integer workspace, by FlashInfer's own count."""
        module = self._modules[asked.window_left >= 0]
        floats, ints = module.workspace_size(device_buffer, *_arguments(self._shape, asked))
        return int(floats), int(ints)

    def run(
        self,
        plan: Sequence[int],
        floats: torch.Tensor,
        ints: torch.Tensor,
        q: torch.Tensor,
        cache: KVCache,
        qo_indptr: torch.Tensor,
        pages: Pages,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool,
        window_left: int,
    ) -> None:
        """One pass. `lse` fp32 ``[rows, heads]`` comes in base 2, the kernels' own, and is merged in base 2."""
        mode = "CUSTOM" if pages.mask is not None else "CAUSAL" if causal else "NON_CAUSAL"
        self._modules[window_left >= 0].paged_run(
            float_workspace_buffer=floats, int_workspace_buffer=ints, plan_info_vec=plan, q=q, paged_k_cache=cache.k,
            paged_v_cache=cache.v, qo_indptr=qo_indptr, paged_kv_indptr=pages.indptr, paged_kv_indices=pages.ids,
            paged_kv_last_page_len=pages.last_page_len, o=out, maybe_lse=lse, mask_mode=self._mask_modes[mode],
            layout=self._layout, window_left=window_left, enable_pdl=self._pdl, maybe_custom_mask=pages.mask,
            maybe_mask_indptr=pages.mask_indptr, maybe_alibi_slopes=None, maybe_prefix_len_ptr=None,
            maybe_token_pos_in_items_ptr=None, maybe_max_item_len_ptr=None,
            logits_soft_cap=self._shape.logits_soft_cap, sm_scale=self._scale, scale_q=None, scale_k=None,
            scale_v=None, rope_scale=1.0, rope_theta=1e4, token_pos_in_items_len=0, workspace_size=floats.numel(),
        )  # fmt: skip

    @staticmethod
    def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        """`out` becomes attention over both sets of keys; log-sum-exps in base 2."""
        from flashinfer import merge_state_in_place

        merge_state_in_place(out, lse, other, other_lse)


def _arguments(shape: AttentionShape, asked: Request) -> tuple[Any, ...]:
    """In the order of `WORKSPACE_ARGUMENTS`. The third, the lengths, FA2's plan does not read."""
    cut = asked.partition
    return (
        asked.qo_indptr, asked.kv_indptr, asked.kv_indptr, asked.rows, asked.qo_indptr.numel() - 1,
        shape.num_qo_heads, shape.num_kv_heads, asked.page_size, cut.graph, shape.head_dim, shape.head_dim,
        asked.causal, asked.window_left, cut.chunk_pages, False, 0, asked.q_len if cut.graph else 0,
    )  # fmt: skip


def _key(shape: AttentionShape, window: bool) -> tuple[str, int, bool, bool]:
    return shape.q_dtype, shape.head_dim, window, shape.logits_soft_cap > 0


@cache
def _module(dtype: str, head_dim: int, window: bool, cap: bool) -> Any:
    """FA2 built for a dtype and head size; compiled at a machine's first call (half a minute), then kept on disk."""
    from flashinfer.prefill import get_batch_prefill_module
    from flashinfer.utils import PosEncodingMode

    kind = getattr(torch, dtype)
    position = PosEncodingMode.NONE.value
    return get_batch_prefill_module(
        "fa2", kind, kind, kind, torch.int32, head_dim, head_dim, position, window, cap, False
    )


@cache
def _constants() -> tuple[dict[str, int], int]:
    from flashinfer.utils import MaskMode, TensorLayout

    return {mode.name: mode.value for mode in MaskMode}, TensorLayout["NHD"].value
