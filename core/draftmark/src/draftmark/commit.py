"""End of a round: accepted KV becomes contiguous, recurrent states follow the accepted path, lengths grow.

An engine that does these in different places forgets one of them: n-gram rounds of SGLang left the recurrent state
where it was (sglang#26351), a suffix automaton of TensorRT-LLM as well (TensorRT-LLM#16759). `commit_round` does all of
them, in the one order in which each step still reads the values from before the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .batch import ForwardBatch, Tree
from .lengths import SequenceLengths
from .round_checks import WHOLE, check_commit
from .state import StateBackend, StatePool, checkpoint_lens
from .tree import VerifyResult


class CompactsKV(Protocol):
    """The part of `TreeOps` that `commit_round` calls. An engine with its own KV layout implements only this part."""

    def compact(self, pool: Any, batch: Any, accepted: VerifyResult) -> None:
        """Move the KV of the i-th accepted node to tail slot i; see `TreeOps.compact`."""


def commit_round(
    batch: ForwardBatch | None,
    accepted: VerifyResult | None,
    lengths: SequenceLengths | None,
    rows: torch.Tensor | None,
    kv: Sequence[tuple[CompactsKV, Any]] = (),
    states: Sequence[tuple[StateBackend, StatePool]] = (),
    save_slots: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """End a round: compact accepted KV, move recurrent states, advance the lengths. Capturable, no host read.

    Every forward of a target ends with this call, also a prefill and a plain decode. A draft head's forward commits
    nothing: its KV lies under the target's lengths. vLLM counts tokens itself, so its adapter calls this function
    without a batch and without lengths. SGLang also moves accepted KV itself, so its adapter ends no round.

    Args:
        batch: the batch of the forward, with the prefix lengths from before the round. None for an engine that lays out
            its KV and counts its tokens itself (vLLM): its `kv` operations know the rows.
        accepted: result of `verify_tree`. None commits every row of an EXTEND or DECODE batch.
        lengths: owner of the committed lengths; None if the engine owns them.
        rows: int64 ``[R]``, row of each batch entry in `lengths`; null rows for padding. None without `lengths`.
        kv: pairs of tree operations and the pool that they compact, one for each group of layers. A batch with a causal
            tail needs no move, so they are called only for a `Tree` and without a batch.
        states: pairs of a state backend and its pool, one for each group of layers with recurrent state; see
            `StateBackend.commit`.
        save_slots: int32 ``[R]``, slot that gets each request's checkpoint, or a null slot; None for no checkpoints.

    Returns:
        With `states` and `save_slots`, the length of the checkpoint that each request saved, or 0: int32 ``[R]``, as
        `checkpoint_lens` computes it. Otherwise None. The caller ignores it where it lent no slot.

    Raises:
        BatchError, LengthsError: an argument has a wrong form, or two arguments do not fit together.
    """
    check_commit(batch, accepted, lengths, rows, kv, states, save_slots)
    if accepted is not None and (batch is None or isinstance(batch.tail, Tree)):
        for operations, pool in kv:
            operations.compact(pool, batch, accepted)
    if not states and lengths is None:
        return None
    counts, saved = _counts(batch, accepted), None
    if states:
        assert batch is not None, "check_commit requires it"
        path = None if batch.mode in WHOLE else accepted
        for backend, pool in states:
            backend.commit(pool, batch, path, save_slots)
        if save_slots is not None:
            interval = states[0][1].geometry.limits.state_interval
            saved = checkpoint_lens(batch.prefix_lens, counts, interval, whole=path is None)
    if lengths is not None and rows is not None:
        lengths.advance(rows, counts)
    return saved


def _counts(batch: ForwardBatch | None, accepted: VerifyResult | None) -> torch.Tensor:
    """Return the tokens that each request commits, integers ``[R]``."""
    if accepted is not None:
        return accepted.accept_lens
    assert batch is not None, "check_commit requires it"
    return batch.q_indptr[1:] - batch.q_indptr[:-1]
