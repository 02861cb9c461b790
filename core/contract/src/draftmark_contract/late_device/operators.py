"""Handles each dispatched operator on a late device: runs it at once, runs it after a wait, or queues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftmark.graphs.active import LATE
from draftmark_reference.graphs.operators import is_composite, is_host_only, tensors_in, written_operands
from draftmark_reference.graphs.rules import waits_for_the_device
from draftmark_reference.graphs.tape import delivery

from .residency import Place
from .unwritten import unwritten
from .work import DeviceWork

aten = torch.ops.aten


class LateOperators(TorchDispatchMode):
    """Intercepts every operator that reaches torch's dispatcher, and decides whether it is queued."""

    def __init__(self, device: DeviceWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._places = device.places

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no code is compiled here, and dynamo's wrapper takes seconds to import and slows operators."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if LATE.get() is not self._device:
            return func(*args, **kwargs)
        if is_composite(func):
            # inference_mode does not split composite operators, so this mode would miss operators inside them, e.g. an
            # .item().
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func.overloadpacket is aten.copy_:
            return self._copy(func, *args, **kwargs)
        return self._operator(func, args, kwargs)

    def _operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operands = tensors_in((args, kwargs))
        if not any(self._places.of(one) is Place.DEVICE for one in operands) or func.is_view:
            return func(*args, **kwargs)
        waits = waits_for_the_device(func, args, kwargs)
        if waits:
            self._device.wait(str(func))
        if waits or is_host_only(func) or not _has_effect(func):
            result = func(*args, **kwargs)
            self._device.owns(tensors_in(result))
            return result
        return self._send(func, args, kwargs)

    def _send(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue an operator and return its result, which holds poison until the operator has run."""
        result, written = unwritten(func, args, kwargs), written_operands(func, args, kwargs)
        self._device.owns([*written, *tensors_in(result)])
        (args, kwargs), pinned = self._device.operands((list(args), dict(kwargs)))
        mine = {id(one) for one in written}
        leaves = [result] if isinstance(result, Tensor) else tree_leaves(result)
        deliver = delivery([None if id(one) in mine else one for one in leaves])
        call = partial(func, *args, **kwargs)
        self._device.send(str(func), call if deliver is None else lambda: deliver(call()), pinned)
        return result

    def _copy(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        """Handle ``target.copy_(source)`` by direction: on the device, to the device, to the host, or on the host."""
        to, of = self._places.of(target), self._places.of(source)
        # If one end of an asynchronous copy is pinned memory, an end of unknown kind must be device memory.
        down = of is Place.DEVICE or (of is Place.UNKNOWN and to is Place.PINNED and non_blocking)
        up = to is Place.DEVICE or (to is Place.UNKNOWN and of is Place.PINNED and non_blocking)
        if not up and not down:
            return func(target, source, non_blocking)
        if up and (down or source.dim() == 0):  # A scalar source becomes a kernel argument, which is read at launch.
            return self._send(func, (target, source, non_blocking), {})
        if not non_blocking and Place.UNKNOWN not in (to, of):
            self._device.wait(f"{func} between host and device")
            return func(target, source, non_blocking)
        if up:
            self._send_up(target, source, non_blocking)
        else:
            self._send_down(target, source, non_blocking)
        return target

    def _send_up(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Queue a copy to the device without a wait. A copy that would block takes the source's current values."""
        self._device.owns([target])
        late = non_blocking and not self._places.is_pageable(source)
        self._send_copy(target, source if late else source.clone())

    def _send_down(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Copy to the host. A blocking copy to memory of unknown kind is treated as a copy within the device."""
        if self._places.of(target) is Place.UNKNOWN:
            (self._places.landing if non_blocking else self._places.on_device)(target)
        self._device.owns([source])
        self._send_copy(target, source)

    def _send_copy(self, target: Tensor, source: Tensor) -> None:
        pair = [target.detach(), source.detach()]
        pinned = [one for one in pair if self._places.of(one) is Place.PINNED]
        self._device.send("copy_", partial(pair[0].copy_, pair[1]), pinned)


@cache
def _has_effect(func: Any) -> bool:
    """Return True if the operator returns or writes a tensor. Operators without a result count too, e.g. assertions."""
    returns = func._schema.returns
    return not returns or any("Tensor" in str(one.type) for one in returns)
