"""Correct recurrent state in two designs other than the reference's, as base classes for mutants.

`Columns` stores the state after every row in a column of its batch entry, as engines with several slots a request do.
`Masked` computes all rows of a tree from the committed state and the ancestor mask, and stores one record a row.
Both compute all requests at once, and rows that a request does not have are masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from draftmark import BufferSpec, Gate, Recurrence, StateGeometry
from draftmark.geometry import Mode
from draftmark.runtime import Arena, ForwardBatch, StateCache, StatePool, Tree, VerifyResult, checkpoint_lens

from .tutorial import Plugin

Tensor = torch.Tensor
LEAVES_STATE = (Mode.EXTEND, Mode.DECODE)
"""Modes with rows that write the slot."""
CHUNK = 16
"""Rows that `Masked` computes at once in a prompt."""


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


def _rows(geometry: StateGeometry) -> tuple[int, int, int]:
    verifies = {Mode.VERIFY, Mode.RAGGED_VERIFY}.intersection(geometry.modes)
    return geometry.num_layers, geometry.max_reqs, geometry.draft.num_draft_tokens if verifies else 0


def channels_buffer(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the buffer of the convolution's inputs."""
    s = geometry.state
    shape = (*_rows(geometry), s.conv_channels)
    spec = BufferSpec("channels", shape, s.conv_dtype, "layers · max_reqs · D · channels")
    return [spec] if s.conv_kernel else []


class Columns(StateDesign):
    """Computes rows one after another, each from the column of its parent."""

    @staticmethod
    def buffers(geometry: StateGeometry) -> list[BufferSpec]:
        """Return one column for each row of the largest batch."""
        s = geometry.state
        shape = (*_rows(geometry), s.num_heads, s.value_dim, s.key_dim)
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


