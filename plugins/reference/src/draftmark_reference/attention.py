"""Specification of attention over a prefix and a masked tail, in plain torch.

The softmax runs over the logits ``cap(scale · q·k)`` of the visible keys and over the head's sink, if there is one.
All arithmetic is float32. Decode, verify, draft and prefill differ only in the visibility mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import AttentionShape


@dataclass(frozen=True)
class Keys:
    """Gathered KV of R requests, by position.

    Attributes:
        k, v: float32 ``[num_kv_heads, R, width, head_dim]`` and ``[…, value_width]``.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def width(self) -> int:
        """Positions per request; a position after a request's length is never visible."""
        return int(self.k.shape[2])


def unpack_bits(words: torch.Tensor, tail_len: int) -> torch.Tensor:
    """Unpack int32 ``[rows, mask_words]`` into bool ``[rows, tail_len]``; bit j is word j // 32, bit j % 32."""
    slot = torch.arange(tail_len, device=words.device)
    return (words[:, slot // 32] >> (slot % 32).int()) & 1 == 1


def causal_visibility(row_positions: torch.Tensor, width: int, window_left: int) -> torch.Tensor:
    """Return the key positions that each row sees with a causal tail.

    Args:
        row_positions: int32 ``[R, q]``, position of each row.
        width: number of key positions.
        window_left: visible positions left of the row's own, -1 for all.

    Returns:
        bool ``[R, q, width]``.
    """
    key = torch.arange(width, dtype=torch.int32, device=row_positions.device)
    seen = key <= row_positions[:, :, None]
    if window_left >= 0:
        seen &= key >= row_positions[:, :, None] - window_left
    return seen


def block_visibility(kv_lens: torch.Tensor, q_len: int, width: int, window_left: int) -> torch.Tensor:
    """Return the key positions that each row sees with a block tail, in which all rows see each other.

    Args:
        kv_lens: int32 ``[R]``, prefix length plus q_len.
        q_len: rows of each request.
        width: number of key positions.
        window_left: visible positions left of the row's own, -1 for all.

    Returns:
        bool ``[R, q_len, width]``.
    """
    key = torch.arange(width, dtype=torch.int32, device=kv_lens.device)
    seen = (key < kv_lens[:, None])[:, None].repeat(1, q_len, 1)
    if window_left >= 0:
        row = kv_lens[:, None] - q_len + torch.arange(q_len, dtype=torch.int32, device=kv_lens.device)
        seen &= key >= row[:, :, None] - window_left
    return seen


def tree_visibility(
    prefix_lens: torch.Tensor, width: int, bits: torch.Tensor, depth: torch.Tensor, window_left: int
) -> torch.Tensor:
    """Return the key positions that each row sees with a tree tail: the prefix, and tail slots with their bit set.

    The window counts positions (prefix length + depth), not slots: siblings have equal positions.

    Args:
        prefix_lens: int32 ``[R]``, prefix length L of each request.
        width: number of key positions, at least the prefix length plus the tail slots T.
        bits: bool ``[R, q, T]``, visible tail slots. Row j is tail slot T - q + j.
        depth: int32 ``[R, T]``, depth of each tail slot.
        window_left: visible positions left of the row's own, -1 for all.

    Returns:
        bool ``[R, q, width]``.
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


def attend_block(
    q: torch.Tensor,
    keys: Keys,
    seen: torch.Tensor,
    shape: AttentionShape,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Compute the attention of q rows per request into `out`, and its log-sum-exp into `lse`.

    Args:
        q: ``[R, q, num_qo_heads, head_dim]``; query head h reads KV head h // group_size.
        keys: gathered KV of these requests.
        seen: bool ``[R, q, width]``, visible keys. Every row sees itself, so no row is empty.
        shape: shape of the attention layer.
        out: ``[R, q, num_qo_heads, value_width]`` in q's dtype; written.
        sinks: float32 ``[num_qo_heads]``, see `KVCache`; None for a layer without sinks.
        lse: float32 ``[R, q, num_qo_heads]``, natural log-sum-exp over keys, without the sink; written unless None.
    """
    requests, q_len, _, dim = q.shape
    kv_heads, group = shape.num_kv_heads, shape.group_size
    assert shape.softmax_scale is not None, "Geometry.create resolves the default"
    # [kv_head, R, q·group, dim]: one matmul per KV head for all rows of its group.
    rows = (q.float() * shape.softmax_scale).view(requests, q_len, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    scores = rows.reshape(kv_heads, requests, q_len * group, dim) @ keys.k.transpose(-1, -2)
    if shape.logits_soft_cap > 0:
        scores = torch.tanh(scores / shape.logits_soft_cap) * shape.logits_soft_cap
    by_row = scores.view(kv_heads, requests, q_len, group, keys.width)
    by_row.masked_fill_(~seen[:, :, None], float("-inf"))
    if lse is not None:
        lse.view(requests, q_len, kv_heads, group).copy_(by_row.logsumexp(-1).permute(1, 2, 0, 3))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # The sink is one more softmax column without a value, so the weights of the keys add up to less than 1.
        column = sinks.view(kv_heads, 1, 1, group, 1).expand(-1, requests, q_len, -1, -1)
        weights = torch.cat((by_row, column), -1).softmax(-1)[..., :-1].reshape(scores.shape)
    heads_out = (weights @ keys.v).view(kv_heads, requests, q_len, group, -1)
    out.view(requests, q_len, kv_heads, group, -1).copy_(heads_out.permute(1, 2, 0, 3, 4))
