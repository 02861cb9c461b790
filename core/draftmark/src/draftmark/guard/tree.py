"""Checks of draft trees: arguments of `write_tail`, `verify_tree` and `compact`."""

from __future__ import annotations

import torch

from ..batch import ForwardBatch, Tree
from ..batch.checks import check_kind, require_tensor
from ..cache import KVPool
from ..errors import BatchError
from ..geometry import Geometry
from .switch import guarding, readable


def check_tail(batch: object, parents: object) -> None:
    """Check the arguments of `write_tail`; the values of `parents` in guard mode only.

    Raises:
        BatchError: the batch is not uniform, or `parents` are missing or wrong.
    """
    check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers.uniform")
    assert isinstance(batch, ForwardBatch)
    if batch.uniform is None:
        raise BatchError(
            f"write_tail got a {batch.mode} batch, but it writes batches with equal row counts; `ragged` writes "
            "positions of extend itself, and the engine writes those of ragged_verify"
        )
    if isinstance(batch.tail, Tree):
        check_parents(parents, (batch.padded_reqs, batch.tail_lens[0]), batch.device)


def check_parents(parents: object, shape: tuple[int, int], device: torch.device) -> None:
    """Check the parents of each tail slot: shape, dtype and device always; the values in guard mode.

    Raises:
        BatchError: a wrong shape, dtype or device, or a parent that is not an earlier slot or -1.
    """
    if parents is None:
        raise BatchError(
            f"parents is None, but the batch has a Tree tail; pass int64 {list(shape)}, or take a batch with tree=False"
        )
    checked = require_tensor("parents", parents, shape, torch.int64, device)
    if guarding() and readable(device):
        check_parent_values(checked)


def check_parent_values(parents: torch.Tensor) -> None:
    """Raise `BatchError` for the first parent that is not an earlier slot or -1. Reads the device."""
    slots = torch.arange(parents.shape[1], device=parents.device)
    wrong = ((parents >= slots) | (parents < -1)).nonzero()
    if len(wrong):
        request, slot = wrong[0].tolist()
        raise BatchError(
            f"parents[{request}, {slot}] is {int(parents[request, slot])}, but the parent of slot {slot} is -1 or an "
            f"earlier slot, 0 … {slot - 1}; order the nodes so that parents precede children"
        )


def check_verify(drafts: object, parents: object, targets: object) -> None:
    """Check the arguments of `verify_tree`: shapes, dtypes and devices always; the values in guard mode.

    Raises:
        BatchError: the first argument that does not match.
    """
    if not isinstance(drafts, torch.Tensor) or drafts.dim() != 2 or drafts.shape[1] < 1:
        got = list(drafts.shape) if isinstance(drafts, torch.Tensor) else repr(drafts)
        raise BatchError(f"drafts is {got}, but it must be int64 [R, D] with D >= 1; pass one row a request")
    shape = (drafts.shape[0], drafts.shape[1])
    require_tensor("drafts", drafts, shape, torch.int64)
    check_parents(parents, shape, drafts.device)
    checked = require_tensor("targets", targets, shape, torch.int64, drafts.device)
    if guarding() and readable(drafts.device) and bool((checked < 0).any()):
        raise BatchError(
            f"targets contains {int(checked.min())}, but a target's token is >= 0; pass the model's choice of each node"
        )


def check_accepted(pool: object, batch: object, accepted: object, geometry: Geometry) -> None:
    """Check the arguments of `compact`: kinds and shapes always; the accepted slots in guard mode.

    Raises:
        BatchError: the first argument that does not match.
    """
    check_kind("pool", pool, KVPool, "a KVPool", "pass the pool of these layers")
    check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "pass the batch that was verified")
    assert isinstance(pool, KVPool) and isinstance(batch, ForwardBatch)
    page_size = pool.tensors[0].shape[2]
    if page_size != geometry.attention.page_size:
        raise BatchError(
            f"pool has pages of {page_size} tokens, but the geometry has {geometry.attention.page_size}; create "
            "the KVPool with this geometry"
        )
    path = getattr(accepted, "accept_index", None)
    nodes = path.shape[1] if isinstance(path, torch.Tensor) and path.dim() == 2 else geometry.draft.num_draft_tokens
    checked = require_tensor("accept_index", path, (batch.padded_reqs, nodes), torch.int64, batch.device)
    if guarding() and readable(batch.device):
        slots = torch.arange(nodes, device=checked.device)
        wrong = ((checked < slots) | (checked >= nodes)).nonzero()
        if len(wrong):
            request, node = wrong[0].tolist()
            raise BatchError(
                f"accept_index[{request}, {node}] is {int(checked[request, node])}, but accepted node {node} has a "
                f"slot of {node} … {nodes - 1}; pass the result of verify_tree"
            )
