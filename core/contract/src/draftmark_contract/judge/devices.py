"""Devices on which a backend is judged: name, synchronization, and graphs if the device has them.

The judge uses a device only through `Device`. A device type without a class here runs too, without graphs, if torch has
it. A distribution adds a class by an entry point of the group `GROUP`, named after torch's device type::

    [project.entry-points."draftmark.judge_devices"]
    mydev = "my_package.judge:MyDevice"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, ClassVar

from draftmark.errors import DraftmarkError

GROUP = "draftmark.judge_devices"
Run = Callable[[], Any]
"""Function that enqueues work on the device and returns its output tensor."""


class Device:
    """One device. Subclasses set the class attributes, and override methods where torch's names differ.

    Attributes:
        device: torch device, e.g. ``"cuda:1"``.
        modules: modules to import before torch has the device type.
        graph: name of the graph class in torch's module of the device type; "" if there are no graphs. The context
            manager that records has the name ``graph``, as in `torch.cuda`.
        host: True if the device is the CPU itself: products of float32 are exact there, sizes are small, and captured
            metadata stands for a graph.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    graph: ClassVar[str] = ""
    host: ClassVar[bool] = False

    def __init__(self, device: str) -> None:
        self.device = device
        self.kind = device.partition(":")[0]

    def open(self) -> None:
        """Import the vendor's modules and check that torch has the device.

        Raises:
            DraftmarkError: a module is missing, or torch has no such device.
        """
        for module in self.modules:
            try:
                importlib.import_module(module)
            except (ImportError, OSError) as error:
                raise DraftmarkError(
                    f"device {self.device} needs {module}, which cannot be imported: {error}"
                ) from error
        if not self._present():
            raise DraftmarkError(f"torch sees no {self.kind} device here; run on a machine that has one")

    @property
    def name(self) -> str:
        """Name of the device, as a verdict lists it."""
        named = getattr(self._module, "get_device_name", None)
        return str(named(self.device)) if named is not None else self.device

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        self._module.synchronize()

    @property
    def captures(self) -> bool:
        """True if the device has graphs."""
        return bool(self.graph) and hasattr(self._module, self.graph)

    def warm_up(self, run: Run) -> None:
        """Run once on a side stream, as engines do before they record a graph."""
        module = self._module
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            run()
        module.current_stream().wait_stream(stream)

    def record(self, run: Run) -> tuple[Any, Any]:
        """Record a graph; return it (with a method `replay`) and the output tensor that each replay fills."""
        graph = getattr(self._module, self.graph)()
        with self._module.graph(graph):
            out = run()
        return graph, out

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.kind)

    def _present(self) -> bool:
        try:
            return bool(self._module.is_available())
        except (RuntimeError, AttributeError):  # torch has no device type of this name
            return False


class Cpu(Device):
    """The CPU."""

    host = True

    @property
    def name(self) -> str:
        """The word "cpu": the verdict has the processor elsewhere."""
        return "cpu"


class Cuda(Device):
    """A GPU of NVIDIA, or of AMD with a ROCm build of torch."""

    graph = "CUDAGraph"


class Npu(Device):
    """An Ascend NPU."""

    modules, graph = ("torch_npu",), "NPUGraph"


class Xpu(Device):
    """A GPU of Intel."""

    graph = "XPUGraph"


class Hpu(Device):
    """A Gaudi accelerator."""

    modules, graph = ("habana_frameworks.torch.hpu",), "HPUGraph"


class Mps(Device):
    """A GPU of Apple. It has no graphs."""


BUILT_IN: dict[str, type[Device]] = {"cpu": Cpu, "cuda": Cuda, "npu": Npu, "xpu": Xpu, "hpu": Hpu, "mps": Mps}
"""Classes of this module by torch's device type."""


def device_of(device: str) -> Device:
    """Return the device with this torch name. A class of an entry point replaces one of `BUILT_IN`.

    Raises:
        DraftmarkError: an entry point's class cannot be imported.
    """
    kind = device.partition(":")[0]
    for entry in entry_points(group=GROUP, name=kind):
        try:
            made: Device = entry.load()(device)
        except Exception as error:
            raise DraftmarkError(
                f"device {device}: importing {entry.value} raised {type(error).__name__}: {error}"
            ) from error
        return made
    return BUILT_IN.get(kind, Device)(device)
