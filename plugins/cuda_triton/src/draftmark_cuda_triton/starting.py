"""Starting a kernel at the cost of a driver's launch.

Triton's own call binds and describes every argument anew, and each of ours has forty. A graph's replay does not pay
that; an eager forward of few rows waits for it, once a launch and layer. What Triton compiles for can be read off the
arguments, so a launch that is like an earlier one in all of that starts the same compiled kernel at once (`start`).
Where a caller can say what all of a launch's numbers come from, they are not worked out again either (`Again`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ALIGNED = 16
"""Addresses and integers that are multiples of it are compiled for apart."""
INT32 = 2**31
MOST_KNOWN = 1024
"""Layouts, and addresses of each, that are remembered at a time."""

_Started = tuple[JITFunction[Any], Any, tuple[Any, ...]]
_STARTED: dict[tuple[Any, ...], _Started] = {}
_SPECIALIZED: dict[int, tuple[bool, ...]] = {}
_Launched = tuple[Any, tuple[int, ...], tuple[Any, ...]]
_NOTED: ContextVar[list[_Launched] | None] = ContextVar("draftmark_noted_launches", default=None)


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` as ``kernel[grid](*args, **constants)`` does.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`; of Triton's interpreter, it is called as it is.
        args: its first arguments, none of them a constant: tensors, descriptors, numbers, None.
        constants: all others, and the compiler's options.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*args, **constants)
        return
    specialized = _SPECIALIZED.get(id(kernel)) or _specialized(kernel)
    facts = [_fact(value, exactly) for value, exactly in zip(args, specialized, strict=False)]
    key = (id(kernel), driver.active.get_current_device(), *facts, *constants.items())
    found = _STARTED.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        last = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _STARTED[key] = kernel, compiled, last
    else:
        _, compiled, last = found
        compiled[(*grid, 1, 1)[:3]](*args, *last)
    noted = _NOTED.get()
    if noted is not None:
        noted.append((compiled, grid, (*args, *last)))


def _specialized(kernel: JITFunction[Any]) -> tuple[bool, ...]:
    """Of each parameter, whether Triton compiles for what kind of integer it is."""
    return _SPECIALIZED.setdefault(id(kernel), tuple(not one.do_not_specialize for one in kernel.params))


def _fact(value: Any, specialized: bool) -> Any:
    """All that Triton may compile for of an argument."""
    kind = type(value)
    if kind is int:
        narrow = -INT32 <= value < INT32
        return (narrow, value == 1, value % ALIGNED == 0) if specialized else narrow
    if value is None or kind is float:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    # A descriptor: how it is copied is in its box, its dtype and, of Gluon's, its layout in shared memory.
    return value.base.dtype, *value.block_shape, getattr(value, "layout", None)


class Step(NamedTuple):
    """One launch that was made, without the tensors that it was made for.

    Attributes:
        run: starts the compiled kernel over its grid, with all arguments.
        args: its arguments; tensors as addresses.
        places: which argument is the address of which tensor.
        boxes: which argument is a descriptor of which tensor, and its descriptors by address.
    """

    run: Callable[..., None]
    args: list[Any]
    places: tuple[tuple[int, int], ...]
    boxes: tuple[tuple[int, int, dict[int, Any]], ...]


@dataclass(frozen=True)
class Address:
    """What a descriptor says of its tensor: it must not keep the memory of another step or layer alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As of the tensor."""
        return self.address


class Again:
    """What a function launches, launched again for other tensors of the same layout: no fact is worked out twice.

    An eager forward of a model makes the same launches once a layer, and all of their numbers come from layouts and
    sizes. So they are noted the first time, and a later call fills in the addresses.

    Args:
        names: of the kernels' parameters for the tensors, in the order in which calls give them.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._number = {name: number for number, name in enumerate(names)}
        self._known: dict[tuple[Any, ...], list[Step]] = {}

    def __call__(
        self, layout: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], launch: Callable[..., None], *args: Any
    ) -> None:
        """Do as ``launch(*args)`` does.

        Args:
            layout: all that its launches depend on, but for the device and what `tensors` say: sizes, strides, dtypes.
            tensors: those of `args` whose addresses change from call to call, None where there is none; calls in which
                others are there are not alike. All other tensors stay where they are.
        """
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        odd = 0
        for address in addresses:
            odd |= address
        # Triton compiles apart for addresses that are multiples of 16.
        which = tuple([address % ALIGNED == 0 for address in addresses]) if odd % ALIGNED else None
        device = driver.active.get_current_device()
        key = (layout, tuple([one is None for one in tensors]), which, device)
        steps = self._known.get(key)
        if not steps:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._note(tensors, launch, args)
            return
        stream = driver.active.get_current_stream(device)
        for run, template, places, boxes in steps:
            given = template.copy()
            for place, number in places:
                given[place] = addresses[number]
            for place, number, known in boxes:
                address = addresses[number]
                given[place] = known.get(address) or _moved(template[place], address, known)
            run(*given, stream=stream)

    def _note(
        self, tensors: tuple[torch.Tensor | None, ...], launch: Callable[..., None], args: tuple[Any, ...]
    ) -> list[Step]:
        noted: list[_Launched] = []
        token = _NOTED.set(noted)
        try:
            launch(*args)
        finally:
            _NOTED.reset(token)
        return [self._step(tensors, *one) for one in noted]

    def _step(
        self, tensors: tuple[torch.Tensor | None, ...], compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...]
    ) -> Step:
        given = list(args)
        places: list[tuple[int, int]] = []
        boxes: list[tuple[int, int, dict[int, Any]]] = []
        for place, (name, value) in enumerate(zip(compiled.src.fn.arg_names, args, strict=True)):
            number = self._number.get(name)
            if isinstance(value, torch.Tensor):
                if number is None or tensors[number] is None:
                    # Another one stands for a tensor that there is not.
                    number = next((i for i, one in enumerate(tensors) if one is value), None)
                given[place] = value.data_ptr()
                if number is not None:
                    places.append((place, number))
            elif hasattr(value, "block_shape") and number is not None:
                given[place] = _moved(value, value.base.data_ptr(), {})
                boxes.append((place, number, {}))
        return Step(compiled[(*grid, 1, 1)[:3]], given, tuple(places), tuple(boxes))


def _moved(descriptor: Any, address: int, known: dict[int, Any]) -> Any:
    """The descriptor of a tensor at `address`, like that of another."""
    found = copy(descriptor)
    found.base = Address(address, descriptor.base.dtype)
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[address] = found
    return found
