"""Calls of the CUDA driver API that capture a kernel launch and repeat it.

In each launch Triton's launcher unpacks about forty Python objects and encodes every TMA descriptor. That takes 10 to
20 µs of host time, compared with 3 µs in the driver. An eager forward launches three kernels a layer. If a launch is
captured in a CUDA graph, the graph node contains the launch's parameters. `parameters` finds each argument among them
once for each compiled kernel, and later launches only overwrite those bytes. Only CUDA's documented driver API is used,
without knowledge of Triton's parameter packing, which changes between releases.

Source: CUDA Driver API, "Stream Management", "Graph Management", "Execution Control".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock, local
from typing import Any

from ..switches import logger

_BOUND = local()
NON_BLOCKING, RELAXED = 1, 2
"""CU_STREAM_NON_BLOCKING: no implicit synchronization. CU_STREAM_CAPTURE_MODE_RELAXED: no call is prohibited."""
COOPERATIVE, CLUSTER, CLUSTER_POLICY, PROGRAMMATIC_DEPENDENT = 2, 4, 5, 6
"""Launch attribute ids. A graph node reports the first three, but not the programmatic dependent launch."""


class LaunchAttribute(ctypes.Structure):
    """Mirrors the driver API's struct CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """Mirrors the driver API's struct CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("num_attributes", c_uint),
    ]  # fmt: skip


class KernelNodeParams(ctypes.Structure):
    """Mirrors the driver API's struct CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
        ("params", ctypes.POINTER(c_void_p)), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


class DriverError(RuntimeError):
    """Raised if the CUDA driver rejects a call or lacks a function."""


@dataclass(frozen=True)
class CapturedLaunch:
    """Holds the function, the configuration and the parameters of one captured kernel launch.

    Attributes:
        function: handle of the driver (CUfunction).
        grid, block: extents in x, y and z.
        shared: dynamic shared memory in bytes.
        params: bytes of each parameter.
        attributes: launch attributes, except programmatic dependent launch.
    """

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    params: tuple[bytes, ...]
    attributes: tuple[LaunchAttribute, ...]


class Driver:
    """Holds the CUDA driver functions that launches need.

    Args:
        library: libcuda as a `ctypes.PyDLL`, which holds the GIL during calls, because releasing it takes longer than a
            call.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch_ex = library.cuLaunchKernelEx
        self._streams: dict[int, c_void_p] = {}
        self._lock = Lock()

    def capture(self, launch: Callable[[int], object], device: int) -> CapturedLaunch:
        """Capture one kernel launch without running it.

        Args:
            launch: launches exactly one kernel on the given stream.
            device: index of the current device.

        Raises:
            DriverError: a driver call failed, or `launch` did not launch exactly one kernel.
        """
        with self._lock:
            stream, graph = self._stream(device), c_void_p()
            self._call("cuStreamBeginCapture_v2", stream, RELAXED)
            try:
                launch(stream.value or 0)
            except Exception as error:  # for example from a launch hook that synchronizes
                raise DriverError(f"the captured launch failed: {error}") from error
            finally:
                self._call("cuStreamEndCapture", stream, byref(graph))
            try:
                return self._read_node(self._only_node(graph))
            finally:
                self._call("cuGraphDestroy", graph)

    def bind_context(self, device: int) -> None:
        """Make the device's primary context current on this thread, unless a context is.

        Raises:
            DriverError: a driver call failed.
        """
        context, handle = c_void_p(), c_int()
        self._call("cuCtxGetCurrent", byref(context))
        if context.value is None:
            self._call("cuDeviceGet", byref(handle), device)
            # Never released: the context lives as long as the process, because torch retains it too.
            self._call("cuDevicePrimaryCtxRetain", byref(context), handle)
            self._call("cuCtxSetCurrent", context)

    def is_capturing(self, stream: int) -> bool:
        """Check whether a stream captures a graph; also True if another capture makes the driver reject the query."""
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
            raise DriverError(f"the captured graph has {count.value} nodes instead of one kernel")
        return c_void_p(nodes[0])

    def _read_node(self, node: c_void_p) -> CapturedLaunch:
        node_params, attributes = KernelNodeParams(), []
        self._call("cuGraphKernelNodeGetParams_v2", node, byref(node_params))
        if not node_params.function or not node_params.params:
            raise DriverError("the captured kernel node has no function or no parameters")
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
        """Return the size of each parameter in bytes, queried by index until the driver reports an error."""
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
            raise DriverError(f"this CUDA driver has no function {name}")
        return int(function(*args))


class PreparedLaunch:
    """Holds a kernel launch with its parameters in host memory, for repeated calls of cuLaunchKernelEx.

    Args:
        captured_launch: supplies the function, the block, shared memory and attributes.
        grid: extents in x, y and z.
        params: bytes of each parameter.
        programmatic_dependent: the grid starts while the previous kernel of the stream runs, and waits for its stores.

    Attributes:
        pointers: host address of each parameter; callers can replace entries.
        config: CUlaunchConfig; set `stream` before each call.
        grid: the grid of `config`; callers can replace its entries.
        launch_ex, call_args: ``launch_ex(*call_args)`` launches the kernel and returns a CUresult.
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
        self.grid = self.config.grid
        self.launch_ex, self.call_args = (
            driver.launch_ex,
            (byref(self.config), c_void_p(captured_launch.function), self.pointers, None),
        )


def bind_context(device: int) -> None:
    """Give this thread a CUDA context before its first launch: it has none until it calls CUDA's runtime."""
    if not getattr(_BOUND, "done", False):
        found = driver()
        if found is not None:
            found.bind_context(device)
        _BOUND.done = True


@lru_cache(1)
def driver() -> Driver | None:
    """Return the CUDA driver; without a usable libcuda log a warning and return None."""
    try:
        return Driver(ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        logger.warning("kernels are launched through Triton's launcher, which takes 10 to 20 µs longer: %s", error)
        return None
