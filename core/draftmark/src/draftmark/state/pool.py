"""Slots of recurrent state: the states and convolution windows of all layers with one geometry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch.checks import require_tensor
from ..devices import present_device
from ..errors import BufferError
from ..geometry import StateGeometry
from ..guard import guarding


@dataclass(frozen=True)
class StateCache:
    """Slots of one layer. The caller owns the tensors.

    Attributes:
        state: ``[num_slots, num_heads, value_dim, key_dim]`` in state_dtype. A slot is contiguous; slots may have any
            pitch.
        conv: ``[num_slots, conv_channels, window]`` in conv_dtype: inputs of the convolution before it, oldest first.
            It may have any strides: SGLang stores the windows of KDA layers as ``[window, conv_channels]``.
        layer: index of the layer in its pool, 0 … num_layers - 1. A backend stores what a verify leaves by this index.
    """

    state: torch.Tensor
    conv: torch.Tensor
    layer: int


class StatePool:
    """States and convolution windows of all layers with one `StateGeometry`.

    The pool owns the memory, unless `over` made it. Between rounds a request's slot holds the state after exactly L
    tokens. L = 0 means zeros, whatever the slot holds: nothing is zeroed when a slot is given out. The first
    `null_slots` slots belong to no request. The pool starts as zeros; with DRAFTMARK_GUARD=1 it starts as NaN.

    Attributes:
        geometry: shapes of the pool.
        state: ``[num_layers, num_slots, num_heads, value_dim, key_dim]`` in state_dtype.
        conv: ``[num_layers, num_slots, conv_channels, window]`` in conv_dtype.
        layers: one `StateCache` view per layer.
        num_slots, null_slots: slots of the pool, and the number of null slots among them.

    Raises:
        BufferError: a count is out of range, or `device` is not present.
    """

    def __init__(self, geometry: StateGeometry, num_slots: int, null_slots: int, device: torch.device | str) -> None:
        if not isinstance(geometry, StateGeometry):
            raise BufferError(
                f"geometry is {geometry!r}, but it must be a StateGeometry; write StateGeometry.create(…)"
            )
        check_slot_counts(num_slots, null_slots)
        device = present_device("a StatePool", device)
        s, lead = geometry.state, (geometry.num_layers, num_slots)
        self.geometry, self.num_slots, self.null_slots = geometry, num_slots, null_slots
        fill = float("nan") if guarding() else 0.0

        def slots(dtype: str, *rest: int) -> torch.Tensor:
            return torch.full((*lead, *rest), fill, dtype=getattr(torch, dtype), device=device)

        self.state = slots(s.state_dtype, s.num_heads, s.value_dim, s.key_dim)
        self.conv = slots(s.conv_dtype, s.conv_channels, geometry.window)
        self.layers = self._layers()

    @classmethod
    def over(cls, geometry: StateGeometry, state: torch.Tensor, conv: torch.Tensor, null_slots: int) -> StatePool:
        """Return a pool over the tensors of an engine, which owns the memory and the slots. Writes nothing.

        Args:
            geometry: shapes of the layers.
            state, conv: slots of all layers, in the shapes of the attributes and with the strides of `StateCache`.
            null_slots: slots at the start that belong to no request.

        Raises:
            BufferError: a count is out of range. BatchError: a tensor has a wrong form.
        """
        s, slots = geometry.state, state.shape[1]
        check_slot_counts(slots, null_slots)
        shape = (geometry.num_layers, slots, s.num_heads, s.value_dim, s.key_dim)
        device = require_tensor("state", state, shape, getattr(torch, s.state_dtype)).device
        windows = (geometry.num_layers, slots, s.conv_channels, geometry.window)
        require_tensor("conv", conv, windows, getattr(torch, s.conv_dtype), device)
        pool = cls.__new__(cls)
        pool.geometry, pool.num_slots, pool.null_slots = geometry, slots, null_slots
        pool.state, pool.conv = state, conv
        pool.layers = pool._layers()
        return pool

    def _layers(self) -> list[StateCache]:
        pairs = zip(self.state, self.conv, strict=True)
        return [StateCache(state, conv, layer) for layer, (state, conv) in enumerate(pairs)]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slot source[i] to slot target[i] in every layer. Capturable.

        All reads happen before all writes, so the two lists may overlap.

        Args:
            source, target: int64 ``[n]`` slots. Target slots are distinct, except null slots.

        Raises:
            BatchError: a tensor has a wrong form.
        """
        device = self.state.device
        count = (len(source),) if isinstance(source, torch.Tensor) and source.dim() == 1 else (-1,)
        for name, slots in (("source", source), ("target", target)):
            require_tensor(name, slots, count, torch.int64, device)
        for pool in (self.state, self.conv):
            if pool.numel():
                pool.index_copy_(1, target, pool.index_select(1, source))


def check_slot_counts(num_slots: object, null_slots: object) -> None:
    """Require at least one null slot and one slot of a request.

    Raises:
        BufferError: a count is out of range.
    """
    for name, value, least in (("num_slots", num_slots, 2), ("null_slots", null_slots, 1)):
        if type(value) is not int or value < least:
            raise BufferError(f"{name} is {value!r}, but it must be an integer >= {least}; count them for this pool")
    if null_slots >= num_slots:  # type: ignore[operator]
        raise BufferError(
            f"null_slots is {null_slots}, but the pool has {num_slots} slots; add StateGeometry.null_slots to the "
            "slots of the requests"
        )
