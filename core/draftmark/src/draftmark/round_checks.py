"""Checks of the arguments of `commit_round`, `write_tail`, `verify_tree` and `compact`: kinds, shapes and dtypes."""

from __future__ import annotations

import torch

from .batch import ForwardBatch, Tree
from .batch.checks import check_kind, require_tensor, shown
from .cache import KVPool
from .errors import BatchError
from .geometry import Geometry, Mode
from .guard import value_checks
from .lengths import SequenceLengths

WHOLE = (Mode.EXTEND, Mode.DECODE)
"""Modes in which every row may be committed without a verification."""
COMMITTED = (*WHOLE, Mode.VERIFY, Mode.RAGGED_VERIFY)
"""Modes of a target's forwards, which end with a commit."""


def check_commit(
    batch: object, accepted: object, lengths: object, rows: object, kv: object, states: object, save_slots: object
) -> None:
    """Check the arguments of `commit_round`.

    Raises:
        BatchError: the first argument that does not match.
    """
    if batch is None:
        if accepted is None:
            raise BatchError(
                "batch and accepted are None, but one of them has the tokens to commit; pass verify_tree's result"
            )
    else:
        check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "pass the batch of the target's forward")
        assert isinstance(batch, ForwardBatch)
        _check_mode(batch.mode, accepted is None)
    if accepted is not None and not hasattr(accepted, "accept_lens"):
        raise BatchError(f"accepted is {shown(accepted)}, but it must be a VerifyResult; pass verify_tree's result")
    if (lengths is None) != (rows is None):
        given, absent = ("rows", "lengths") if lengths is None else ("lengths", "rows")
        raise BatchError(f"{given} is given and {absent} is None, but a commit advances rows of lengths; pass both")
    if lengths is not None:
        check_kind("lengths", lengths, SequenceLengths, "a SequenceLengths", "pass the engine's, or None with rows")
    _check_pairs("kv", kv, "tree_ops")
    _check_pairs("states", states, "state_backend")
    if states and batch is None:
        raise BatchError("batch is None, but states move over a batch's rows; pass the batch of the target's forward")
    if save_slots is not None and not states:
        raise BatchError("save_slots is given without states, but a checkpoint is one of a state; pass states, or None")


def _check_pairs(name: str, value: object, operations: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, tuple) and len(one) == 2 for one in value):
        raise BatchError(
            f"{name} is {shown(value)}, but it must be pairs ({operations}, pool); write {name}=(({operations}, pool),)"
        )


def _check_mode(mode: Mode, whole: bool) -> None:
    if mode not in COMMITTED:
        raise BatchError(
            f"commit_round got a {mode} batch, but only the target's forwards commit ({', '.join(COMMITTED)}); leave "
            "the call out after a draft head's forward"
        )
    if whole and mode not in WHOLE:
        raise BatchError(
            f"accepted is None for a {mode} batch, but a verification commits only accepted rows; pass verify_tree's "
            "result"
        )


def check_tail(batch: object, parents: object) -> None:
    """Check the arguments of `write_tail`; the values of `parents` in guard mode only.

    Raises:
        BatchError: the batch is not uniform, or `parents` are missing or wrong.
    """
    check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers.uniform")
    assert isinstance(batch, ForwardBatch)
    if not batch.uniform:
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
    if guard := value_checks(device):
        guard.check_parent_values(checked)


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
    if guard := value_checks(drafts.device):
        guard.check_targets(checked)


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
    if guard := value_checks(batch.device):
        guard.check_accept_index(checked)
