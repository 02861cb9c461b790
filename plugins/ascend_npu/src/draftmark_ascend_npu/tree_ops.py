"""What the loop does with draft trees, in operators that an A2 or A3 runs on its AI cores.

draftmark's own operations (`draftmark.tree`) pack the mask with shifts and divide 64-bit positions, which CANN runs on
the AICPU: slow, and nothing for a captured graph. Here the bits are weights of a product, and positions have 32 bits.
"""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVPool, Tree, VerifyResult, ancestors, depths, verify_tree

WORD = 32


def bit_weights(count: int, device: torch.device | str) -> torch.Tensor:
    """int32 ``[count]``: entry j is the word with bit j % 32 set alone. Copied from the host, so not for a capture."""
    values = [1 << bit if bit < WORD - 1 else -(1 << bit) for bit in range(WORD)]
    return torch.tensor(values * (-(-count // WORD)), dtype=torch.int32)[:count].to(device)


def slots_at(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 ``[R, n]`` KV slots of int32 positions ``[R, n]``."""
    pages = page_table.gather(1, (positions // page_size).long()).long()
    return pages * page_size + positions % page_size


class AscendTreeOps:
    """`draftmark.tree.TreeOps` without AICPU operators; gives the same bits as `draftmark.tree.TorchTreeOps`."""

    def __init__(self, geometry: Geometry, device: torch.device | str) -> None:
        self._geometry = geometry
        self._weights = bit_weights(WORD * int(geometry.mask_words), device).view(-1, WORD)

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """See `draftmark.tree.write_tail`."""
        tail_len, q_len = batch.tail_lens[0], batch.q_lens[0]
        rows = slice(tail_len - q_len, tail_len)
        depth = torch.arange(tail_len, dtype=torch.int32, device=batch.device).expand(batch.padded_reqs, -1)
        if isinstance(batch.tail, Tree):
            assert parents is not None, "a tree's tail is written from its parents"
            reach = ancestors(parents)
            depth = depths(reach)
            self._pack(reach[:, rows].flatten(0, 1), batch.tail.mask)
            batch.tail.depth.copy_(depth)
        positions = batch.prefix_lens[:, None] + depth[:, rows]
        batch.positions.copy_(positions.clamp(max=self._geometry.limits.max_context_len - 1).view(-1))

    def _pack(self, seen: torch.Tensor, mask: torch.Tensor) -> None:
        """bool ``[rows, T]`` into the words of ``mask [rows, mask_words]``; bits at and above T are zero."""
        words = self._weights.shape[0]
        bits = torch.zeros(len(seen), words * WORD, dtype=torch.int32, device=seen.device)
        bits[:, : seen.shape[1]].copy_(seen)
        mask.copy_((bits.view(-1, words, WORD) * self._weights).sum(-1, dtype=torch.int32))

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """See `draftmark.tree.verify_tree`."""
        return verify_tree(drafts, parents, targets)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Every node moves; one that is not accepted, or is in place already, to where it was."""
        path = accepted.accept_index[:, 1:].int()
        page_size = self._geometry.attention.page_size
        prefix = batch.prefix_lens[:, None]
        target = torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=path.device).expand(len(path), -1)
        source, kept = (slots_at(batch.page_table, prefix + at, page_size).view(-1) for at in (path, target))
        pool.move(source, kept)
