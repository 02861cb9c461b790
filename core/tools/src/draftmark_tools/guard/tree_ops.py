"""Wrapper that checks the arguments of a plugin's draft-tree operations."""

from __future__ import annotations

import torch

from draftmark.batch import ForwardBatch
from draftmark.cache import KVPool
from draftmark.geometry import Geometry
from draftmark.round_checks import check_accepted, check_tail, check_verify
from draftmark.tree import TreeOps, VerifyResult


class GuardedTreeOps:
    """The `TreeOps` that `LoadedBackend.tree_ops` returns in guard mode. It checks each call, then passes it on."""

    def __init__(self, inner: TreeOps, geometry: Geometry) -> None:
        self._inner, self._geometry = inner, geometry

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Check the batch and the parents, then write."""
        check_tail(batch, parents)
        self._inner.write_tail(batch, parents)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Check the three tensors, then verify."""
        check_verify(drafts, parents, targets)
        return self._inner.verify_tree(drafts, parents, targets)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Check pool, batch and accepted slots, then move."""
        check_accepted(pool, batch, accepted, self._geometry)
        self._inner.compact(pool, batch, accepted)
