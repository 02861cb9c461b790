"""Draft trees on the device: tail masks from parents, verification, and compaction of accepted KV.

The functions here are plain torch and define the exact semantics. `TorchTreeOps` runs them. A backend may replace it
through the optional hook `draftmark_tree_ops` with its own kernels, which must return identical bits. All three
operations are captured in the graph of their decoding round.

Verification is lossless. The token emitted after each accepted node is the target's own: its argmax, or a sample from
its distribution. Drafts affect only how many of these tokens one forward yields. For deterministic drafts this equals
rejection sampling with a point-mass proposal (Leviathan et al. 2023): draft token x is accepted with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from .batch import ForwardBatch, Tree
from .cache import KVPool, slots_of
from .geometry import Geometry
from .round_checks import check_accepted, check_tail, check_verify


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return the ancestors of each tree node, the node itself included. Capturable.

    Args:
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root, or for every root of a forest.

    Returns:
        bool ``[R, D, D]``; [r, j, i] is True when node i is j or an ancestor of j.
    """
    nodes = parents.shape[1]
    node = torch.arange(nodes, device=parents.device)
    reach = (parents[:, :, None] == node) | (node[:, None] == node)
    # Each squaring doubles the generations that are reached; the depth is at most nodes - 1.
    for _ in range((nodes - 1).bit_length()):
        reach = torch.matmul(reach.float(), reach.float()) > 0
    return reach


def depths(reach: torch.Tensor) -> torch.Tensor:
    """Return the number of generations between each node and its root, int32 ``[R, D]``.

    Args:
        reach: bool ``[R, D, D]`` from `ancestors`.
    """
    return reach.sum(-1, dtype=torch.int32) - 1


def pack_bits(bits: torch.Tensor, words: int) -> torch.Tensor:
    """Pack bool ``[rows, T]`` into int32 ``[rows, words]``: bit j is bit j % 32 of word j // 32; unused bits are 0."""
    rows, slots = bits.shape
    padded = torch.nn.functional.pad(bits, (0, words * 32 - slots)).view(rows, words, 32)
    shift = torch.arange(32, device=bits.device)
    return (padded.long() << shift).sum(-1).to(torch.int32)


