"""The specification of attention over a prefix and a masked tail, in plain torch.

Softmax over the visible keys of ``cap(scale · q·k)``, in float32 whatever the inputs. Visibility is the whole
difference between decoding, verifying a tree, drafting and prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..geometry import AttentionShape


@dataclass(frozen=True)
class Keys:
    """Gathered KV of R requests, by position: ``k, v [num_kv_heads, R, width, head_dim]`` float32."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def width(self) -> int:
        """Positions per request; those past a request's length are never visible."""
        return int(self.k.shape[2])


def causal_bits(q_len: int, tail_len: int, device: torch.device) -> torch.Tensor:
    """bool ``[q_len, tail_len]``: row j is tail slot tail_len - q_len + j and sees the slots up to its own."""
    own = torch.arange(tail_len - q_len, tail_len, device=device)
    return torch.arange(tail_len, device=device) <= own[:, None]


def unpack_bits(words: torch.Tensor, tail_len: int) -> torch.Tensor:
    """int32 ``[rows, mask_words]`` → bool ``[rows, tail_len]``; bit j is word j // 32, bit j % 32."""
    slot = torch.arange(tail_len, device=words.device)
    return (words[:, slot // 32] >> (slot % 32).int()) & 1 == 1


def visibility(
    prefix_lens: torch.Tensor, width: int, bits: torch.Tensor, depth: torch.Tensor, window_left: int
) -> torch.Tensor:
    """Which key positions each row sees.

    Args:
        prefix_lens: int32 ``[R]``, L.
        width: key positions to decide, at least L + T.
        bits: bool ``[R, q, T]``, tail visibility.
        depth: int ``[R, T]``; tail slot s stands at position L + depth[s]. Row j is tail slot T - q + j.
        window_left: positions visible to the left of the row's own, -1 for all.

    Returns:
        bool ``[R, q, width]``. Every row sees itself, so no row is empty.
    """
    requests, q_len, tail_len = bits.shape
    prefix = prefix_lens.long()[:, None]
    key = torch.arange(width, device=bits.device)
    tail = prefix + torch.arange(tail_len, device=bits.device)
    seen = (key < prefix)[:, None].repeat(1, q_len, 1)
    seen.scatter_(2, tail[:, None].expand(-1, q_len, -1), bits)
    if window_left >= 0:
        position = key.repeat(requests, 1).scatter_(1, tail, prefix + depth)
        row = (prefix + depth)[:, tail_len - q_len :]
        seen &= row[:, :, None] - position[:, None] <= window_left
    return seen


def attend_block(q: torch.Tensor, keys: Keys, seen: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Attention of q rows per request.

    Args:
        q: ``[R, q, num_qo_heads, head_dim]``; query head h reads KV head h // group_size.
        keys: gathered KV of the same requests.
        seen: bool ``[R, q, width]``.

    Returns:
        ``[R, q, num_qo_heads, head_dim]`` in q's dtype.
    """
    requests, q_len, heads, dim = q.shape
    group = shape.group_size
    # [kv_head, R, q·group, dim]: all rows of a group meet their keys in one product.
    rows = q.float().view(requests, q_len, heads // group, group, dim).permute(2, 0, 1, 3, 4)
    rows = rows.reshape(heads // group, requests, q_len * group, dim)
    scores = rows @ keys.k.transpose(-1, -2) * shape.softmax_scale
    if shape.logits_soft_cap > 0:
        scores = torch.tanh(scores / shape.logits_soft_cap) * shape.logits_soft_cap
    hidden = ~seen.repeat_interleave(group, dim=1)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    out = (weights @ keys.v).view(heads // group, requests, q_len, group, dim)
    return out.permute(1, 2, 0, 3, 4).reshape(requests, q_len, heads, dim).to(q.dtype)
