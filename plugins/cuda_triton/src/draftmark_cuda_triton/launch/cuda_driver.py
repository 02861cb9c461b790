"""The calls of the CUDA driver API that capture a kernel launch and repeat it.

Triton's launcher unpacks some forty Python objects a launch and encodes every copy descriptor anew: ten to twenty
microseconds of the host, where the driver takes three. An eager forward pays it three times a layer. A stream that
captures tells what the driver is given by a launch: where each argument goes among the parameters is found out once a
compiled kernel (`parameters`), and later launches are written there. Only CUDA's documented driver API is used. How
Triton packs parameters changes with its releases, and is nothing that is known here.

Source: CUDA Driver API, "Stream Management", "Graph Management", "Execution Control".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

NON_BLOCKING, RELAXED = 1, 2
"""Of a stream that waits for no other; of a capture that forbids its thread nothing."""
COOPERATIVE, CLUSTER, CLUSTER_POLICY, PROGRAMMATIC_DEPENDENT = 2, 4, 5, 6
"""Attributes of launches. The first three are attributes of their nodes; the last, a programmatic dependent, is not."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("num_attributes", c_uint),
    ]  # fmt: skip


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
        ("params", ctypes.POINTER(c_void_p)), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


class DriverError(RuntimeError):
    """CUDA's driver refused a call, or has none of that name."""


@dataclass(frozen=True)
class CapturedLaunch:
    """What the driver was given by one launch.

    Attributes:
        function: of the driver. grid, block: of three. shared: bytes.
        params: of each parameter its bytes.
        attributes: of the launch, but whether it is a programmatic dependent.
    """

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    params: tuple[bytes, ...]
    attributes: tuple[LaunchAttribute, ...]


class Driver:
    """The few calls of CUDA's driver.

    Args:
        library: libcuda, loaded so that its calls keep the interpreter's lock: they are shorter than its handing over.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch_ex = library.cuLaunchKernelEx
        self._streams: dict[int, c_void_p] = {}
        self._lock = Lock()

    def capture(self, launch: Callable[[int], object], device: int) -> CapturedLaunch:
        """Capture one launch, which does not run.

        Args:
            launch: launches one kernel on a stream.

        Raises:
            DriverError: a call failed, or `launch` did something else.
        """
        with self._lock:
            stream, graph = self._stream(device), c_void_p()
            self._call("cuStreamBeginCapture_v2", stream, RELAXED)
            try:
                launch(stream.value or 0)
            except Exception as error:  # a hook of the launcher's own that waits for the device, say
                raise DriverError(f"a launch that is captured fails: {error}") from error
            finally:
                self._call("cuStreamEndCapture", stream, byref(graph))
            try:
                return self._read_node(self._only_node(graph))
            finally:
                self._call("cuGraphDestroy", graph)

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream captures a graph, or may not be asked since another one does."""
        status = c_int()
        return bool(self._code("cuStreamIsCapturing", c_void_p(stream), byref(status)) or status.value)

    def _stream(self, device: int) -> c_void_p:
        if device not in self._streams:
            stream = c_void_p()
            self._call("cuStreamCreate", byref(stream), NON_BLOCKING)
            self._streams[device] = stream
        return self._streams[device]

    def _only_node(self, graph: c_void_p) -> c_void_p:
        count, nodes = c_size_t(2), (c_void_p * 2)()
        self._call("cuGraphGetNodes", graph, nodes, byref(count))
        if count.value != 1:
            raise DriverError(f"a launch of one kernel is {count.value} nodes")
        return c_void_p(nodes[0])

    def _read_node(self, node: c_void_p) -> CapturedLaunch:
        node_params, attributes = KernelNodeParams(), []
        self._call("cuGraphKernelNodeGetParams_v2", node, byref(node_params))
        if not node_params.function or not node_params.params:
            raise DriverError("a node tells neither its function nor its parameters")
        for number in (COOPERATIVE, CLUSTER, CLUSTER_POLICY):
            value = (c_uint * 16)()
            self._call("cuGraphKernelNodeGetAttribute", node, number, byref(value))
            if any(value):
                attributes.append(LaunchAttribute(number, 0, value))
        params = tuple(
            ctypes.string_at(node_params.params[n], size) for n, size in enumerate(self._sizes(node_params.function))
        )
        return CapturedLaunch(
            node_params.function, tuple(node_params.grid), tuple(node_params.block), node_params.shared, params,
            tuple(attributes)
        )  # fmt: skip

    def _sizes(self, function: int) -> list[int]:
        """Bytes of each parameter: asked for one after another, until there is none."""
        found: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while not self._code(
            "cuFuncGetParamInfo", c_void_p(function), c_size_t(len(found)), byref(offset), byref(size)
        ):
            found.append(size.value)
        return found

    def _call(self, name: str, *args: Any) -> None:
        code = self._code(name, *args)
        if code:
            raise DriverError(f"{name}: CUresult {code}")

    def _code(self, name: str, *args: Any) -> int:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name} is not in this driver")
        return int(function(*args))


class PreparedLaunch:
    """A launch to be made again and again, with its parameters in the host's memory.

    Args:
        captured_launch: one that was captured, of which all but the grid and the parameters are taken.
        grid: of three. params: of each parameter its bytes.
        programmatic_dependent: it takes its place while the kernel before it on the stream runs, for whose stores it
            waits itself.

    Attributes:
        pointers: of each parameter where it is in the host's memory; another may be put there.
        config: says on which `stream` the next one is.
        launch_ex, call_args: ``launch_ex(*call_args)`` is the driver's call, whose result is a CUresult.
    """

    def __init__(
        self,
        driver: Driver,
        captured_launch: CapturedLaunch,
        grid: Sequence[int],
        params: Sequence[bytes],
        programmatic_dependent: bool,
    ) -> None:
        self._params = [(c_char * len(one)).from_buffer_copy(one) for one in params]
        self.pointers = (c_void_p * len(params))(*map(ctypes.addressof, self._params))
        attributes = [
            *captured_launch.attributes,
            *([LaunchAttribute(PROGRAMMATIC_DEPENDENT, 0, (c_uint * 16)(1))] if programmatic_dependent else ()),
        ]
        self._attributes = (LaunchAttribute * max(1, len(attributes)))(*attributes)
        self.config = LaunchConfig(
            (c_uint * 3)(*grid), (c_uint * 3)(*captured_launch.block), captured_launch.shared, None, self._attributes,
            len(attributes)
        )  # fmt: skip
        self.launch_ex, self.call_args = (
            driver.launch_ex,
            (byref(self.config), c_void_p(captured_launch.function), self.pointers, None),
        )


@lru_cache(1)
def driver() -> Driver | None:
    """CUDA's, or None where there is none."""
    try:
        return Driver(ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
