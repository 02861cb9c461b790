"""Recurrent layers of one runner over the slots of SGLang's `MambaPool`: batches, backend and commits.

SGLang's slot 0 belongs to no request, as row 0 of its request table, so padding requests have slot 0. SGLang clears and
copies slots, and keeps their assignment. Rejected rows are taken back by the backend, from its own buffers, so the
pool's `intermediate_ssm` and `intermediate_conv_window` are not allocated (`state_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftmark import Mode, StateGeometry
from draftmark.runtime import ForwardBatch, StateBackend, StateCache, StatePool, VerifyResult, device_profile

from .extend_pieces import extend_pieces
from .facts import RunnerFacts, resolved
from .geometries import state_geometry_of
from .phases import live_requests
from .state_inputs import Inputs
from .state_shapes import ServedStates

CHECKPOINTED = ("extra_buffer", "extra_buffer_lazy")
"""Strategies of SGLang's prefix cache that keep checkpoints of recurrent states."""
GateInputs = Callable[..., Inputs]
"""Computes the inputs of the recurrence from convolved channels and gate rows."""


@dataclass(frozen=True)
class Piece:
    """Rows of a forward that one call of the backend runs.

    Attributes:
        backend: backend with the buffers of this piece.
        batch: batch of the piece.
        rows: int64 ``[rows]``, indices of its rows in the forward; None for the forward's first rows.
        saved: int64 slots ``[n]`` with a checkpoint after the piece, and ``[n]`` slots that get copies; None for
            no checkpoints.
    """

    backend: StateBackend
    batch: ForwardBatch
    rows: torch.Tensor | None = None
    saved: tuple[torch.Tensor, torch.Tensor] | None = None


class StateLayers:
    """Runs the recurrent layers of an SGLang `ModelRunner`, a target's.

    Attributes:
        served: shape of the layers, and the backend that runs them.
        interval: tokens between two checkpoints of a request; 0 if SGLang keeps none.
        geometry: geometry of the layers, made by `allocate`.
        pool: SGLang's slots.
    """

    def __init__(self, runner: Any, facts: RunnerFacts, served: ServedStates, modes: tuple[Mode, ...]) -> None:
        arguments = resolved(runner)
        self.served, self._facts, self._modes = served, facts, modes
        self._requests = runner.req_to_token_pool
        self.interval = self._chunk = 0
        if not arguments.disable_radix_cache and arguments.mamba_radix_cache_strategy in CHECKPOINTED:
            self.interval, self._chunk = arguments.mamba_track_interval, _chunk_size(runner)
        self._last_layer = max(self._requests.mamba_map.values())
        self._pieces: list[Piece] = []

    def allocate(self, capture_batch_size: int) -> StateGeometry:
        """Allocate the backend's buffers, and return the geometry.

        Args:
            capture_batch_size: requests of the largest CUDA graph; 0 if SGLang has not given it.
        """
        device, cache = torch.device(self._facts.device), self._requests.mamba_pool.mamba_cache
        shape, loaded = self.served.shape, self.served.loaded
        self.geometry = geometry = state_geometry_of(
            loaded, shape, self._facts, device_profile(device), self._modes, len(cache.temporal), self.interval,
            capture_batch_size,
        )  # fmt: skip
        self.arena = loaded.allocate_state(geometry, device)
        self._backend = loaded.bind_state(geometry, self.arena)
        # Rows after a checkpoint of a prompt run in a second call, which needs its own buffers.
        self._rest = self._backend
        if self.interval:
            self._rest = loaded.open_state(replace(geometry, modes=(Mode.EXTEND,)), device)
        windows = cache.conv[0]
        if windows.shape[2] != shape.conv_channels:
            windows = windows.transpose(2, 3)
        self.pool = StatePool.over(geometry, cache.temporal, windows, 1)
        reqs, nodes = geometry.max_reqs, geometry.draft.num_draft_tokens
        self._saves = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._counts = torch.zeros(reqs, dtype=torch.int64, device=device)
        self._paths = torch.arange(nodes, device=device).repeat(reqs, 1)
        return geometry

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return sum(piece.batch.num_rows for piece in self._pieces)

    # -- before a forward ---------------------------------------------------------------------------------

    def prepare(self, batch: ForwardBatch, forward: Any, in_capture: bool) -> None:
        """Copy SGLang's slots and plan the batch, outside a graph.

        Args:
            batch: the batch of the attention layers; its static `state_slots` are filled, except in EXTEND.
            forward: SGLang's `ForwardBatch`, or its view of a batch that a graph replays.
        """
        slots, requests = self._requests.req_index_to_mamba_index_mapping, batch.padded_reqs
        rows = forward.req_pool_indices[:requests]
        if batch.mode is Mode.EXTEND:
            batch = replace(batch, state_slots=slots.index_select(0, rows))
            tracked = self._tracked(forward, batch) if self.interval else ()
            self._pieces = [
                Piece(self._rest if rest else self._backend, one, rows, saved)
                for rest, one, rows, saved in extend_pieces(self.geometry, batch, tracked)
            ]
        else:
            assert batch.state_slots is not None, "the buffers have slots"
            torch.index_select(slots, 0, rows, out=batch.state_slots)
            live = live_requests(forward, requests)
            if live < requests:
                batch.state_slots[live:].zero_()
            if self.interval and batch.mode is Mode.DECODE:
                self._copy_saves(None if in_capture else forward.mamba_track_indices, live)
            self._pieces = [Piece(self._backend, batch)]
        for piece in self._pieces:
            piece.backend.plan(piece.batch)

    def write_metadata(self) -> None:
        """Write the backend's metadata on the device; a CUDA graph captures this call."""
        for piece in self._pieces:
            piece.backend.write_metadata(piece.batch)

    def _tracked(self, forward: Any, batch: ForwardBatch) -> tuple[tuple[int, int], ...]:
        """Return each request's rows up to its checkpoint and the slot for it; (0, 0) without a checkpoint.

        SGLang gives a length that it rounds down to whole chunks after the prefix (`_init_track_ssm_indices`).
        """
        mask = forward.mamba_track_mask
        if mask is None:
            return ()
        numbers = torch.stack(
            (mask, forward.mamba_track_seqlens, forward.mamba_track_indices, forward.extend_prefix_lens)
        )
        found = []
        for tracks, length, slot, prefix in numbers[:, : batch.padded_reqs].T.tolist():
            rows = (length - prefix) // self._chunk * self._chunk if tracks else 0
            found.append((rows, slot) if rows > 0 else (0, 0))
        return tuple(found)

    def _copy_saves(self, slots: torch.Tensor | None, live: int) -> None:
        """Copy the slots for checkpoints; padding requests get the null slot, as all requests without `slots`.

        SGLang's mask of requests that reach a checkpoint is not read: the backend computes it from the lengths, and
        SGLang's view of a batch that a graph replays has no mask.
        """
        if slots is None:
            self._saves.zero_()
            return
        self._saves[live:].zero_()
        self._saves[:live].copy_(slots[:live])

    # -- one layer ----------------------------------------------------------------------------------------

    def run(
        self,
        layer_id: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gates: tuple[torch.Tensor, ...],
        inputs: GateInputs,
    ) -> torch.Tensor:
        """Run convolution and recurrence of one layer.

        Args:
            layer_id: SGLang's number of the layer.
            x: ``[rows, channels]``, rows of the convolution. Rows past the batch's are padding; their output is zero.
            weight, bias: see `StateBackend.convolve`.
            gates: projections with one entry for each row, which `inputs` reads.
            inputs: computes the inputs of the recurrence from the convolved channels and the gates.

        Returns:
            ``[rows, num_heads, value_dim]``.
        """
        shape = self.geometry.state
        cache = self.pool.layers[self._requests.mamba2_layer_index(layer_id)]
        out = x.new_empty(len(x), shape.num_heads, shape.value_dim)
        for piece in self._pieces:
            if piece.rows is None:
                rows = piece.batch.num_rows
                self._run_piece(piece, cache, x[:rows], weight, bias, [one[:rows] for one in gates], inputs, out[:rows])
                if rows < len(x):
                    out[rows:].zero_()
            else:
                part = out.new_empty(len(piece.rows), *out.shape[1:])
                own = [one[piece.rows] for one in gates]
                self._run_piece(piece, cache, x[piece.rows], weight, bias, own, inputs, part)
                out[piece.rows] = part
        batch = self._pieces[0].batch
        if self.interval and batch.mode is Mode.DECODE and cache.layer == self._last_layer:
            self._backend.commit(self.pool, batch, None, self._saves[: batch.padded_reqs])
        return out

    def _run_piece(
        self,
        piece: Piece,
        cache: StateCache,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gates: list[torch.Tensor],
        inputs: GateInputs,
        out: torch.Tensor,
    ) -> None:
        mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        piece.backend.convolve(x, weight, bias, cache, piece.batch, mixed)
        own = inputs(mixed, *gates)
        piece.backend.recur(own.q, own.k, own.v, own.log_decay, own.beta, cache, piece.batch, out)
        if own.skip is not None:
            out += own.skip
        if piece.saved is not None:
            source, target = piece.saved
            cache.state[target] = cache.state[source]
            cache.conv[target] = cache.conv[source]

    # -- after a verification -----------------------------------------------------------------------------

    def commit(self, accept_lens: torch.Tensor, accept_index: torch.Tensor, saves: torch.Tensor | None) -> None:
        """Move the slots of the last verified batch over the accepted paths.

        Args:
            accept_lens: integers ``[live requests]``, accepted nodes, root included.
            accept_index: integers ``[live requests, …]``, rows of the accepted nodes in the batch; -1 after the last.
            saves: integers ``[live requests]``, slots for checkpoints; None for no checkpoints.
        """
        batch, live = self._pieces[0].batch, len(accept_lens)
        assert batch.mode is Mode.VERIFY, "a commit follows a verification"
        nodes = self.geometry.draft.num_draft_tokens
        self._counts[:live].copy_(accept_lens)
        self._counts[live : batch.padded_reqs].zero_()
        columns = min(nodes, accept_index.shape[1])
        # Row r · nodes + j is node j; -1 becomes the last node, which the count excludes.
        torch.remainder(accept_index[:, :columns], nodes, out=self._paths[:live, :columns])
        paths, counts = self._paths[: batch.padded_reqs], self._counts[: batch.padded_reqs]
        targets = None
        if self.interval and saves is not None:
            self._copy_saves(saves, live)
            targets = self._saves[: batch.padded_reqs]
        self._backend.commit(self.pool, batch, VerifyResult(paths, counts, paths), targets)


def _chunk_size(runner: Any) -> int:
    """Return the tokens of a chunk of SGLang's prompt kernels: a checkpoint of a prompt lies at a multiple of them.

    Up to SGLang 0.5.18 the server arguments have this number; later a function computes it.
    """
    found = getattr(runner.server_args, "mamba_cache_chunk_size", None)
    if found is None:
        from sglang.srt.arg_groups import overrides

        found = overrides.mamba_cache_chunk_size(runner.server_args)
    return int(found)
