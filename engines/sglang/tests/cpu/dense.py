"""Independent reference for features that SGLang's `torch_native` lacks: dense float64 attention with its own KV.

It supports decoding without drafts in layers with windows, logit caps and sinks.
"""

from __future__ import annotations

from typing import Any

import torch

SLOTS = 8192 + 64


def use_dense_attention() -> None:
    """Register the dense reference under the name `triton`, which SGLang's lists of supported backends contain."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Dense(AttentionBackend):
        """Computes dense float64 attention. It has its own K and V of every layer, at the slots of SGLang's KV pool."""

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
            self.needs_cpu_seq_lens, self._kept = True, {}

        def init_forward_metadata(self, forward_batch: Any) -> None: ...

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, sinks: Any = None
        ) -> torch.Tensor:
            heads, kv_heads, width = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
            kept = self._kept.setdefault(layer.layer_id, torch.zeros(2, SLOTS, kv_heads, width, dtype=torch.float64))
            kept[0, batch.out_cache_loc] = k.view(-1, kv_heads, width).double()
            kept[1, batch.out_cache_loc] = v.view(-1, kv_heads, width).double()
            rows = q.view(-1, heads, width).double().split([new for _, new in _lengths(batch)])
            outs = []
            for one, (before, new), row in zip(rows, _lengths(batch), batch.req_pool_indices.tolist(), strict=True):
                slots = self.req_to_token_pool.req_to_token[row, : before + new].long()
                keys, values = kept[:, slots].repeat_interleave(heads // kv_heads, 2)
                outs.append(_attend(one, keys, values, layer, before, sinks))
            return torch.cat(outs).reshape(-1, heads * width).to(q.dtype)

        forward_decode = forward_extend

    attention_registry.ATTENTION_BACKENDS["triton"] = Dense


def _lengths(batch: Any) -> list[tuple[int, int]]:
    """Return (positions before this forward, rows of this forward) of each request."""
    if batch.forward_mode.is_decode():
        return [(int(length) - 1, 1) for length in batch.seq_lens]
    return list(zip(batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True))


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any, before: int, sinks: Any) -> Any:
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scaling
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    back = torch.arange(before, before + len(q))[:, None] - torch.arange(len(keys))
    window = layer.sliding_window_size
    scores[:, (back < 0) | (back > window if window is not None and window >= 0 else back < 0)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)
