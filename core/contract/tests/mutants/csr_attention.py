"""Attention over gathered pages, for the CSR twin: a softmax under a visibility mask, in float32."""

from __future__ import annotations

import torch

from draftmark import AttentionShape


def causal_bits(q_len: int, tail_len: int, device: torch.device) -> torch.Tensor:
    """bool ``[1, q_len, tail_len]``: row j is tail slot tail_len - q_len + j and sees the slots up to its own."""
    own = torch.arange(tail_len - q_len, tail_len, device=device)
    return (torch.arange(tail_len, device=device) <= own[:, None]).unsqueeze(0)


def mask_bits(words: torch.Tensor, tail_len: int) -> torch.Tensor:
    """int32 ``[R, q, words]`` → bool ``[R, q, tail_len]``."""
    slot = torch.arange(tail_len, device=words.device)
    return (words[..., slot // 32] >> (slot % 32).int()) & 1 == 1


def visible(
    prefix: torch.Tensor, width: int, bits: torch.Tensor, depth: torch.Tensor, window_left: int
) -> torch.Tensor:
    """bool ``[R, q, width]``: prefix positions, and tail slots by their bits, within the window in positions."""
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


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes where torch indexes no such dtype."""
    return tensor.view(torch.int8) if tensor.element_size() == 1 else tensor


def stored(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the cache holds for some rows: value / scale."""
    return rows.to(dtype) if scale is None else (rows.float() / scale).to(dtype)


def gathered(pool: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Pages ``[R, n]`` of a pool as ``[R, n · P, heads, dim]``, with the scale applied."""
    pages = indexable(pool)[table].view(pool.dtype).flatten(1, 2)
    pages = pages.float() if pages.element_size() == 1 else pages  # torch computes nothing in fp8
    return pages if scale is None else pages.float() * scale


def sunk(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Weights of scores ``[R, heads, q, width]`` beside a sink of each head: a softmax from its definition."""
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
    """q ``[R, q, heads, dim]``, k and v ``[R, width, kv_heads, dim]``, seen ``[R, q, width]``, sinks ``[heads]`` → like
    q.
    """
    group = shape.num_qo_heads // shape.num_kv_heads
    keys, values = (one.float().repeat_interleave(group, dim=2) for one in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", q.float(), keys) * shape.softmax_scale
    if shape.logits_soft_cap > 0:
        scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = scores.softmax(-1) if sinks is None else sunk(scores, sinks)
    return torch.einsum("rhqk,rkhd->rqhd", weights, values).contiguous().to(q.dtype)
