"""Tensors of a forward of layers with recurrent state: its batch, their slots, their rows and the accepted paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from draftmark.geometry import Gate, Recurrence, StateGeometry
from draftmark.state import StateCache, StatePool
from draftmark.tree import VerifyResult

from ..cases.forwards import ForwardCase
from ..oracle.formulas import max_requests, max_rows
from ..oracle.history import NO_PARENT, Request
from .batch_tensors import BatchTensors
from .pools import raw

STALE = 5
"""Accepted rows at most of a padded request and of a request without rows: an engine's walk leaves any number."""
JUNK = (float("nan"), float("inf"), 3.0e4)
"""Contents of slots that no step may read, in turn."""
DECAYS = (1e-4, 1.0, 12.0)
"""Largest decay exponents of heads, in turn: heads that keep everything, forget slowly, and forget at once."""


@dataclass
class StateRows:
    """Inputs and outputs of one layer, at fixed addresses.

    Attributes:
        x, weight, bias: of the convolution; None in a layer without one.
        q, k, v, log_decay, beta: of the recurrence; None in a layer without one. beta is None without a delta rule.
        convolved, out: the outputs.
    """

    x: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    convolved: torch.Tensor | None = None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    log_decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each field that the layer has."""
        for one in fields(self):
            tensor = getattr(self, one.name)
            if tensor is not None:
                yield one.name, tensor

    @classmethod
    def of(cls, geometry: StateGeometry, device: str) -> StateRows:
        """Return uninitialized rows for the largest forward of a geometry."""
        s, rows, found = geometry.state, max_rows(geometry), cls()
        dtype, exact = getattr(torch, s.dtype), getattr(torch, s.compute_dtype)

        def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        if s.conv_kernel:
            found.x, found.convolved = made(rows, s.conv_channels), made(rows, s.conv_channels)
            found.weight, found.bias = made(s.conv_channels, s.conv_kernel), made(s.conv_channels)
        if s.recurrence is not Recurrence.NONE:
            found.q, found.k = made(rows, s.num_key_heads, s.key_dim), made(rows, s.num_key_heads, s.key_dim)
            found.v, found.out = made(rows, s.num_heads, s.value_dim), made(rows, s.num_heads, s.value_dim)
            shape = {Gate.HEAD: (rows, s.num_heads), Gate.KEY: (rows, s.num_heads, s.key_dim)}
            found.log_decay = made(*shape.get(s.gate, (s.num_heads,)), dtype=exact)
        if s.recurrence is Recurrence.DELTA:
            found.beta = made(rows, s.num_heads, dtype=exact)
        return found


class StateTensors(BatchTensors):
    """Holds all tensors that a backend of recurrent state receives. Parts that a forward does not use are stale.

    Attributes:
        pool: slots of all layers.
        layers: rows of each layer.
        accepted: accepted paths of the largest batch.
        save_slots: checkpoint slots of the largest batch, int32.
        has_saves: True if `commit` receives `save_slots`.
        compared: slots that are compared byte by byte: all, except in a pool that is too large to fill.

    Args:
        pool: pool of another `StateTensors`; a new one by default.
    """

    def __init__(self, geometry: StateGeometry, device: str, num_slots: int, pool: StatePool | None = None) -> None:
        super().__init__(geometry, device)
        self.state_geometry, self.device = geometry, device
        self.pool = StatePool(geometry, num_slots, 1, device) if pool is None else pool
        self.layers = [StateRows.of(geometry, device) for _ in range(len(self.pool.layers))]
        reqs, most = max_requests(geometry), geometry.draft.num_draft_tokens
        lengths = torch.full((reqs,), most, dtype=torch.int64, device=device)
        index = torch.arange(most, device=device).expand(reqs, -1).contiguous()
        self.accepted = VerifyResult(torch.zeros_like(index), lengths, index)
        self.save_slots = torch.full((reqs,), num_slots - 1, dtype=torch.int32, device=device)
        self.has_saves = geometry.limits.state_interval > 0
        self.is_sparse, self.compared = False, torch.arange(num_slots, device=device)
        self.dirty(num_slots - 1)

    @property
    def num_slots(self) -> int:
        """Number of slots of the pool."""
        return self.pool.num_slots

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """State and windows of all layers and slots, ``[layers, slots, …]``."""
        return {name: one for name, one in (("state", self.pool.state), ("conv", self.pool.conv)) if one.numel()}

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States and windows of all layers and slots. A tensor without elements is of a part that the layers lack."""
        return self.pool.state, self.pool.conv

    def twin(self) -> StateTensors:
        """Return other tensors over the same slots."""
        return StateTensors(self.state_geometry, self.device, self.num_slots, self.pool)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a backend receives in addition to its batch, by name."""
        rows = {
            f"{'out ' * (name in ('out', 'convolved'))}{name} {layer}": one
            for layer, rows in enumerate(self.layers)
            for name, one in rows.tensors()
        }
        paths = {"accept_lens": self.accepted.accept_lens, "accept_index": self.accepted.accept_index}
        cache = {f"cache.{name}": one for name, one in self.stored.items()}
        return {**cache, **rows, **paths, "save_slots": self.save_slots}

    def outputs(self, forward: ForwardCase) -> dict[str, torch.Tensor]:
        """Return the outputs of a forward's rows, and of the rows after them, by name."""
        n = forward.num_rows
        outs = {name: one for name, one in self.named().items() if name.startswith("out ")}
        return {name: one[:n] for name, one in outs.items()} | {f"{k} after": one[n:] for k, one in outs.items()}

    def copy_to(self, other: Any) -> None:
        """Copy the batch, the rows and the accepted paths to the tensors of `other`. Capturable."""
        super().copy_to(other)
        theirs = other.named()
        for name, one in self.named().items():
            if not name.startswith("cache."):
                theirs[name].copy_(one)

    def take(self, form: object) -> None:
        """Do nothing: a layer with recurrent state has no engine forms."""

    def clear(self) -> None:
        """Fill the outputs with NaN."""
        for name, one in self.named().items():
            if name.startswith("out "):
                one.fill_(float("nan"))

    def place(self, forward: ForwardCase) -> torch.Tensor:
        """Fill the slot, the accepted path and the checkpoint slot of each request. Return an empty page table."""
        reqs, slots = len(forward.requests), self.buffers.state_slots
        assert slots is not None
        slots[:reqs] = torch.tensor([one.pages[0] for one in forward.requests], dtype=torch.int32)
        self.save_slots[:reqs] = torch.tensor([one.save for one in forward.requests], dtype=torch.int32)
        most = self.accepted.accept_index.shape[1]
        for n, one in enumerate(forward.requests):
            path = _path(one) if one.live and one.rows else [*range(min(most, 1 + n % STALE))]
            self.accepted.accept_lens[n] = len(path)
            self.accepted.accept_index[n] = torch.tensor([*path, *range(len(path), most)])
        return super().place(forward)

    def result(self, forward: ForwardCase) -> VerifyResult:
        """Return the accepted paths of a forward's requests, as views."""
        reqs = len(forward.requests)
        return VerifyResult(*(one[:reqs] for one in self.accepted))

    def fill_rows(self, forward: ForwardCase, seed: int = 0) -> None:
        """Fill the rows of a forward, and the weights, from a seed. Outputs and rows after the forward's become NaN."""
        n = forward.num_rows
        for layer, rows in enumerate(self.layers):
            dice = torch.Generator().manual_seed(1000 * seed + layer)
            for name, one in rows.tensors():
                by_row = name not in ("weight", "bias") and not (name == "log_decay" and one.dim() == 1)
                part = one[:n] if by_row else one
                if by_row:
                    one.fill_(float("nan"))
                if name not in ("out", "convolved"):
                    part.copy_(self._values(name, part, dice))

    def set_strides(self, number: int) -> None:
        """Make q, k, v and x views of new memory with larger pitches. Give weights another dtype, or no bias."""
        for rows in self.layers:
            if rows.weight is not None:
                other = torch.float32 if number % 2 else rows.weight.dtype
                rows.weight = rows.weight.to(other)
                rows.bias = None if number % 2 else rows.weight.new_empty(len(rows.weight))
            for name in ("x", "q", "k", "v"):
                one = getattr(rows, name)
                if one is not None:
                    lead, width = one.shape[0], one[0].numel()
                    wide = one.new_full((lead, width + 16 * (1 + number)), float("nan"))
                    setattr(rows, name, wide[:, 16 : 16 + width].unflatten(1, one.shape[1:]))

    def spoil_padding(self, forward: ForwardCase) -> None:
        """Fill every input of padded rows with NaN."""
        s = self.state_geometry.state
        for rows in self.layers:
            for name, one in rows.tensors():
                by_row = name not in ("weight", "bias", "out", "convolved")
                if by_row and not (name == "log_decay" and s.gate is Gate.CONSTANT):
                    one[forward.live_rows : forward.num_rows] = float("nan")

    def _values(self, name: str, part: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
        """Return random values of one input, so that no state grows: keys of length 1, decays below 1."""
        s, values = self.state_geometry.state, torch.randn(part.shape, generator=dice, dtype=torch.float32)
        if name in ("q", "k"):
            return torch.nn.functional.normalize(values, dim=-1)
        if name == "beta":
            return values.sigmoid()
        if name == "log_decay":
            heads = torch.tensor(DECAYS)[torch.arange(s.num_heads) % len(DECAYS)]
            spread = torch.rand(part.shape, generator=dice, dtype=torch.float32)
            return -spread * (heads[:, None] if s.gate is Gate.KEY else heads)
        return self.representable(values) if name == "x" else values

    def representable(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded so that activations and windows both hold them exactly."""
        s = self.state_geometry.state
        both = values.to(getattr(torch, s.conv_dtype)).to(getattr(torch, s.dtype)).to(getattr(torch, s.conv_dtype))
        return torch.where(both.float().abs() < 2.0**-10, 0.0, both.double())

    def fill_cache(self, forward: ForwardCase, seed: int = 0) -> None:
        """Fill the slots: random states where a request has a prefix, and contents that no step may read elsewhere."""
        dice = torch.Generator().manual_seed(seed + 1)
        self.fill_slots(JUNK[seed % len(JUNK)])
        filled = set[int]()
        for one in forward.requests:
            if one.live and one.prefix and one.pages[0] not in filled:
                self.fill_slot(one.pages[0], one.prefix, dice)
            filled.add(one.pages[0])

    def fill_slots(self, value: float) -> None:
        """Fill all slots with one value."""
        for one in () if self.is_sparse else self.stored.values():
            one.fill_(value)

    def fill_slot(self, slot: int, prefix: int, dice: torch.Generator) -> None:
        """Fill one slot with what a request of `prefix` tokens can leave there."""
        for name, one in self.stored.items():
            values = torch.randn(one[:, slot].shape, generator=dice)
            if name == "conv":
                values = self.representable(values)
                values[..., : max(0, values.shape[-1] - prefix)] = 0
            one[:, slot] = values.to(one)

    def bits(self) -> dict[str, torch.Tensor]:
        """Return copies of the compared slots as integers, ``[layers, compared slots, …]``."""
        return {name: raw(one)[:, self.compared].clone() for name, one in self.stored.items()}

    def use(self, state: torch.Tensor, windows: torch.Tensor, compared: list[int]) -> None:
        """Lay the slots into this memory ``[layers, slots, …]``, too large to fill, and compare some slots only."""
        self.pool.state, self.pool.conv, self.pool.num_slots = state, windows, state.shape[1]
        pairs = enumerate(zip(state, windows, strict=True))
        self.pool.layers = [StateCache(one, other, layer) for layer, (one, other) in pairs]
        self.compared = torch.tensor(compared, device=self.device)
        self.is_sparse = True


def _path(request: Request) -> list[int]:
    return [] if request.leaf == NO_PARENT else request.lineage(request.leaf)[::-1]