class Masked(StateDesign):
    """Computes all rows of a chunk from the committed state and the ancestor mask, and stores records of rows."""

    @staticmethod
    def buffers(geometry: StateGeometry) -> list[BufferSpec]:
        """Return the records of the rows of the largest batch: update, key and decay."""
        s, rows = geometry.state, _rows(geometry)
        parts = {"updates": s.value_dim, "keys": s.key_dim, "decays": s.key_dim if s.gate is Gate.KEY else 1}
        specs = [
            BufferSpec(
                name,
                (*rows, s.num_heads, width),
                s.compute_dtype,
                "layers · max_reqs · D",
            )
            for name, width in parts.items()
        ]
        return [*(specs if s.num_heads else []), *channels_buffer(geometry)]

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
        """Compute a verify at once, and a prompt chunk by chunk."""
        view = self.view(batch)
        q, k, v, decay, strength = self.inputs(q, k, v, log_decay, beta, view)
        state = self.first(cache.state, view)
        if batch.mode not in LEAVES_STATE:
            reach = self.reach(batch, view)
            total = self.along(reach, decay)
            u = self.updates(state, k, v, strength, total, reach)
            self.spread(self.outputs(state, q, k, u, total, reach), view, out)
            self.keep_records(cache, view, u, k, decay)
            return
        found = []
        for start in range(0, view.index.shape[1], CHUNK):
            chunk = slice(start, start + CHUNK)
            reach = torch.ones(k[:, chunk].shape[1], k[:, chunk].shape[1], dtype=torch.bool, device=k.device).tril()
            reach = reach & view.valid[:, None, chunk]
            total = self.along(reach, decay[:, chunk])
            u = self.updates(state, k[:, chunk], v[:, chunk], strength[:, chunk], total, reach)
            found.append(self.outputs(state, q[:, chunk], k[:, chunk], u, total, reach))
            state = self.folded(state, k[:, chunk], u, decay[:, chunk], view.valid[:, chunk])
        self.spread(torch.cat(found, 1), view, out)
        self.store(cache.state, view.slots, state, view.count > 0)

    def reach(self, batch: ForwardBatch, view: View) -> Tensor:
        """Return the ancestors of each row, itself included, bool ``[R, T, T]``."""
        t = torch.arange(view.index.shape[1], device=view.index.device)
        if not isinstance(batch.tail, Tree):
            return (t <= t[:, None]) & view.valid[:, None]
        words = batch.tail.mask[view.index].long()
        bits = words.gather(-1, (t // 32).expand(*view.index.shape, -1)) >> (t % 32)
        return (bits & 1).bool() & view.valid[:, None]

    @staticmethod
    def along(reach: Tensor, decay: Tensor) -> Tensor:
        """Return the log decay from the committed state to each row, ``[R, T, heads, keys]``."""
        return torch.einsum("rtj,rjhk->rthk", reach.to(decay.dtype), decay)

    @staticmethod
    def weights(q: Tensor, k: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return ``(G_t / G_j) k_j · q_t`` for each row t and ancestor j, ``[R, heads, T, T]``."""
        ratio = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
        found = (q[:, :, None] * k[:, None] * ratio).sum(-1)
        return torch.where(reach[..., None], found, 0.0).permute(0, 3, 1, 2)

    def updates(self, state: Tensor, k: Tensor, v: Tensor, strength: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return the update of each row, by forward substitution."""
        if not self.delta:
            return v * strength[..., None]
        prior = v - torch.einsum("rhvk,rthk->rthv", state, k * total.exp())
        own = torch.eye(reach.shape[1], dtype=torch.bool, device=reach.device)
        mixed = self.weights(k, k, total, reach & ~own) * strength.permute(0, 2, 1)[..., None]
        system = torch.eye(reach.shape[1], dtype=k.dtype, device=k.device) + mixed
        right = (prior * strength[..., None]).permute(0, 2, 1, 3)
        return torch.linalg.solve_triangular(system, right, upper=False).permute(0, 2, 1, 3)

    def outputs(self, state: Tensor, q: Tensor, k: Tensor, u: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return the output of each row, ``[R, T, heads, value_dim]``."""
        prefix = torch.einsum("rhvk,rthk->rthv", state, q * total.exp())
        return prefix + torch.einsum("rhtj,rjhv->rthv", self.weights(q, k, total, reach), u)

    @staticmethod
    def folded(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, valid: Tensor) -> Tensor:
        """Return the state after the valid rows of a chain."""
        decay = torch.where(valid[..., None, None], decay, 0.0)
        after = decay.flip(1).cumsum(1).flip(1) - decay
        kept = torch.where(valid[..., None, None], u, 0.0)
        return state * decay.sum(1)[:, :, None].exp() + torch.einsum("rthv,rthk->rhvk", kept, k * after.exp())

    def keep_records(self, cache: StateCache, view: View, u: Tensor, k: Tensor, decay: Tensor) -> None:
        """Store the records of a verify for its commit."""
        for name, values in (("updates", u), ("keys", k), ("decays", decay)):
            self.arena[name][cache.layer, : len(view.slots), : u.shape[1]] = values

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        """Return the committed state plus the records of `count` accepted rows."""
        path = accepted.accept_index
        valid = torch.arange(path.shape[1], device=path.device) < count[:, None]

        def taken(name: str) -> Tensor:
            kept = self.arena[name][cache.layer, : len(path)]
            found = kept.gather(1, path[..., None, None].expand(-1, -1, *kept.shape[2:]))
            return torch.where(valid[..., None, None], found, 0.0)

        u, k, decay = (taken(name) for name in ("updates", "keys", "decays"))
        return self.folded(self.first(cache.state, view), k, u, decay, valid)


class StatePlugin(Plugin):
    """Plugin of the tutorial that also serves recurrent state, in one of the designs."""

    design: type[StateDesign] = Columns
    info = replace(Plugin.info, recurrences=tuple(Recurrence), modes=tuple(Mode))

    def state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Return the buffers of the design."""
        return self.design.buffers(geometry)  # type: ignore[attr-defined, no-any-return]

    def open_state(self, geometry: StateGeometry, arena: Arena) -> Any:
        """Return the backend of the design."""
        return self.design(geometry, arena)


def state_plugin(design: type[StateDesign], **fields: Any) -> type[StatePlugin]:
    """Return a plugin class that opens `design` for layers with recurrent state."""
    return type(
        f"{design.__name__}Plugin", (StatePlugin,), {"design": design, "__module__": Plugin.__module__, **fields}
    )


STATE_DESIGNS: dict[str, type[StateDesign]] = {one.__name__: one for one in (Columns, Masked)}
