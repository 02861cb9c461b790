"""Every call of FlashInfer that the plugin makes.

The plugin does not use FlashInfer's wrappers. Outside graph mode they bind tensors that `plan()` makes. In graph mode
they fix the rows of the first plan and reserve the ragged worst case. Each also has 16 MiB of its own memory. The
plugin calls the level below, which vLLM and SGLang reach through private fields of the wrappers:

* `flashinfer.prefill.get_batch_prefill_module`, a module-level function;
* of its result: `plan` and `workspace_size` by position (`PLAN_ARGUMENTS`, `WORKSPACE_ARGUMENTS`), and `paged_run` by
  name (`RUN_ARGUMENTS`);
* `flashinfer.merge_state_in_place`, which is public.

No name with an underscore is used. `tests/test_version_drift.py` reads these signatures in every accepted release
(`version.ACCEPTED`).
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
from .version import since

WORKSPACE_ARGUMENTS = (
    "qo_indptr", "kv_indptr", "kv_len_arr", "total_num_rows", "batch_size", "num_qo_heads", "num_kv_heads",
    "page_size", "enable_cuda_graph", "head_dim_qk", "head_dim_vo", "causal", "window_left", "fixed_split_size",
    "disable_split_kv", "num_colocated_ctas", "uniform_q_len",
)  # fmt: skip
"""Arguments of `workspace_size` after ``device_buffer``, and of `plan` after its three workspaces."""
ARGUMENTS_SINCE_0_7_4 = ("fixed_uniform_q_len",)
"""Further arguments of both, since 0.7.4. The plugin passes False: it plans an unsplit batch without graph mode."""
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
    """Holds FlashInfer's arguments of one plan.

    Attributes:
        qo_indptr: int32 ``[R + 1]`` on the host: row offsets.
        kv_indptr: int32 ``[R + 1]`` on the host: offsets in pages of `page_size` tokens.
        rows: query rows of the batch.
        page_size: tokens per page; 1 for single tokens.
        causal: true if the pass is causal.
        window_left: keys to the left in the pass; -1 for all.
        partition: partition of the batch.
        q_len: rows of every request in a uniform causal or common pass; 0 otherwise.
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
    """Holds the page list of one attention pass, as FlashInfer reads it on the device.

    Attributes:
        indptr: int32 ``[R + 1]``: offsets in `ids`.
        ids: int32: page ids, or token slots as pages of one token.
        last_page_len: int32 ``[R]``: tokens in each request's last page.
        mask: uint8: mask bits; None without a custom mask.
        mask_indptr: int32 ``[R + 1]``: byte offsets in `mask`.
    """

    indptr: torch.Tensor
    ids: torch.Tensor
    last_page_len: torch.Tensor
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


class Vendor:
    """Calls FlashInfer's FA2 functions for one attention shape: plan, run a pass, and merge two passes.

    Args:
        shape: heads, dtype, window, logits cap and scale.
        pdl: true to use programmatic dependent launch (sm_90 and newer).
        masked: true if the geometry also runs passes without the window.
    """

    def __init__(self, shape: AttentionShape, *, pdl: bool, masked: bool) -> None:
        self._shape = shape
        self._pdl = pdl
        self._scale = shape.softmax_scale if shape.softmax_scale is not None else shape.head_dim**-0.5
        windows = {shape.window_left >= 0, *((False,) if masked else ())}
        self._modules = {window: _module(*_key(shape, window)) for window in windows}
        self._mask_modes, self._layout = _constants()

    def plan(self, request: Request, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor) -> Sequence[int]:
        """Write the plan to `pinned` and enqueue its copy to `ints`. Return offsets of its arrays, for `run`.

        It does not wait: FlashInfer reads only host tensors.
        """
        module = self._modules[request.window_left >= 0]
        found: Sequence[int] = module.plan(floats, ints, pinned, *_arguments(self._shape, request))
        return found

    def workspace_size(self, request: Request, device_buffer: torch.Tensor) -> tuple[int, int]:
        """Return bytes of the float and the integer workspace, by FlashInfer's own count."""
        module = self._modules[request.window_left >= 0]
        floats, ints = module.workspace_size(device_buffer, *_arguments(self._shape, request))
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
        """Run one attention pass. `lse` (float32 ``[rows, heads]``) gets log-sum-exps in base 2, as in `merge`."""
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
        """Merge two partial results into `out` and `lse`; log-sum-exps are in base 2."""
        from flashinfer import merge_state_in_place

        merge_state_in_place(out, lse, other, other_lse)


def _arguments(shape: AttentionShape, request: Request) -> tuple[Any, ...]:
    """Return the arguments in the order of `WORKSPACE_ARGUMENTS`, and further ones since 0.7.4.

    FA2's plan does not read the third, the lengths.
    """
    cut = request.partition
    further = (False,) if since("0.7.4") else ()
    return (
        request.qo_indptr, request.kv_indptr, request.kv_indptr, request.rows, request.qo_indptr.numel() - 1,
        shape.num_qo_heads, shape.num_kv_heads, request.page_size, cut.graph, shape.head_dim, shape.head_dim,
        request.causal, request.window_left, cut.chunk_pages, False, 0, request.q_len if cut.graph else 0, *further,
    )  # fmt: skip


def _key(shape: AttentionShape, window: bool) -> tuple[str, int, bool, bool]:
    return shape.q_dtype, shape.head_dim, window, shape.logits_soft_cap > 0


@cache
def _module(dtype: str, head_dim: int, window: bool, cap: bool) -> Any:
    """Return FlashInfer's FA2 module. The first call on a machine compiles it (30 s); FlashInfer caches it on disk."""
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
