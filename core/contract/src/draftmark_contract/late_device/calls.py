"""Handles the Python-level torch calls on a late device that never reach torch's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftmark.graphs.active import LATE
from draftmark_reference.graphs.operators import tensors_in
from draftmark_reference.graphs.rules import is_judged, refused_call

from .residency import Place
from .work import DeviceWork


class LateCalls(TorchFunctionMode):
    """Tracks the device of new tensors (argument ``device=``), and host reads that dispatch no operator."""

    def __init__(self, device: DeviceWork) -> None:
        super().__init__()
        self._device = device
        self._places = device.places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if LATE.get() is not self._device:
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu):
            return self._to(func, args, kwargs)
        if args and isinstance(args[0], Tensor) and "device" not in kwargs and not is_judged(func):
            return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        sentence, tensors = refused_call(func, args, kwargs), tensors_in((args, kwargs))
        if sentence and (not tensors or any(self._places.of(one) is Place.DEVICE for one in tensors)):
            self._device.wait(sentence.partition(" cannot be captured")[0])
        result = func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and not _is_host(device):
            self._device.owns(tensors_in(result))
        elif not tensors:
            self._on_host(result)
        return result

    def _to(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handle `Tensor.to` and `Tensor.cpu`. A CPU returns the same tensor here, but a real device would copy it."""
        tensor, place = args[0], self._places.of(args[0])
        given = [*args[1:], *kwargs.values()]
        target: Any = "cpu" if func is Tensor.cpu else None
        target = next((one for one in given if isinstance(one, (str, torch.device))), target)
        if target is None or place is Place.UNKNOWN or (place is Place.DEVICE) is not _is_host(target):
            return func(*args, **kwargs)
        dtype = next((one for one in given if isinstance(one, torch.dtype)), tensor.dtype)
        made = torch.empty(tensor.shape, dtype=dtype)
        if _is_host(target):
            self._on_host(made)
        else:
            self._device.owns([made])
        non_blocking = kwargs.get("non_blocking", next((one for one in args[1:] if isinstance(one, bool)), False))
        return made.copy_(tensor, non_blocking=non_blocking)

    def _on_host(self, result: Any) -> None:
        for tensor in tensors_in(result):
            self._places.on_host(tensor)


def _is_host(device: object) -> bool:
    """Return True only for the string "cpu". A torch.device does not count: here q.device is the CPU too."""
    return isinstance(device, str) and device == "cpu"
