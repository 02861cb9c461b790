"""Tree operations of the decoding loop, with operators that an A2 or A3 runs on its AI cores.

draftmark's own operations (`draftmark.tree`) pack the mask with shifts and divide 64-bit positions. CANN runs those on
the AICPU, which is slow and cannot be captured. Here a product with weights packs the bits, and positions are int32.
"""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVPool, TorchTreeOps, VerifyResult, write_tail

WORD = 32


def bit_weights(count: int, device: torch.device | str) -> torch.Tensor:
    """Return int32 ``[count]`` where element j has only bit j % 32 set. This copies from the host: do not capture."""
    values = [1 << bit if bit < WORD - 1 else -(1 << bit) for bit in range(WORD)]
    return torch.tensor(values * (-(-count // WORD)), dtype=torch.int32)[:count].to(device)


def slots_at(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return KV slots, int64 ``[R, n]``, of int32 positions ``[R, n]``."""
    pages = page_table.gather(1, (positions // page_size).long()).long()
    return pages * page_size + positions % page_size


class AscendTreeOps(TorchTreeOps):
    """Tree operations with the same results as `TorchTreeOps`, bit for bit, without AICPU operators."""

    def __init__(self, geometry: Geometry, device: torch.device | str) -> None:
        super().__init__(geometry)
        self._weights = bit_weights(WORD * int(geometry.mask_words), device).view(-1, WORD)

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Write a batch's tail (mask and depths of its draft trees). See `draftmark.tree.write_tail`."""
        write_tail(batch, self._geometry, parents, self._pack)

    def _pack(self, seen: torch.Tensor, words: int) -> torch.Tensor:
        """Pack bool ``[rows, T]`` into int32 words ``[rows, words]``; bits from T on are zero."""
        bits = torch.zeros(len(seen), words * WORD, dtype=torch.int32, device=seen.device)
        bits[:, : seen.shape[1]].copy_(seen)
        return (bits.view(-1, words, WORD) * self._weights).sum(-1, dtype=torch.int32)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Copy KV of accepted nodes to their new slots. Rejected nodes and nodes in place are copied in place."""
        path = accepted.accept_index[:, 1:].int()
        page_size = self._geometry.attention.page_size
        prefix = batch.prefix_lens[:, None]
        target = torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=path.device).expand(len(path), -1)
        source, kept = (slots_at(batch.page_table, prefix + at, page_size).view(-1) for at in (path, target))
        pool.move(source, kept)