def write_tail(
    batch: ForwardBatch,
    geometry: Geometry,
    parents: torch.Tensor | None = None,
    pack: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> None:
    """Write the tail (mask, depth and parents of a `Tree`) and the positions of a uniform batch. Capturable.

    Args:
        batch: batch with filled prefix_lens; its tail and positions are written.
        geometry: geometry of the batch.
        parents: int64 ``[R, T]``, parent of each tail slot as for `ancestors`; required for a `Tree`. In DRAFT the rows
            are the last topk slots; a slot with a committed parent has parent -1 and depth 0.
        pack: replacement for `pack_bits` with identical results, for devices on which `pack_bits` is slow.

    Raises:
        BatchError: the batch is not uniform, or parents have a wrong form; with DRAFTMARK_GUARD=1 also wrong parents.
    """
    check_tail(batch, parents)
    tail_len, q_len = batch.tail_lens[0], batch.q_lens[0]
    rows = slice(tail_len - q_len, tail_len)
    depth = torch.arange(tail_len, dtype=torch.int32, device=batch.device).expand(batch.padded_reqs, -1)
    if isinstance(batch.tail, Tree):
        assert parents is not None, "check_tail requires it"
        reach = ancestors(parents)
        depth = depths(reach)
        batch.tail.mask.copy_((pack or pack_bits)(reach[:, rows].flatten(0, 1), geometry.mask_words))
        batch.tail.depth.copy_(depth)
        write_parents(batch, parents)
    positions = batch.prefix_lens[:, None] + depth[:, rows]
    batch.positions.copy_(positions.clamp(max=geometry.limits.max_context_len - 1).view(-1))


def write_parents(batch: ForwardBatch, parents: torch.Tensor | None) -> None:
    """Write `Tree.parents` of a batch with state layers; do nothing in a batch without that tensor. Capturable.

    Args:
        batch: a uniform batch; its tail is written.
        parents: int64 ``[R, T]`` as for `write_tail`.
    """
    if isinstance(batch.tail, Tree) and batch.tail.parents is not None and parents is not None:
        batch.tail.parents.copy_(parents)


class VerifyResult(NamedTuple):
    """Result of one verification, per request.

    Attributes:
        tokens: int64 ``[R, D]``; the first accept_lens[r] entries are the tokens to emit, the rest are -1.
        accept_lens: int64 ``[R]``; number of accepted nodes, root included. Equal to the tokens emitted and to the KV
            tokens committed.
        accept_index: int64 ``[R, D]``; entry i is the tail slot of the i-th accepted node. From accept_lens[r] on,
            entry i is i. Accepted slots ascend from 0 (the root), so accept_index[r, i] >= i.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor


def verify_tree(drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    """Verify draft trees: from the root, follow children that match the target's token. Capturable.

    If several children match the target's token, the first is accepted.

    Args:
        drafts: int64 ``[R, D]``, draft token of each node; -1 for an unused node, which never matches.
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root.
        targets: int64 ``[R, D]``, the target's token after each node, >= 0.

    Returns:
        A `VerifyResult` with new tensors on the same device.

    Raises:
        BatchError: a tensor has a wrong form; with DRAFTMARK_GUARD=1 also wrong parents or targets.
    """
    check_verify(drafts, parents, targets)
    requests, nodes = drafts.shape
    node = torch.zeros(requests, 1, dtype=torch.int64, device=drafts.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    path, kept = [node], [alive]
    for depth in range(1, nodes):
        child = (parents == node) & (drafts == targets.gather(1, node)) & alive
        alive = child.any(1, keepdim=True)
        node = torch.where(alive, child.int().argmax(1, keepdim=True), node)
        path.append(torch.where(alive, node, depth))
        kept.append(alive)
    steps, live = torch.cat(path, 1), torch.cat(kept, 1)
    return VerifyResult(torch.where(live, targets.gather(1, steps), -1), live.sum(1), steps)


@runtime_checkable
class TreeOps(Protocol):
    """Draft-tree operations of one geometry on one device.

    Each operation is capturable, reads no device memory on the host, and writes only its documented outputs.
    """

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Write mask, depth and positions of a uniform batch, as the function `write_tail` does. Capturable.

        Kernels of a plugin need not write `Tree.parents`: `LoadedBackend.tree_ops` adds that.

        Args:
            batch: batch with filled prefix_lens; its tail and positions are written.
            parents: int64 ``[R, T]``, rows of any stride; may be None for a `Causal` tail.
        """

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify each request's tree and return new tensors, as the function `verify_tree` does. Capturable.

        Args:
            drafts, parents: int64 ``[R, D]``, rows of any stride.
            targets: int64 ``[R, D]``, contiguous.
        """

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move K and V of the i-th accepted node to tail slot i, from slot accept_index[i], in every layer. Capturable.

        The target position of one node may be the source position of another: all reads happen before all writes. No
        other byte in pages of a request changes.

        Args:
            pool: KV pages to change. Its page_size is the geometry's; num_kv_heads and head_dim may differ, for another
                group of layers.
            batch: the VERIFY batch that was verified, with the prefix lengths from before the round.
            accepted: result of the verification.
        """


class ParentTreeOps:
    """The plugin's `TreeOps`; `write_tail` also writes `Tree.parents` in a batch with state layers."""

    def __init__(self, inner: TreeOps) -> None:
        self.inner = inner
        self.verify_tree, self.compact = inner.verify_tree, inner.compact

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Write the tail with the plugin's kernels, and the parents with torch."""
        self.inner.write_tail(batch, parents)
        write_parents(batch, parents)


class TorchTreeOps:
    """Implementation of `TreeOps` with torch operations, for any device."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Write the tail with `draftmark.runtime.write_tail`."""
        write_tail(batch, self._geometry, parents)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify each request's tree with `draftmark.runtime.verify_tree`."""
        return verify_tree(drafts, parents, targets)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move KV of accepted nodes; all other nodes are copied to their own positions, which keeps shapes static."""
        check_accepted(pool, batch, accepted, self._geometry)
        path, page_size = accepted.accept_index, self._geometry.attention.page_size
        prefix = batch.prefix_lens.long()[:, None]
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        pool.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )
