"""Recurrent layers of the reference: convolution, recurrence and commit in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from draftmark import Gate, Mode, StateGeometry
from draftmark.runtime import Arena, ForwardBatch, StateCache, StatePool, VerifyResult, checkpoint_lens

from .gathers import ancestors_in, columns_after, requests_of, slots_of_states, write_slots
from .layout import Layout, layout_of
from .recurrence import Rows, masked, rows_of, step

CHUNK = 64
"""Rows of a prompt that the masked form computes together."""


class ReferenceState(ABC):
    """Recurrent layers of one geometry, with one code path for eager mode, capture and replay."""

    def __init__(self, geometry: StateGeometry, arena: Arena) -> None:
        self.geometry, self.arena = geometry, arena
        self._compute = getattr(torch, geometry.state.compute_dtype)

    def plan(self, batch: ForwardBatch) -> None:  # noqa: B027
        """Do nothing: no decision depends on host lengths."""

    def write_metadata(self, batch: ForwardBatch) -> None:  # noqa: B027
        """Do nothing: each method reads the batch itself."""

    # -- convolution --------------------------------------------------------------------------------------

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Convolve each row with its ancestors; EXTEND runs request by request."""
        if batch.mode is Mode.EXTEND:
            for one, rows in requests_of(batch):
                n = rows.stop - rows.start
                history = torch.cat((self._window(cache, batch, one), x[rows][None]), 1)
                parents = torch.arange(-1, n - 1, device=x.device)[None]
                out[rows] = self._taps(history, parents, weight, bias)[0].to(out.dtype)
                last = history[:, n:].transpose(1, 2)
                cache.conv[slots_of_states(batch)[one]] = last.to(cache.conv.dtype)
            return
        layout = layout_of(batch)
        tail = layout.by_slot(x)
        window = self._window(cache, batch)
        history = torch.cat((window, tail), 1)
        out.copy_(layout.by_row(self._taps(history, layout.parents, weight, bias)))
        if batch.mode is Mode.DECODE:
            columns = columns_after(history, torch.ones_like(batch.prefix_lens), self.geometry.window)
            cache.conv[slots_of_states(batch)] = columns.to(cache.conv.dtype)
        else:
            self._keep_channels(tail, history, layout, cache.layer)

    def _window(self, cache: StateCache, batch: ForwardBatch, some: slice = slice(None)) -> torch.Tensor:
        """Return the committed channels ``[R, window, channels]`` as activations, oldest first; zeros at L = 0."""
        found = cache.conv[slots_of_states(batch)[some]]
        live = (batch.prefix_lens[some] > 0)[:, None, None]
        return torch.where(live, found, 0).transpose(1, 2).to(getattr(torch, self.geometry.state.dtype))

    def _taps(
        self, history: torch.Tensor, parents: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the convolution of each tail slot, ``[R, T, channels]`` in the compute dtype."""
        total = torch.zeros(*parents.shape, history.shape[2], dtype=self._compute, device=history.device)
        total = total if bias is None else total + bias.to(self._compute)
        for taps, at in enumerate(ancestors_in(parents, self.geometry.window)):
            rows = history.gather(1, at[..., None].expand(-1, -1, history.shape[2])).to(self._compute)
            total = total + rows * weight[:, self.geometry.window - taps].to(self._compute)
        return torch.nn.functional.silu(total) if self.geometry.state.conv_silu else total

    # -- recurrence ---------------------------------------------------------------------------------------

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
        """Compute each row from its parent's state; EXTEND in chunks, request by request."""
        constant = self.geometry.state.gate is Gate.CONSTANT
        if batch.mode is Mode.EXTEND:
            for one, rows in requests_of(batch):
                decay = log_decay if constant else log_decay[rows][None]
                strength = None if beta is None else beta[rows][None]
                own = rows_of(q[rows][None], k[rows][None], v[rows][None], decay, strength, self.geometry.state)
                out[rows] = self._extend(own, cache, batch, one).to(out.dtype)
            return
        layout = layout_of(batch)
        q, k, v = (layout.by_slot(one) for one in (q, k, v))
        decay = log_decay if constant else layout.by_slot(log_decay)
        strength = None if beta is None else layout.by_slot(beta)
        tail = rows_of(q, k, v, decay, strength, self.geometry.state)
        state = self._state(cache, batch)
        if batch.mode is Mode.DECODE:
            state, found = step(state, tail)
            cache.state[slots_of_states(batch)] = state.to(cache.state.dtype)
        else:
            found = self._verify(state, tail, layout, cache.layer)
            self._keep_rows((k, v, decay, strength), cache.layer)
        out.copy_(layout.by_row(found.transpose(1, 2)))

    def _extend(self, rows: Rows, cache: StateCache, batch: ForwardBatch, one: slice) -> torch.Tensor:
        state, found = self._state(cache, batch, one), []
        for start in range(0, rows.q.shape[2], CHUNK):
            chunk = rows.at(slice(start, start + CHUNK))
            causal = torch.ones(1, chunk.q.shape[2], chunk.q.shape[2], dtype=torch.bool, device=state.device).tril()
            out, state = masked(state, chunk, causal)
            found.append(out)
        cache.state[slots_of_states(batch)[one]] = state.to(cache.state.dtype)
        return torch.cat(found, 2)[0].transpose(0, 1)

    def _state(self, cache: StateCache, batch: ForwardBatch, some: slice = slice(None)) -> torch.Tensor:
        """Return the committed states ``[R, H, value_dim, key_dim]`` in the compute dtype; zeros at L = 0."""
        live = (batch.prefix_lens[some] > 0)[:, None, None, None]
        return torch.where(live, cache.state[slots_of_states(batch)[some]], 0).to(self._compute)

    # -- commit -------------------------------------------------------------------------------------------

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: torch.Tensor | None = None,
    ) -> None:
        """Move each layer's slots over the accepted paths, and save the checkpoints."""
        rows, interval = batch.q_indptr.diff(), self.geometry.limits.state_interval
        slots = slots_of_states(batch)
        if accepted is None:
            if save_slots is not None:
                saves = checkpoint_lens(batch.prefix_lens, rows, interval, whole=True) > 0
                for cache in pool.layers:
                    write_slots(cache, save_slots.long(), cache.state[slots], cache.conv[slots], saves)
            return
        # A request without rows has the count 1 from verify_tree, and commits nothing.
        counts = torch.minimum(accepted.accept_lens, rows)
        ends = [(slots, counts)]
        if save_slots is not None:
            saved = checkpoint_lens(batch.prefix_lens, counts, interval) - batch.prefix_lens
            ends.insert(0, (save_slots.long(), saved.clamp(min=0).long()))
        for cache in pool.layers:
            committed = self._state(cache, batch), self._window(cache, batch)
            for target, count in ends:
                state, conv = self._after(committed, accepted.accept_index, count, cache.layer)
                write_slots(cache, target, state, conv, count > 0)

    # -- what a verify leaves -----------------------------------------------------------------------------

    @abstractmethod
    def _verify(self, state: torch.Tensor, rows: Rows, layout: Layout, layer: int) -> torch.Tensor:
        """Return the outputs ``[R, H, T, value_dim]`` of a verify's rows."""

    @abstractmethod
    def _keep_channels(self, tail: torch.Tensor, history: torch.Tensor, layout: Layout, layer: int) -> None:
        """Keep the channels of a verify's rows until the commit."""

    @abstractmethod
    def _keep_rows(self, rows: tuple[torch.Tensor | None, ...], layer: int) -> None:
        """Keep k, v, decays and β of a verify's rows until the commit."""

    @abstractmethod
    def _after(
        self, committed: tuple[torch.Tensor, torch.Tensor], path: torch.Tensor, count: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states ``[R, H, value_dim, key_dim]`` and windows ``[R, channels, window]`` after `count` rows.

        Args:
            committed: states before the round, and their windows ``[R, window, channels]``.
            path: int64 ``[R, D]``, tail slots of the accepted rows.
            count: int64 ``[R]``, rows of the path; the result of a request with 0 rows is undefined.
        """
