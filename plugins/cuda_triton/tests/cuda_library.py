"""Fake libcuda over the launches that `fake_gpu.FakeDriver` records, and the parameters of each launch."""

from __future__ import annotations

import ctypes
import struct
import threading

from draftmark_cuda_triton.launch import cuda_driver
from draftmark_cuda_triton.launch.cuda_driver import Driver

FLOATS = {"fp32": "f", "fp64": "d"}

BYTES = {"i32": 4, "i64": 8, "u32": 4, "u64": 8}


def packed(source, args):
    """Return a launch's parameters: addresses, numbers, descriptors with shape and strides, and two null pointers."""
    found = []
    for kind, value in zip(source.signature.values(), args, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            about = repr((value.base.data_ptr(), value.base.dtype, value.shape, value.strides, value.block_shape))
            found += [about.encode().ljust(128, b"\0")[:128]]
            found += [int(n).to_bytes(4, "little") for n in value.shape]
            found += [int(n).to_bytes(8, "little") for n in value.strides]
        elif kind in FLOATS:
            found.append(struct.pack(f"<{FLOATS[kind]}", value))
        else:
            number = value.data_ptr() if hasattr(value, "data_ptr") else value
            found.append(int(number).to_bytes(8, "little", signed=number < 0)[: BYTES.get(kind, 8)])
    return [*found, bytes(8), bytes(8)]


def reversed_descriptors(params):
    """Return a launch's parameters with the descriptors among them in reverse order."""
    descriptors = iter([one for one in reversed(params) if len(one) > 8])
    return [next(descriptors) if len(one) > 8 else one for one in params]


class Library:
    """Fakes libcuda over the launches that `FakeDriver` records; attributes hold captured and launched kernels.

    Args:
        lacks: names of functions that this driver does not have.
        reverse: the parameters that hold descriptors are in reverse order.
    """

    def __init__(self, gpu, lacks=(), reverse=False):
        self.reverse = reverse
        self.gpu, self.started, self.captures, self._captured, self.capturing = gpu, [], 0, [], False
        self._sizes, self.contexts = {}, {}
        for name in lacks:
            setattr(self, name, None)

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.contexts.get(threading.get_ident())
        return 0

    def cuDeviceGet(self, handle, device):
        handle._obj.value = 20 + device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.contexts[threading.get_ident()] = context.value
        return 0

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = 5
        return 0

    def cuStreamIsCapturing(self, stream, status):
        status._obj.value = self.capturing
        return 0 if threading.get_ident() in self.contexts else 201  # CUDA_ERROR_INVALID_CONTEXT

    def cuStreamBeginCapture_v2(self, stream, mode):
        self._before = len(self.gpu.launched)
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self._captured = self.gpu.launched[self._before :]
        del self.gpu.launched[self._before :]
        self.captures += 1
        graph._obj.value = 6
        return 0

    def cuGraphDestroy(self, graph):
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        count._obj.value = len(self._captured)
        nodes[0] = 7
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, about):
        ((source, given),) = self._captured
        assert given[3] == 5, "launched on the stream that captures"
        params = packed(source, given[9:])
        params = reversed_descriptors(params) if self.reverse else params
        self._params = [ctypes.create_string_buffer(one, len(one)) for one in params]
        self._pointers = (ctypes.c_void_p * len(self._params))(*map(ctypes.addressof, self._params))
        found = about._obj
        self._sizes[id(source)] = [len(one) for one in self._params]
        found.function, found.shared = id(source), 1000
        found.grid, found.block = (ctypes.c_uint * 3)(*given[:3]), (ctypes.c_uint * 3)(128, 1, 1)
        found.params = ctypes.cast(self._pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, number, value):
        return 0

    def cuFuncGetParamInfo(self, function, number, offset, size):
        if number.value >= len(self._params):
            return 1
        size._obj.value = len(self._params[number.value])
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        config = config._obj
        sizes = self._sizes[function.value]
        params = [ctypes.string_at(where, size) for where, size in zip(pointers, sizes, strict=True)]
        attributes = [config.attributes[n].id for n in range(config.num_attributes)]
        self.started.append((function.value, (*config.grid,), (*config.block,), config.shared, attributes, params))
        return 0


def use_library(library, monkeypatch):
    driver = Driver(library)
    monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_BOUND", threading.local())  # no thread has a context of this library
    return library


def launches_of(cache):
    return [one for steps in cache._cache.values() for one in steps.launches]


def triton_calls(gpu, call, *args):
    """Return the kernels, grids and parameters that ``call(*args)`` passes to the driver through Triton's launcher."""
    before = len(gpu.launched)
    call(*args)
    made = gpu.launched[before:]
    del gpu.launched[before:]
    return [(id(source), given[:3], packed(source, given[9:])) for source, given in made]


def driver_calls(library):
    """Return the kernels, grids and parameters of `DriverLaunch` calls since the previous call of this function."""
    started = [(function, grid, params) for function, grid, _, _, _, params in library.started]
    library.started.clear()
    return started
