"""What the loop does with draft trees, in operators that an A2 or A3 runs on its AI cores.

draftmark's own operations (`draftmark.tree`) pack the mask with shifts and divide 64-bit positions, which CANN runs on
the AICPU: slow, and nothing for a captured graph. Here the bits are weights of a product, and positions have 32 bits.
"""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVPool, TorchTreeOps, VerifyResult, write_tail

WORD = 32


def bit_weights(count: int, device: torch.device | str) -> torch.Tensor:
    """int32 ``[count]``: entry j is the word with bit j % 32 set alone. Copied from the host, so not for a capture."""
    values = [1 << bit if bit < WORD - 1 else -(1 << bit) for bit in range(WORD)]
    return torch.tensor(values * (-(-count // WORD)), dtype=torch.int32)[:count].to(device)


def slots_at(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 ``[R, n]`` KV slots of int32 positions ``[R, n]``."""
    pages = page_table.gather(1, (positions // page_size).long()).long()
    return pages * page_size + positions % page_size


class AscendTreeOps(TorchTreeOps):
    """The same without AICPU operators, and with the same bits."""

    def __init__(self, geometry: Geometry, device: torch.device | str) -> None:
        super().__init__(geometry)
        self._weights = bit_weights(WORD * int(geometry.mask_words), device).view(-1, WORD)

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """See `draftmark.tree.write_tail`."""
        write_tail(batch, self._geometry, parents, self._pack)

    def _pack(self, seen: torch.Tensor, words: int) -> torch.Tensor:
        """bool ``[rows, T]`` as words ``[rows, words]``; bits at and above T are zero."""
        bits = torch.zeros(len(seen), words * WORD, dtype=torch.int32, device=seen.device)
        bits[:, : seen.shape[1]].copy_(seen)
        return (bits.view(-1, words, WORD) * self._weights).sum(-1, dtype=torch.int32)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Every node moves; one that is not accepted, or is in place already, to where it was."""
        path = accepted.accept_index[:, 1:].int()
        page_size = self._geometry.attention.page_size
        prefix = batch.prefix_lens[:, None]
        target = torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=path.device).expand(len(path), -1)
        source, kept = (slots_at(batch.page_table, prefix + at, page_size).view(-1) for at in (path, target))
        pool.move(source, kept)
