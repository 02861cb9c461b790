"""What the decoding loop does with draft trees on the device, beside the model's forward.

In every round: the tail from the parents, the walk once the target has chosen, and the kept path's KV made
contiguous. The semantics are plain torch (`TorchTreeOps`), and that is what runs unless a backend offers kernels of
its own through the optional hook `draftmark_tree_ops`. All three are captured with the round they belong to.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from . import tree, verdict
from .batch import ForwardBatch
from .cache import KVPool, slots_of
from .geometry import Geometry
from .verdict import Verdict


@runtime_checkable
class TreeOps(Protocol):
    """One geometry's tree operations on one device. Each is capturable, reads no device memory on the host, and
    writes only what it is for.
    """

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Fill mask, depth and positions of a uniform batch; see `draftmark.tree.write_tail`.

        Args:
            parents: int64 ``[R, T]``, rows of any stride; may be None for a `Causal` tail.
        """

    def walk(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> Verdict:
        """The verdict on each request's tree, in tensors of its own; see `draftmark.verdict.walk`.

        Args:
            drafts, parents: int64 ``[R, D]``, rows of any stride.
            targets: int64 ``[R, D]``, contiguous.
        """

    def compact(self, pool: KVPool, batch: ForwardBatch, kept: Verdict) -> None:
        """Move the KV of each kept node i from position L + path[i] to L + i, in every layer of `pool`, K and V.

        A kept node's target may be another's source: every source is read as it was before the call. No other byte
        of a page that a request owns changes.

        Args:
            pool: its page_size is the geometry's; heads and head_dim may be another layer group's.
            batch: the VERIFY batch whose tail was verified; its lengths are those before the round.
        """


class TorchTreeOps:
    """`TreeOps` in torch operations, on any device."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """See `draftmark.tree.write_tail`."""
        tree.write_tail(batch, self._geometry, parents)

    def walk(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> Verdict:
        """See `draftmark.verdict.walk`."""
        return verdict.walk(drafts, parents, targets)

    def compact(self, pool: KVPool, batch: ForwardBatch, kept: Verdict) -> None:
        """Every node moves; one that is not kept, or is in place already, to where it was."""
        path, page_size = kept.path, self._geometry.attention.page_size
        prefix = batch.prefix_lens.long()[:, None]
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        pool.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )
