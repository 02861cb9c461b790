"""Attention over the batch's tensors in plain torch, in parts that a mutant can replace one by one.

It works for both layouts: it reads the batch's page table, mask, depth and lengths, and nothing of the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftmark import AttentionShape, Mode
from draftmark.batch import Block, ForwardBatch, Tree
from draftmark.cache import KVCache

from ..mutant import around
from . import csr_attention as kernel

Tensor = torch.Tensor


def right_weights(scores: Tensor, shape: AttentionShape) -> Tensor:
    """Return the softmax of the scores. A row that sees no key gets zero weights."""
    return scores.softmax(-1).nan_to_num(0.0)


def right_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return weights ``[R, heads, q, width]`` of the keys with one sink per head; see `csr_attention.sunk`."""
    return kernel.sunk(scores, sinks).nan_to_num(0.0)


def right_cap(scores: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(score / cap)."""
    return cap * torch.tanh(scores / cap)


def right_heads(shape: AttentionShape) -> Tensor:
    """Return the KV head of each query head, int64 ``[num_qo_heads]``."""
    return torch.arange(shape.num_qo_heads) // shape.group_size


@dataclass(frozen=True)
class Parts:
    """Holds the functions that attention consists of. A mutant replaces one of them.

    Attributes:
        seen: (visibility bool ``[R, q, width]``, prefix ``[R]``, shape) → visibility.
        heads: shape → KV head of each query head.
        cap: (scores, cap) → capped scores.
        weights: (scores ``[R, heads, q, width]`` with -inf where nothing is seen, shape) → weights.
        sinks: replaces `weights` in layers with sinks: (scores as above, sinks ``[heads]``) → weights.
        used: (prefix ``[R]``, KV lengths ``[R]``, width, window_left) → keys that keep their V, others get 0.
        values: (weights, values ``[R, width, heads, dim]``, q_dtype) → outputs ``[R, q, heads, dim]``.
    """

    seen: Callable[[Tensor, Tensor, AttentionShape], Tensor] = lambda seen, prefix, shape: seen
    heads: Callable[[AttentionShape], Tensor] = right_heads
    used: Callable[[Tensor, Tensor, int, int], Tensor] = kernel.used
    cap: Callable[[Tensor, float], Tensor] = right_cap
    weights: Callable[[Tensor, AttentionShape], Tensor] = right_weights
    sinks: Callable[[Tensor, Tensor], Tensor] = right_sinks
    values: Callable[[Tensor, Tensor, torch.dtype], Tensor] = lambda weights, v, dtype: torch.einsum(
        "rhqk,rkhd->rqhd", weights, v
    )


def attending(parts: Parts) -> Callable[[Any], None]:
    """Return a patch that makes the backend attend with these parts."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            attend_plainly(backend.geometry.attention, parts, q, cache, batch, out)

        around(backend, "attend", call)

    return patch


def attend_plainly(
    shape: AttentionShape, parts: Parts, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor
) -> None:
    """Attend all requests of a uniform batch at once, and those of EXTEND and RAGGED_VERIFY one by one."""
    if batch.mode not in (Mode.EXTEND, Mode.RAGGED_VERIFY):
        r, n, t = batch.padded_reqs, batch.q_lens[0], batch.tail_lens[0]
        if isinstance(batch.tail, Tree):
            bits, depth = kernel.mask_bits(batch.tail.mask.view(r, n, -1), t), batch.tail.depth
        else:
            bits, depth = kernel.causal_bits(n, t, q.device).expand(r, n, t), torch.arange(t).expand(r, t)
            bits = bits | isinstance(batch.tail, Block)
        block = q.view(r, n, *q.shape[1:])
        found = _block(shape, parts, block, cache, (batch.page_table, batch.prefix_lens), bits, depth)
        out.copy_(found.reshape(out.shape))
        return
    first = 0
    out.zero_()
    for one, n in enumerate(batch.q_indptr.diff().tolist()):
        if n:
            rows, here = slice(first, first + n), slice(one, one + 1)
            bits, depth = kernel.causal_bits(n, n, q.device), torch.arange(n)[None]
            if isinstance(batch.tail, Tree):
                bits, depth = kernel.mask_bits(batch.tail.mask[rows], n)[None], batch.tail.depth[rows][None]
            where = batch.page_table[here], batch.prefix_lens[here]
            out[rows].copy_(_block(shape, parts, q[rows][None], cache, where, bits, depth)[0])
        first += n


def _block(
    shape: AttentionShape,
    parts: Parts,
    q: Tensor,
    cache: KVCache,
    where: tuple[Tensor, Tensor],
    bits: Tensor,
    depth: Tensor,
) -> Tensor:
    """Return the attention output ``[R, q, heads, dim]`` in the dtype of q."""
    table, prefix = where[0].long().clamp(0, cache.k.shape[0] - 1), where[1]
    pools = (cache.k, cache.k_scale), (cache.v, cache.v_scale)
    k, v = (kernel.gathered(pool, table, scale).float() for pool, scale in pools)
    used = parts.used(prefix, prefix + depth.shape[1], k.shape[1], shape.window_left)
    k, v = (one.masked_fill(~used[:, :, None, None], 0.0) for one in (k, v))
    seen = kernel.visible(prefix, k.shape[1], bits, depth, shape.window_left)
    seen, heads = parts.seen(seen, prefix, shape), parts.heads(shape)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.float(), k[:, :, heads]) * shape.softmax_scale
    if shape.logits_soft_cap > 0:
        scores = parts.cap(scores, shape.logits_soft_cap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = parts.weights(scores, shape) if cache.sinks is None else parts.sinks(scores, cache.sinks)
    return parts.values(weights, v[:, :, heads], q.dtype).to(q.dtype)
