"""Calls of FlashInfer's MLA kernels that the plugin makes: one plan and one run for each pass.

FlashInfer's `BatchMLAPagedAttentionWrapper` runs the same two functions. In graphs it copies its arguments into
reserved buffers and keeps the first plan's sizes, so the plugin calls the level below: `flashinfer.jit.
gen_batch_mla_module`, which is public, and of its result `plan` and `run` by position. The kernels are "fa3" on sm_90
and "fa2" elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from draftmark import AttentionShape
from draftmark.runtime import KVCache

PLAN_ARGUMENTS = (
    "float_workspace_buffer", "int_workspace_buffer", "page_locked_int_workspace_buffer", "qo_indptr", "kv_indptr",
    "kv_len", "num_heads", "head_dim_o", "causal",
)  # fmt: skip
RUN_ARGUMENTS = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q_nope", "q_pe", "ckv_cache", "kpe_cache",
    "kv_indices", "o", "maybe_lse", "mask_mode_code", "num_heads", "page_size", "sm_scale", "return_lse_base_on_e",
    "ckv_scale", "kpe_scale", "maybe_ckv_scale_arr",
)  # fmt: skip
CAUSAL, NON_CAUSAL = "CAUSAL", "NON_CAUSAL"


@dataclass(frozen=True)
class LatentRequest:
    """Holds the arguments of one MLA plan, int32 on the host, for the requests that have rows.

    Attributes:
        qo_indptr: ``[n + 1]``, row offsets.
        kv_indptr: ``[n + 1]``, offsets of the requests' rows in the flat page table.
        kv_lens: ``[n]``, keys of each request.
        causal: true if a row sees only keys up to its own.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    causal: bool


class LatentVendor:
    """Calls FlashInfer's MLA functions for one attention shape.

    Args:
        shape: heads, row, value part, dtype and scale.
        arch: compute capability of the device, such as 90.
    """

    def __init__(self, shape: AttentionShape, arch: int) -> None:
        assert shape.softmax_scale is not None, "a latent geometry has a scale"
        self._shape, self._scale = shape, shape.softmax_scale
        rest = shape.head_dim - shape.value_width
        self._module = _module("fa3" if arch == 90 else "fa2", shape.q_dtype, shape.value_width, rest)
        self._mask_modes = _mask_modes()

    def plan(
        self, request: LatentRequest, floats: torch.Tensor, ints: torch.Tensor, scratch: torch.Tensor
    ) -> Sequence[int]:
        """Write the plan to `scratch` and enqueue a copy to `ints`. Return offsets of its arrays, for `run`.

        FlashInfer copies `scratch` to pinned memory of torch before it returns, so `scratch` can be reused at once.
        """
        a = self._shape
        found: Sequence[int] = self._module.plan(
            floats, ints, scratch, request.qo_indptr, request.kv_indptr, request.kv_lens, a.num_qo_heads,
            a.value_width, request.causal,
        )  # fmt: skip
        return found

    def run(
        self,
        plan: Sequence[int],
        floats: torch.Tensor,
        ints: torch.Tensor,
        q: torch.Tensor,
        cache: KVCache,
        page_table: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        causal: bool,
    ) -> None:
        """Run one pass. `lse` (float32 ``[rows, heads]``) gets natural log-sum-exps."""
        a, (values, rest) = self._shape, cache.parts
        self._module.run(
            floats, ints, plan, q[..., : a.value_width], q[..., a.value_width :], values, rest, page_table, out, lse,
            self._mask_modes[CAUSAL if causal else NON_CAUSAL], a.num_qo_heads, a.page_size, self._scale, True, 1.0,
            1.0, None,
        )  # fmt: skip


@cache
def _module(kernels: str, dtype: str, value_dim: int, rest: int) -> Any:
    """Return FlashInfer's MLA module. The first call on a machine compiles it; FlashInfer caches it on disk."""
    from flashinfer.jit import gen_batch_mla_module

    kind = getattr(torch, dtype)
    return gen_batch_mla_module(kernels, kind, kind, kind, torch.int32, value_dim, rest, False).build_and_load()


@cache
def _mask_modes() -> dict[str, int]:
    from flashinfer.utils import MaskMode

    return {mode.name: mode.value for mode in MaskMode}
