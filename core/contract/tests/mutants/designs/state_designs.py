"""Correct recurrent state in a design other than the reference's, and the base class of such designs.

`Columns` stores the state after every row in a column of its batch entry, as engines with several slots a request do.
A design computes all requests at once, and rows that a request does not have are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import BufferSpec, Gate, Recurrence, StateGeometry
from draftmark.geometry import Mode
from draftmark.runtime import Arena, ForwardBatch, StateCache, StatePool, Tree, VerifyResult, checkpoint_lens

Tensor = torch.Tensor
LEAVES_STATE = (Mode.EXTEND, Mode.DECODE)
"""Modes with rows that write the slot."""


@dataclass(frozen=True)
class View:
    """A batch as rectangles of R requests and T rows, without a host read.

    Attributes:
        index: ``[R, T]``, row of the batch; of a row that does not exist, any.
        valid: ``[R, T]``, rows that exist.
        parents: ``[R, T]``, parent row; -1 for the committed state.
        count: ``[R]``, rows of each request.
        slots: ``[R]``.
        fresh: ``[R]``, requests without a prefix.
    """

    index: Tensor
    valid: Tensor
    parents: Tensor
    count: Tensor
    slots: Tensor
    fresh: Tensor


class StateDesign:
    """Parts of a backend of recurrent state that both designs share; a mutant replaces one of them."""

    rows_buffer: str

    def __init__(self, geometry: StateGeometry, arena: Arena) -> None:
        self.geometry, self.shape, self.arena = geometry, geometry.state, arena
        self.channels = arena["channels"] if geometry.state.conv_kernel else None

    def plan(self, batch: ForwardBatch) -> None:
        """Decide nothing on the host."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write no metadata: every call derives what it needs from the batch."""

    # -- batch --------------------------------------------------------------------------------------------

    def view(self, batch: ForwardBatch) -> View:
        """Return the batch as rectangles."""
        count = (batch.q_indptr[1:] - batch.q_indptr[:-1]).long()
        t = torch.arange(max(1, max(batch.q_lens, default=1)), device=count.device)
        index = (batch.q_indptr[:-1, None].long() + t).clamp(0, batch.num_rows - 1)
        valid = t < count[:, None]
        # A row that does not exist has the parent of any other row.
        parents = torch.where(valid, self.parents(batch, index, t), -1)
        return View(index, valid, parents, count, self.slots(batch), batch.prefix_lens == 0)

    def slots(self, batch: ForwardBatch) -> Tensor:
        """Return the slot of each request."""
        assert batch.state_slots is not None
        return batch.state_slots.long()

    def parents(self, batch: ForwardBatch, index: Tensor, t: Tensor) -> Tensor:
        """Return the parent of each row."""
        if not isinstance(batch.tail, Tree):
            return (t - 1).expand(index.shape)
        assert batch.tail.parents is not None
        found = batch.tail.parents.long()
        return found[index] if found.dim() == 1 else found

    def by_request(self, rows: Tensor, view: View) -> Tensor:
        """Return rows ``[R, T, …]`` in the inner dtype, with zeros for rows that do not exist."""
        found = rows[view.index].to(self.inner)
        return torch.where(view.valid.view(*view.valid.shape, *[1] * (found.dim() - 2)), found, 0.0)

    @property
    def inner(self) -> torch.dtype:
        """Dtype of the arithmetic."""
        return getattr(torch, self.shape.compute_dtype)  # type: ignore[no-any-return]

    def first(self, slots: Tensor, view: View) -> Tensor:
        """Return the committed contents of the requests' slots, zeros without a prefix."""
        found = slots[view.slots].to(self.inner)
        return torch.where(view.fresh.view(-1, *[1] * (found.dim() - 1)), 0.0, found)

    @staticmethod
    def store(pool: Tensor, slots: Tensor, values: Tensor, wanted: Tensor) -> None:
        """Write values ``[R, …]`` to slots where they are wanted; other slots keep their bytes."""
        old = pool[slots]
        pool[slots] = torch.where(wanted.view(-1, *[1] * (old.dim() - 1)), values.to(pool.dtype), old)

    # -- convolution --------------------------------------------------------------------------------------

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, batch: ForwardBatch, out: Tensor
    ) -> None:
        """Gather each row's inputs from a wide window: the slot's, then the tail's."""
        view = self.view(batch)
        wide = self.wide(self.by_request(x, view), self.first(cache.conv, view))
        seen = self.lineage(view, self.shape.conv_kernel)
        taps = torch.stack([self.taken(wide, one) for one in seen], -1)  # newest first
        total = (taps * weight.to(self.inner).flip(-1)).sum(-1)
        if bias is not None:
            total = total + bias.to(self.inner)
        self.spread(total * total.sigmoid() if self.shape.conv_silu else total, view, out)
        if batch.mode in LEAVES_STATE:
            at = (view.count - 1).clamp(min=0)
            window = torch.stack(
                [self.taken(wide, one[torch.arange(len(at)), at][:, None])[:, 0] for one in seen[-2::-1]], -1
            )
            self.store(cache.conv, view.slots, window, view.count > 0)
        else:
            self.keep_channels(x, cache, batch, view)

    def wide(self, x: Tensor, window: Tensor) -> Tensor:
        """Return the slot's window and the tail's inputs, ``[R, K - 1 + T, channels]``."""
        return torch.cat((window.transpose(1, 2), x), 1)

    def lineage(self, view: View, length: int) -> list[Tensor]:
        """Return the place in the wide window of each row and of its ancestors, newest first, ``[R, T]`` each."""
        window = self.shape.conv_kernel - 1
        before = (torch.arange(window, device=view.index.device) - 1).clamp(min=0).expand(len(view.index), -1)
        up = torch.cat((before, torch.where(view.parents >= 0, view.parents + window, window - 1)), 1)
        places = [torch.arange(view.parents.shape[1], device=up.device).expand(view.parents.shape) + window]
        for _ in range(length - 1):
            places.append(up.gather(1, places[-1]))
        return places

    @staticmethod
    def taken(wide: Tensor, places: Tensor) -> Tensor:
        """Return the inputs at these places, ``[R, T, channels]``."""
        return wide.gather(1, places[..., None].expand(-1, -1, wide.shape[-1]))

    def keep_channels(self, x: Tensor, cache: StateCache, batch: ForwardBatch, view: View) -> None:
        """Store the inputs of a verify for its commit."""
        assert self.channels is not None
        kept = self.channels[cache.layer, : len(view.slots), : view.index.shape[1]]
        kept.copy_(self.by_request(x, view))

    def spread(self, values: Tensor, view: View, out: Tensor) -> None:
        """Write values ``[R, T, …]`` to the rows of the batch; rows that no request has get zeros."""
        out.zero_()
        total = torch.cat((torch.zeros_like(out), out[:1]))
        index = torch.where(view.valid, view.index, len(out))
        total[index] = values.to(out.dtype)
        out.copy_(total[:-1])

    # -- commit -------------------------------------------------------------------------------------------

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: Tensor | None = None,
    ) -> None:
        """Move the slots, and save checkpoints."""
        view = self.view(batch)
        counts = view.count if accepted is None else self.counts(accepted, view)
        interval = self.geometry.limits.state_interval
        at = checkpoint_lens(batch.prefix_lens, counts, interval) - batch.prefix_lens
        if accepted is None:
            if save_slots is not None:
                wanted = (at > 0) & (at == counts)
                for whole in (pool.state, pool.conv):
                    for layer in whole if whole.numel() else ():
                        self.store(layer, save_slots.long(), layer[view.slots], wanted)
            return
        targets = [(view.slots, counts, counts > 0)]
        if save_slots is not None:
            targets.insert(0, (save_slots.long(), at, at > 0))
        moved = [self.moved(pool, view, accepted, count) for _, count, _ in targets]
        for (slots, _, wanted), found in zip(targets, moved, strict=True):
            for whole, values in zip((pool.state, pool.conv), found, strict=True):
                for layer, one in zip(whole, values, strict=True) if values is not None else ():
                    self.store(layer, slots, one, wanted)

    @staticmethod
    def counts(accepted: VerifyResult, view: View) -> Tensor:
        """Return the rows to keep of each request. A walk counts a root that a request without rows does not have."""
        return torch.minimum(accepted.accept_lens, view.count)

    def moved(
        self, pool: StatePool, view: View, accepted: VerifyResult, count: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return states and windows ``[layers, R, …]`` after `count` rows of the accepted paths."""
        states = (
            torch.stack([self.state_after(one, view, accepted, count) for one in pool.layers])
            if pool.state.numel()
            else None
        )
        windows = (
            torch.stack([self.window_after(one, view, accepted, count) for one in pool.layers])
            if pool.conv.numel()
            else None
        )
        return states, windows

    def window_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        """Return the window of each request after `count` accepted rows."""
        assert self.channels is not None
        path = accepted.accept_index[:, : self.channels.shape[2]]
        kept = self.channels[cache.layer, : len(path)].to(self.inner)
        x = kept.gather(1, path.clamp(max=kept.shape[1] - 1)[..., None].expand(-1, -1, kept.shape[-1]))
        wide = self.wide(x, self.first(cache.conv, view))
        places = count.clamp(min=0)[:, None] + torch.arange(self.shape.conv_kernel - 1, device=count.device)
        return self.taken(wide, places).transpose(1, 2)

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        """Return the state of each request after `count` accepted rows."""
        raise NotImplementedError

    # -- recurrence ---------------------------------------------------------------------------------------

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, view: View
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, log decay and β by request: ``[R, T, heads, …]`` each, log decay with a key axis."""
        group = self.shape.heads_per_key
        q, k = (self.by_request(one, view).repeat_interleave(group, 2) for one in (q, k))
        v = self.by_request(v, view)
        if self.shape.gate is Gate.CONSTANT:
            decay = log_decay.to(self.inner).expand(*view.index.shape, -1)
            decay = torch.where(view.valid[..., None], decay, 0.0)
        else:
            decay = self.by_request(log_decay, view)
        strength = torch.ones_like(v[..., 0]) if beta is None else self.by_request(beta, view)
        return q, k, v, decay if decay.dim() == 4 else decay[..., None], strength

    @property
    def delta(self) -> bool:
        """True for a delta rule."""
        return self.shape.recurrence is Recurrence.DELTA


def rows_of(geometry: StateGeometry) -> tuple[int, int, int]:
    verifies = {Mode.VERIFY, Mode.RAGGED_VERIFY}.intersection(geometry.modes)
    return geometry.num_layers, geometry.max_reqs, geometry.draft.num_draft_tokens if verifies else 0


def channels_buffer(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the buffer of the convolution's inputs."""
    s = geometry.state
    shape = (*rows_of(geometry), s.conv_channels)
    spec = BufferSpec("channels", shape, s.conv_dtype, "layers · max_reqs · D · channels")
    return [spec] if s.conv_kernel else []


class Columns(StateDesign):
    """Computes rows one after another, each from the column of its parent."""

    @staticmethod
    def buffers(geometry: StateGeometry) -> list[BufferSpec]:
        """Return one column for each row of the largest batch."""
        s = geometry.state
        shape = (*rows_of(geometry), s.num_heads, s.value_dim, s.key_dim)
        spec = BufferSpec("columns", shape, s.compute_dtype, "layers · max_reqs · D · state")
        return [*([spec] if s.num_heads else []), *channels_buffer(geometry)]

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: Tensor,
    ) -> None:
        """Compute the rows of all requests, one row of each at a time."""
        view = self.view(batch)
        q, k, v, decay, strength = self.inputs(q, k, v, log_decay, beta, view)
        first = self.first(cache.state, view)
        keeps = batch.mode not in LEAVES_STATE
        columns = self.columns(cache, view) if keeps else first[:, None].repeat(1, 2, 1, 1, 1)
        found = []
        for t in range(view.index.shape[1]):
            before = self.parent_state(columns, first, view.parents[:, t]) if keeps else columns[:, 0]
            state = self.step(before, k[:, t], v[:, t], decay[:, t], strength[:, t])
            found.append((state * q[:, t, :, None]).sum(-1))
            if keeps:
                columns[:, t] = self.as_column(state)
            else:
                columns[:, 0] = torch.where(view.valid[:, t].view(-1, 1, 1, 1), state, columns[:, 0])
        self.spread(torch.stack(found, 1), view, out)
        if not keeps:
            self.store(cache.state, view.slots, columns[:, 0], view.count > 0)

    def columns(self, cache: StateCache, view: View) -> Tensor:
        """Return the columns of the batch's entries in one layer, ``[R, D, heads, value_dim, key_dim]``."""
        return self.arena["columns"][cache.layer, : len(view.slots)]

    def as_column(self, state: Tensor) -> Tensor:
        """Return a state as its column stores it."""
        return state

    @staticmethod
    def parent_state(columns: Tensor, first: Tensor, parent: Tensor) -> Tensor:
        """Return the state of each request's parent row, or the committed state."""
        entry = torch.arange(len(parent), device=parent.device)
        found = columns[entry, parent.clamp(0, columns.shape[1] - 1)]
        return torch.where((parent >= 0).view(-1, 1, 1, 1), found, first)

    def step(self, before: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        """Return the state after one row of each request."""
        faded = before * decay.exp()[:, :, None]
        u = v - (faded * k[:, :, None]).sum(-1) if self.delta else v
        return faded + (strength[..., None] * u)[..., None] * k[:, :, None]

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        """Return the column of the last of `count` accepted rows."""
        leaf = accepted.accept_index.gather(1, (count - 1).clamp(min=0)[:, None])
        return self.parent_state(self.columns(cache, view), self.first(cache.state, view), leaf[:, 0])
