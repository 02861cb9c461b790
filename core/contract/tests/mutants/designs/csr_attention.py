"""Attention of the `csr` test backend over gathered pages: a float32 softmax under a visibility mask."""

from __future__ import annotations

import torch

from draftmark import AttentionShape


def causal_bits(q_len: int, tail_len: int, device: torch.device) -> torch.Tensor:
    """Return bool ``[1, q_len, tail_len]``: row j is tail slot tail_len - q_len + j and sees all slots up to it."""
    own = torch.arange(tail_len - q_len, tail_len, device=device)
    return (torch.arange(tail_len, device=device) <= own[:, None]).unsqueeze(0)


def mask_bits(words: torch.Tensor, tail_len: int) -> torch.Tensor:
    """Unpack int32 ``[R, q, words]`` into bool ``[R, q, tail_len]``."""
    slot = torch.arange(tail_len, device=words.device)
    return (words[..., slot // 32] >> (slot % 32).int()) & 1 == 1


def visible(
    prefix: torch.Tensor, width: int, bits: torch.Tensor, depth: torch.Tensor, window_left: int
) -> torch.Tensor:
    """Return bool ``[R, q, width]``: the keys that each row sees, within the window in positions.

    Args:
        prefix: prefix length of each request, ``[R]``.
        width: number of keys, in tokens.
        bits: visibility of tail slots, bool ``[R, q, tail_len]``.
        depth: depth of each tail slot, ``[R, tail_len]`` or ``[1, tail_len]``.
        window_left: tokens to the left that a row sees, or -1 without a window.
    """
    r, q_len, tail = bits.shape
    key = torch.arange(width, device=bits.device)
    tail_slot = key - prefix[:, None]
    inside = (tail_slot >= 0) & (tail_slot < tail)
    slot = tail_slot.clamp(0, tail - 1).long()
    seen = bits.gather(2, slot[:, None].expand(-1, q_len, -1)) & inside[:, None]
    seen |= (key < prefix[:, None])[:, None]
    if window_left >= 0:
        position = torch.where(inside, prefix[:, None] + depth.expand(r, tail).gather(1, slot), key)
        here = prefix[:, None] + depth[:, tail - q_len :]
        seen &= here[:, :, None] - position[:, None] <= window_left
    return seen


def used(prefix: torch.Tensor, lens: torch.Tensor, width: int, window_left: int) -> torch.Tensor:
    """Return bool ``[R, width]``: keys before the KV length that lie within the window of at least one row."""
    key = torch.arange(width, device=lens.device)
    first = prefix - window_left if window_left >= 0 else torch.zeros_like(prefix)
    return (key >= first[:, None]) & (key < lens[:, None])


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit dtypes as int8, because torch cannot index fp8 tensors."""
    return tensor.view(torch.int8) if tensor.element_size() == 1 else tensor


def stored(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Convert rows to the cache's dtype: value / scale."""
    return rows.to(dtype) if scale is None else (rows.float() / scale).to(dtype)


def gathered(pool: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return pages ``[R, n]`` of a pool as ``[R, n · P, heads, dim]``, multiplied by the scale."""
    pages = indexable(pool)[table].view(pool.dtype).flatten(1, 2)
    pages = pages.float() if pages.element_size() == 1 else pages  # torch has no fp8 arithmetic
    return pages if scale is None else pages.float() * scale


def sunk(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return softmax weights of scores ``[R, heads, q, width]``, with each head's sink in the denominator."""
    sink = sinks[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    mass = (scores - top).exp()
    return mass / (mass.sum(-1, keepdim=True) + (sink - top).exp())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    shape: AttentionShape,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of q ``[R, q, heads, dim]`` over k and v, in the shape and dtype of q.

    Args:
        k, v: ``[R, width, kv_heads, dim]``.
        seen: keys that each row sees, bool ``[R, q, width]``.
        sinks: attention sinks, ``[heads]``.
    """
    group = shape.num_qo_heads // shape.num_kv_heads
    keys, values = (one.float().repeat_interleave(group, dim=2) for one in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", q.float(), keys) * shape.softmax_scale
    if shape.logits_soft_cap > 0:
        scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = scores.softmax(-1) if sinks is None else sunk(scores, sinks)
    return torch.einsum("rhqk,rkhd->rqhd", weights, values).contiguous().to(q.dtype)
