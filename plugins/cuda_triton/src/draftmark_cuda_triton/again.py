"""What a function launches, launched again for other tensors of the same layout: no fact is worked out twice.

An eager forward of a model makes the same launches once a layer, and all of their numbers come from layouts and sizes.
So they are noted the first time, and a later call fills in the addresses: of parameters that the driver takes as they
are (`native`), or, where the driver does not tell them, of Triton's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_uint64, sizeof
from functools import reduce
from operator import or_
from threading import Lock
from typing import Any, Protocol

import torch
from triton.runtime.driver import driver

from . import native
from .native import DriverError
from .starting import ALIGNED, Launched, noted
from .templates import Template, is_box, moved

MOST_KNOWN = 1024
"""Layouts that are remembered at a time, and addresses of each."""


class Step(Protocol):
    """One launch that was made, without the tensors that it was made for."""

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses."""


class Steps:
    """The launches of one layout.

    Attributes:
        words: the addresses of the tensors for which they are made next.
    """

    def __init__(self, count: int) -> None:
        self.words = (c_uint64 * count)()
        self.launches: list[Step] = []

    def word(self, number: int) -> int:
        """Where a tensor's address is, in the host's memory."""
        return addressof(self.words) + number * sizeof(c_uint64)


class Again:
    """A function's launches, by the layout of its tensors.

    Args:
        names: of the kernels' parameters for the tensors, in the order in which calls give them.
        others: of further parameters that are of one of those tensors too, and its name there.
        rare: most layouts come once. Launches are remembered of those that come a second time, since that costs more
            than a launch does; of a model's layers, which are alike, all are.
    """

    def __init__(self, names: tuple[str, ...], others: Mapping[str, str] | None = None, rare: bool = False) -> None:
        self._number = {name: number for number, name in enumerate(names)}
        self._number |= {other: self._number[name] for other, name in (others or {}).items()}
        self._known: dict[tuple[Any, ...], Steps] = {}
        self._met: set[tuple[Any, ...]] | None = set() if rare else None
        self._templates: dict[tuple[Any, ...], Template | None] = {}
        self._one_at_a_time = Lock()

    def __call__(
        self, layout: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], launch: Callable[..., None], *args: Any
    ) -> None:
        """Do as ``launch(*args, *tensors)`` does.

        Args:
            layout: all that its launches depend on, but for the device and what `tensors` say: sizes, strides, dtypes,
                which of them are None.
            tensors: those whose addresses change from call to call. The first is always there. Whatever else is
                launched with stays where it is.
        """
        first = tensors[0]
        assert first is not None
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        # Triton compiles apart for addresses that are multiples of 16.
        odd = reduce(or_, addresses) % ALIGNED
        which = tuple([address % ALIGNED == 0 for address in addresses]) if odd else None
        device = first.get_device()
        key = (layout, which, device)
        steps = self._known.get(key)
        if steps is None:
            self._first(key, tensors, launch, args)
            return
        stream = driver.active.get_current_stream(device)
        with self._one_at_a_time:
            steps.words[:] = addresses  # type: ignore[assignment]  # whose elements may be words too
            for step in steps.launches:
                step(addresses, stream)

    def _first(
        self,
        key: tuple[Any, ...],
        tensors: tuple[torch.Tensor | None, ...],
        launch: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        device, found = key[-1], native.driver()
        if found is not None and found.is_capturing(driver.active.get_current_stream(device)):
            launch(*args, *tensors)  # in another one's capture nothing else is captured
            return
        if self._is_rare(key):
            launch(*args, *tensors)
            return
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._templates.clear()
        # A grid without programs is no launch to the driver.
        launched = [one for one in noted(launch, *args, *tensors) if all(one[1])]
        steps = Steps(len(tensors))
        steps.launches += [self._step(steps, tensors, device, *one) for one in launched]
        self._known[key] = steps

    def _is_rare(self, key: tuple[Any, ...]) -> bool:
        """Whether a layout was not met before, where most are met once."""
        if self._met is None or key in self._met:
            return False
        if len(self._met) >= MOST_KNOWN:
            self._met.clear()
        self._met.add(key)
        return True

    def _step(
        self,
        steps: Steps,
        tensors: Sequence[torch.Tensor | None],
        device: int,
        compiled: Any,
        grid: Any,
        args: tuple[Any, ...],
    ) -> Step:
        """A launch, and which of its arguments is the address or the descriptor of which tensor."""
        places: list[tuple[int, int]] = []
        for place, (name, value) in enumerate(zip(compiled.src.fn.arg_names, args, strict=True)):
            number = self._number.get(name)
            if isinstance(value, torch.Tensor):
                if number is None or tensors[number] is None:
                    # Another one stands for a tensor that there is not.
                    number = next((i for i, one in enumerate(tensors) if one is value), None)
            elif not is_box(value):
                continue
            if number is not None:
                places.append((place, number))
        template = self._template(device, compiled, grid, args)
        if template is None:
            return Called((compiled, grid, args), places)
        return Direct(template, (compiled, grid, args), places, steps)

    def _template(self, device: int, compiled: Any, grid: Any, args: tuple[Any, ...]) -> Template | None:
        found = native.driver()
        if found is None:
            return None
        key = (compiled, device, *[(tuple(one.shape), tuple(one.strides)) for one in args if is_box(one)])
        if key not in self._templates:
            try:
                self._templates[key] = Template(found, compiled, grid, args, device)
            except DriverError:
                self._templates[key] = None
        return self._templates[key]


class Called:
    """A launch by Triton's own call.

    Args:
        launched: what was launched. places: which argument is the address or the descriptor of which tensor.
    """

    def __init__(self, launched: Launched, places: list[tuple[int, int]]) -> None:
        compiled, grid, args = launched
        self._run, self._args = compiled[grid], list(args)
        for place, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._args[place] = value.data_ptr()
            elif is_box(value):
                self._args[place] = moved(value, value.base.data_ptr())
        self._places = [one for one in places if not is_box(args[one[0]])]
        self._boxes: list[tuple[int, int, dict[int, Any]]] = [
            (place, number, {}) for place, number in places if is_box(args[place])
        ]

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses."""
        given = self._args.copy()
        for place, number in self._places:
            given[place] = addresses[number]
        for place, number, known in self._boxes:
            address = addresses[number]
            if address not in known:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                known[address] = moved(given[place], address)
            given[place] = known[address]
        self._run(*given, stream=stream)


class Direct:
    """A launch by CUDA's driver.

    Args:
        template: of its kernel. launched, places: as of `Called`. steps: whose words it takes.
    """

    def __init__(self, template: Template, launched: Launched, places: list[tuple[int, int]], steps: Steps) -> None:
        _, grid, args = launched
        self._template, self._launch = template, template.launch(grid, args)
        self._pointers, self._config = self._launch.pointers, self._launch.config
        self._start, self._given = self._launch.start, self._launch.given
        self._boxed = [one for one in places if is_box(args[one[0]])]
        for place, number in places:
            if not is_box(args[place]):
                self._pointers[template.param(place)] = steps.word(number)
        self._boxes = [(template.param(place), number, template.known(place)) for place, number in self._boxed]

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch it with tensors at other addresses, which are in the words by now.

        Raises:
            DriverError: the driver refused.
        """
        pointers = self._pointers
        try:
            for param, number, known in self._boxes:
                pointers[param] = known[addresses[number]]
        except KeyError:
            self._template.maps({place: addresses[number] for place, number in self._boxed})
            self(addresses, stream)
            return
        self._config.stream = stream
        code = self._start(*self._given)
        if code:
            raise DriverError(f"cuLaunchKernelEx: CUresult {code}")
