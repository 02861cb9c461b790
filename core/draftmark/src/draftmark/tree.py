"""Draft trees on the device: a tail from parents, verification, and the move of accepted KV into place.

The functions are plain torch, and they are the semantics: `TorchTreeOps` runs them unless a backend offers kernels of
its own through the optional hook `draftmark_tree_ops`, which give the same bits. All three are captured with the round
they belong to.

Verification is lossless by construction: the token that follows each accepted node is the target's own (its argmax, or
a sample from its distribution), whether or not a draft guessed it. A draft only decides how many such tokens one
forward yields. For drafts that are guesses rather than samples this equals rejection sampling with a point-mass
proposal (Leviathan et al. 2023): a guess x is accepted with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from .batch import ForwardBatch, Tree
from .cache import KVPool, slots_of
from .geometry import Geometry


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Find which nodes each node descends from, itself included.

    Args:
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root, or for every root of a forest.

    Returns:
        bool ``[R, D, D]``; [r, j, i] is set when i is j or an ancestor of j.
    """
    nodes = parents.shape[1]
    node = torch.arange(nodes, device=parents.device)
    reach = (parents[:, :, None] == node) | (node[:, None] == node)
    # Reach of 2^n generations after n squarings: the depth is at most D - 1.
    for _ in range((nodes - 1).bit_length()):
        reach = torch.matmul(reach.float(), reach.float()) > 0
    return reach


def depths(reach: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, D]``: generations between each node and its root."""
    return reach.sum(-1, dtype=torch.int32) - 1


def pack_bits(bits: torch.Tensor, words: int) -> torch.Tensor:
    """bool ``[rows, T]`` → int32 ``[rows, words]``; bit j goes to word j // 32, bit j % 32; the rest is zero."""
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
    """Fill a uniform batch's tail (mask and depth of a `Tree`) and its positions. Capturable.

    Args:
        batch: its prefix_lens are filled already.
        parents: int64 ``[R, T]`` tail slots, as for `ancestors`; needed for a `Tree`. In DRAFT the rows are the last
            topk slots, and a slot whose parent is committed has parent -1 and depth 0.
        pack: for a device where `pack_bits` is slow, other operations that give the same bits.
    """
    tail_len, q_len = batch.tail_lens[0], batch.q_lens[0]
    rows = slice(tail_len - q_len, tail_len)
    depth = torch.arange(tail_len, dtype=torch.int32, device=batch.device).expand(batch.padded_reqs, -1)
    if isinstance(batch.tail, Tree):
        assert parents is not None, "a tree's tail is written from its parents"
        reach = ancestors(parents)
        depth = depths(reach)
        batch.tail.mask.copy_((pack or pack_bits)(reach[:, rows].flatten(0, 1), geometry.mask_words))
        batch.tail.depth.copy_(depth)
    positions = batch.prefix_lens[:, None] + depth[:, rows]
    batch.positions.copy_(positions.clamp(max=geometry.limits.max_context_len - 1).view(-1))


class VerifyResult(NamedTuple):
    """What one verification yields, per request.

    Attributes:
        tokens: int64 ``[R, D]``; the first accept_lens[r] are the tokens to emit, the rest -1.
        accept_lens: int64 ``[R]``; accepted nodes, root included = tokens emitted = KV tokens committed.
        accept_index: int64 ``[R, D]``; tail slot of the i-th accepted node, and i itself beyond
            accept_lens[r]. Accepted slots ascend from 0, the root, so accept_index[r, i] >= i.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor


def verify_tree(drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    """Follow the target's choices from the root for as long as a child carries them. Capturable.

    Args:
        drafts: int64 ``[R, D]``, the token of each node; -1 for an unused row, which nothing matches.
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root.
        targets: int64 ``[R, D]``, the target's token after each node, >= 0.

    Where several children carry the target's token, the first is kept.
    """
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
    """One geometry's tree operations on one device. Each is capturable, reads no device memory on the host, and
    writes only what it is for.
    """

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Fill mask, depth and positions of a uniform batch; see `write_tail`.

        Args:
            parents: int64 ``[R, T]``, rows of any stride; may be None for a `Causal` tail.
        """

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Verify each request's tree, into tensors of its own; see `verify_tree`.

        Args:
            drafts, parents: int64 ``[R, D]``, rows of any stride.
            targets: int64 ``[R, D]``, contiguous.
        """

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move the KV of each accepted node i from position L + accept_index[i] to L + i, in every layer of `pool`.

        K and V both. An accepted node's target may be another's source: every source is read as it was before the
        call. No other byte of a page that a request owns changes.

        Args:
            pool: its page_size is the geometry's; heads and head_dim may be another layer group's.
            batch: the VERIFY batch whose tail was verified; its lengths are those before the round.
        """


class TorchTreeOps:
    """`TreeOps` in torch operations, on any device."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """See `write_tail`."""
        write_tail(batch, self._geometry, parents)

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """See `verify_tree`."""
        return verify_tree(drafts, parents, targets)

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move every node; one that is not accepted, or is in place already, moves to where it was."""
        path, page_size = accepted.accept_index, self._geometry.attention.page_size
        prefix = batch.prefix_lens.long()[:, None]
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        pool.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )
