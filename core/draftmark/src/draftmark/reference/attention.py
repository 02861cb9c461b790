"""The specification of attention over a prefix and a masked tail, in plain torch.

Softmax over the visible keys of ``cap(scale · q·k)``, and over the head's sink if there is one, in float32 whatever the
inputs. Visibility is the whole difference between decoding, verifying a tree, drafting and prefill.
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


def unpack_bits(words: torch.Tensor, tail_len: int) -> torch.Tensor:
    """int32 ``[rows, mask_words]`` → bool ``[rows, tail_len]``; bit j is word j // 32, bit j % 32."""
    slot = torch.arange(tail_len, device=words.device)
    return (words[:, slot // 32] >> (slot % 32).int()) & 1 == 1


def causal_visibility(row_positions: torch.Tensor, width: int, window_left: int) -> torch.Tensor:
    """Visible key positions under a causal tail, where every slot stands at its own position.

    Args:
        row_positions: int32 ``[R, q]``.
        width: key positions to decide.
        window_left: positions visible to the left of the row's own, -1 for all.

    Returns:
        bool ``[R, q, width]``.
    """
    key = torch.arange(width, dtype=torch.int32, device=row_positions.device)
    seen = key <= row_positions[:, :, None]
    if window_left >= 0:
        seen &= key >= row_positions[:, :, None] - window_left
    return seen


def block_visibility(kv_lens: torch.Tensor, q_len: int, width: int, window_left: int) -> torch.Tensor:
    """Visible key positions of a block, whose rows all see each other.

    Args:
        kv_lens: int32 ``[R]``, L + q_len.
        width: key positions to decide.
        window_left: positions visible to the left of the row's own, -1 for all.

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
    """Visible key positions under a tree: the prefix, and the tail slots whose bit is set.

    The window counts positions, L + depth, not slots: siblings stand at one position.

    Args:
        prefix_lens: int32 ``[R]``, L.
        width: key positions to decide, at least L + T.
        bits: bool ``[R, q, T]``, tail visibility. Row j is tail slot T - q + j.
        depth: int32 ``[R, T]``.
        window_left: positions visible to the left of the row's own, -1 for all.

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
) -> None:
    """Attention of q rows per request.

    Args:
        q: ``[R, q, num_qo_heads, head_dim]``; query head h reads KV head h // group_size.
        keys: gathered KV of the same requests.
        seen: bool ``[R, q, width]``. Every row sees itself, so no row is empty.
        out: like q; written.
        sinks: float32 ``[num_qo_heads]``, see `KVCache`; None for none.
    """
    requests, q_len, _, dim = q.shape
    kv_heads, group = shape.num_kv_heads, shape.group_size
    assert shape.softmax_scale is not None, "Geometry.create resolves the default"
    # [kv_head, R, q·group, dim]: all rows of a group meet their keys in one product.
    rows = (q.float() * shape.softmax_scale).view(requests, q_len, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    scores = rows.reshape(kv_heads, requests, q_len * group, dim) @ keys.k.transpose(-1, -2)
    if shape.logits_soft_cap > 0:
        scores = torch.tanh(scores / shape.logits_soft_cap) * shape.logits_soft_cap
    by_row = scores.view(kv_heads, requests, q_len, group, keys.width)
    by_row.masked_fill_(~seen[:, :, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # One more column, whose value is nothing: what it weighs is missing from the others.
        column = sinks.view(kv_heads, 1, 1, group, 1).expand(-1, requests, q_len, -1, -1)
        weights = torch.cat((by_row, column), -1).softmax(-1)[..., :-1].reshape(scores.shape)
    heads_out = (weights @ keys.v).view(kv_heads, requests, q_len, group, dim)
    out.view(requests, q_len, kv_heads, group, dim).copy_(heads_out.permute(1, 2, 0, 3, 4))
