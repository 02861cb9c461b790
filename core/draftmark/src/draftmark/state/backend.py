"""Interface of a backend for layers with recurrent state: five methods, in one order in eager mode and in graphs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from ..batch import ForwardBatch
from ..tree import VerifyResult
from .pool import StateCache, StatePool


@runtime_checkable
class StateBackend(Protocol):
    """Recurrent state of one `StateGeometry` on one device, bound to the buffers of an arena.

    In every forward the engine calls `plan`, then `write_metadata`, then `convolve` and `recur` for each layer, and
    `commit` after the round's verification. `plan` runs on the host before each eager run, capture and replay. The
    other methods are captured. A backend allocates nothing that outlives a method: its buffers are in the arena.

    **Form.** Row t sees the committed state and its ancestors. With p(t) the parent of row t, or the committed state::

        S_t = g_t S_p(t) + u_t ⊗ k_t      u_t = β_t (v_t − g_t S_p(t) k_t) for DELTA, v_t for DECAY      o_t = S_t q_t

    A request with prefix length 0 has a committed state and window of zeros, whatever its slot holds.

    **Modes.** EXTEND and DECODE leave the slot after their last row. VERIFY and RAGGED_VERIFY only read the slot. What
    their rows leave lies in arena buffers, by layer and batch entry; `commit` moves the slot. A verify may run twice,
    or stay without a commit, without effect on the slot. No method reads or writes the slot of a request that is not
    live, except the null slots.
    """

    def plan(self, batch: ForwardBatch) -> None:
        """Make the host decisions for a batch, outside the graph. Must not read the device.

        Args:
            batch: the forward to prepare. Read-only.
        """

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write what depends on the batch and not on the layer into arena buffers. Capturable.

        Args:
            batch: a planned batch with filled tensors. Read-only.
        """

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Compute the causal depthwise convolution of each row over its own channels and its ancestors'. Capturable.

        Tap K-1 is the row's own; tap K-1-i is its i-th ancestor: tail rows first, then the slot's window.

        Args:
            x: ``[num_rows, conv_channels]`` in dtype, rows grouped by request. Read-only; elements of a row are
                contiguous, rows may have any pitch.
            weight: ``[conv_channels, conv_kernel]`` in any float dtype, contiguous.
            bias: ``[conv_channels]`` in weight's dtype, or None.
            cache: slots of one layer; written in EXTEND and DECODE.
            batch: the current forward. Read-only.
            out: output ``[num_rows, conv_channels]`` in dtype, contiguous, after SiLU if `StateShape.conv_silu`. Every
                row is written; padding rows get finite values.
        """

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Compute the recurrence of each row. Capturable. Never called for `Recurrence.NONE`.

        q and k are normalised and scaled by the caller. For Mamba2 q is C, k is B and v is dt · x; the caller adds D·x.

        Args:
            q, k: ``[num_rows, num_key_heads, key_dim]`` in dtype, rows grouped by request. Read-only; elements of a
                head are contiguous, rows may have any pitch.
            v: ``[num_rows, num_heads, value_dim]`` in dtype, strided like q and k.
            log_decay: log of the decay, <= 0, in `StateShape.compute_dtype`: ``[num_rows, num_heads]`` for `Gate.HEAD`,
                ``[num_rows, num_heads, key_dim]`` for `Gate.KEY`, ``[num_heads]`` for `Gate.CONSTANT`.
            beta: ``[num_rows, num_heads]`` in `StateShape.compute_dtype` for DELTA; None for DECAY.
            cache: slots of one layer; written in EXTEND and DECODE.
            batch: the current forward. Read-only.
            out: output ``[num_rows, num_heads, value_dim]`` in dtype, contiguous. Every row is written; padding rows
                get finite values.
        """

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: torch.Tensor | None = None,
    ) -> None:
        """Move the slots of a batch over the accepted paths, in every layer. Capturable.

        After a verify, the slot of request r moves over the rows ``accept_index[r, :accept_lens[r]]``; with a count of
        0 nothing moves. EXTEND and DECODE have moved the slots already, and `accepted` is None. With `save_slots`,
        the state at length `checkpoint_lens` goes to save_slots[r]; EXTEND and DECODE save it only where the last row
        ends there. Other slots keep their bytes.

        Args:
            pool: the pool that the forward used.
            batch: the batch of the forward, with the prefix lengths from before the round. Read-only.
            accepted: result of the verification; None after EXTEND and DECODE.
            save_slots: int32 ``[R]``, slot for each request's checkpoint, or a null slot; None for no checkpoints. It
                differs from every slot of `batch`, except null slots.
        """
