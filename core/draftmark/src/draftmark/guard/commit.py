"""Checks of the arguments of `commit_round`: kinds and combinations only, no device read."""

from __future__ import annotations

from ..batch import ForwardBatch
from ..batch.checks import check_kind, shown
from ..errors import BatchError
from ..geometry import Mode
from ..lengths import SequenceLengths

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
