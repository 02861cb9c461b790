"""`cuda_driver` and `parameters`: direct driver launches pass the parameters that Triton's launcher passes."""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from dataclasses import replace

import pytest

from draftmark import BackendError, Mode
from draftmark.runtime import KVCache
from draftmark_cuda_triton import kv_write, switches
from draftmark_cuda_triton.launch import cuda_driver, parameters
from draftmark_cuda_triton.launch.cuda_driver import Driver, DriverError
from draftmark_cuda_triton.launch.relaunch import DriverLaunch, TritonLaunch
from draftmark_cuda_triton.prefill_fp8 import PrefillFp8

pytestmark = pytest.mark.usefixtures("without_machine_code")
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


@pytest.fixture
def library(fake_gpu, monkeypatch):
    """Fake libcuda in place of CUDA's driver."""
    return use_library(Library(fake_gpu), monkeypatch)


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


def test_driver_receives_what_triton_passes(library, layer_calls, without_relaunch):
    """Each recorded attention launch passes the parameters of a new Triton launch, for every kind of layer."""
    layers, calls = layer_calls
    count = 0
    for one in calls:
        with without_relaunch():
            wanted = triton_calls(library.gpu, layers.attention.attend, *one)
        launched, started = triton_calls(library.gpu, layers.attention.attend, *one), driver_calls(library)
        # PrefillFp8 records its upcast launch and its attention launch separately. Possibly only one of them goes
        # through the driver.
        if isinstance(layers.attention, PrefillFp8):
            assert wanted and wanted in (launched + started, started + launched)
        else:
            assert wanted and (launched or started) == wanted
        count += bool(started)
    assert count > 15
    attention = layers.attention
    parts = (
        [one for part in attention._head_groups.values() for one in (part, part.prefill)]
        if isinstance(attention, PrefillFp8)
        else []
    )
    remembered = [one._relaunch for one in parts or [attention]]
    assert all(isinstance(step, DriverLaunch) for one in remembered for step in launches_of(one))


def test_pdl_kernels_launch_as_programmatic_dependents(library, decode_calls, make_layers):
    """Kernels with PDL are launched with the programmatic dependent attribute, and other kernels without it.

    KV write, decode attention, combine and splittable EXTEND use PDL; unsplit EXTEND does not.
    """
    layers, calls = decode_calls
    for one in calls[:12]:
        layers.attention.attend(*one)
    assert library.started and all(
        attributes == [cuda_driver.PROGRAMMATIC_DEPENDENT] for *_, attributes, _ in library.started
    )
    library.started.clear()
    chance = random.Random(5)
    cache, (k, v, slots) = layers.layer(chance), layers.new_rows(3, chance)
    for _ in range(2):
        kv_write.write_kv(k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots)
    assert library.started and all(
        attributes == [cuda_driver.PROGRAMMATIC_DEPENDENT] for *_, attributes, _ in library.started
    )
    library.started.clear()
    for page, expected in ((16, [cuda_driver.PROGRAMMATIC_DEPENDENT]), (1, [])):
        library.started.clear()
        extends = make_layers(Mode.EXTEND, page)
        batch, cache = extends.batch(chance), extends.layer(chance)
        q, out = extends.rows(batch, chance)
        for _ in range(2):
            extends.attention.attend(q, cache, batch, out)
        assert library.started and all(attributes == expected for *_, attributes, _ in library.started)


def test_one_capture_serves_every_batch_size(library, make_layers):
    """A kernel is captured once: launches with new batch sizes or known descriptors need no further capture."""
    chance, layers = random.Random(3), make_layers(Mode.RAGGED_VERIFY, 64)
    batches, cache = [layers.batch(chance) for _ in range(6)], layers.layer(chance)
    known = 0
    for calls in (batches[:3], batches):
        known = len(layers.attention._relaunch._templates)
        for batch in calls:
            q, out = layers.rows(batch, chance)
            layers.attention.attend(q, cache, batch, out)
    templates_made = layers.attention._relaunch._templates
    assert len(templates_made) - known <= 4
    descriptors = [len(one._descriptor_params) for one in templates_made.values()]
    # A template takes two captures and one for each descriptor. A kernel with descriptors is captured to encode them.
    assert library.captures <= 2 * len(templates_made) + sum(descriptors) + sum(map(bool, descriptors))


@pytest.mark.parametrize("reverse", [False, True])
def test_descriptors_are_found_in_any_order(fake_gpu, make_layers, without_relaunch, monkeypatch, reverse):
    """Each descriptor reaches its own parameter, whatever the order in which Triton passes descriptors."""
    library = use_library(Library(fake_gpu, reverse=reverse), monkeypatch)
    chance, layers = random.Random(2), make_layers(Mode.VERIFY, 16)
    batch, tensors = layers.batch(chance), [make_layers.new_tensor(4, 16, 2, 128) for _ in range(4)]
    q, out = layers.rows(batch, chance)
    for k, v in ((0, 1), (1, 0), (2, 1), (0, 1), (3, 2)):
        one = q, KVCache(tensors[k], tensors[v]), batch, out
        with without_relaunch():
            wanted = triton_calls(library.gpu, layers.attention.attend, *one)
        if reverse:
            wanted = [(*launch, reversed_descriptors(params)) for *launch, params in wanted]
        assert not triton_calls(library.gpu, layers.attention.attend, *one) or not library.started
        found = driver_calls(library)
        assert not found or found == wanted
    assert found


def test_repeated_descriptors_take_no_memory(library, make_layers):
    """A descriptor of K that is known stays, when only V moves to another address."""
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    batch, k = layers.batch(chance), make_layers.new_tensor(4, 16, 2, 128)
    q, out = layers.rows(batch, chance)
    values = [make_layers.new_tensor(4, 16, 2, 128) for _ in range(6)]
    for v in values:
        layers.attention.attend(q, KVCache(k, v), batch, out)
    (template,) = [one for one in layers.attention._relaunch._templates.values() if one._descriptor_params]
    counts = [len(one) for one in template._buffers.values()]
    assert sorted(counts) == [1, 1, 5, 5]  # two descriptors each of K and V; the first call launches through Triton


@pytest.mark.parametrize("lacks", ["cuFuncGetParamInfo", "cuGraphKernelNodeGetParams_v2"])
def test_old_driver_falls_back_to_triton_launch(fake_gpu, decode_calls, monkeypatch, lacks):
    """Without a required driver function every launch goes through Triton's launcher."""
    use_library(Library(fake_gpu, [lacks]), monkeypatch)
    layers, calls = decode_calls
    for one in calls:
        assert triton_calls(fake_gpu, layers.attention.attend, *one)
    assert all(isinstance(step, TritonLaunch) for step in launches_of(layers.attention._relaunch))


def test_rejected_template_is_logged(fake_gpu, decode_calls, monkeypatch, caplog):
    """A kernel that the driver cannot launch is named once at WARNING, with the reason."""
    use_library(Library(fake_gpu, ["cuFuncGetParamInfo"]), monkeypatch)
    layers, calls = decode_calls
    for one in calls:
        layers.attention.attend(*one)
    warned = [one for one in caplog.records if one.levelname == "WARNING"]
    assert {one.name for one in warned} == {"draftmark_cuda_triton"}
    assert all("Triton's launcher" in one.message and "cuFuncGetParamInfo" in one.message for one in warned)
    assert len(warned) == len(layers.attention._relaunch._templates)


def test_launch_switch_selects_the_launcher(library, decode_calls, monkeypatch, read_switches):
    """DRAFTMARK_TRITON_LAUNCH=triton passes every launch to Triton; driver raises if a kernel cannot be launched."""
    layers, calls = decode_calls
    monkeypatch.setenv("DRAFTMARK_TRITON_LAUNCH", "triton")
    assert all(triton_calls(library.gpu, layers.attention.attend, *one) for one in calls) and not library.started
    monkeypatch.setenv("DRAFTMARK_TRITON_LAUNCH", "driver")
    read_switches()
    use_library(Library(library.gpu, ["cuFuncGetParamInfo"]), monkeypatch)
    with pytest.raises(DriverError, match="cuFuncGetParamInfo"):
        layers.attention.attend(*calls[0])
    monkeypatch.setattr(cuda_driver, "driver", lambda: None)
    with pytest.raises(BackendError, match="DRAFTMARK_TRITON_LAUNCH is driver, but there is no libcuda"):
        layers.attention.attend(*calls[0])


def test_untested_triton_launches_through_triton(library, decode_calls, monkeypatch, read_switches, caplog):
    """A Triton newer than the newest tested one launches every kernel itself, which is logged once."""
    layers, calls = decode_calls
    monkeypatch.setattr(switches, "NEWEST_TRITON", (3, 5))
    assert all(triton_calls(library.gpu, layers.attention.attend, *one) for one in calls) and not library.started
    assert [one.levelname for one in caplog.records] == ["WARNING"] and "newest tested" in caplog.text


def test_driver_error_is_raised(library, decode_calls, monkeypatch):
    """A failed cuLaunchKernelEx raises DriverError with the driver's code."""
    layers, calls = decode_calls
    monkeypatch.setattr(cuda_driver.driver(), "launch_ex", lambda *_: 700)
    with pytest.raises(DriverError, match="cuLaunchKernelEx: CUresult 700"):
        for one in calls:
            layers.attention.attend(*one)


def test_launch_failure_in_capture_is_a_driver_error(library):
    """A launch that fails during capture raises DriverError and ends the capture."""

    def fails(stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(DriverError, match="not permitted"):
        Driver(library).capture(fails, 0)
    assert library.captures == 1


def test_nothing_is_recorded_during_graph_capture(library, make_layers):
    """During graph capture Triton launches the kernel; recording starts with the first eager call after capture."""
    library.capturing = True
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        assert triton_calls(library.gpu, layers.attention.attend, q, cache, batch, out)
    assert not layers.attention._relaunch._cache
    library.capturing = False
    for _ in range(2):
        layers.attention.attend(q, cache, batch, out)
    assert library.started


def test_empty_grid_is_not_launched(library, make_layers):
    """A grid without programs is skipped, since the driver rejects it and Triton does not launch it."""
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    cache, (k, v, slots) = layers.layer(chance), layers.new_rows(0, chance)
    for _ in range(3):
        kv_write.write_kv(k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots)
    assert not library.started


def test_evicted_descriptors_are_encoded_again(library, make_layers, without_relaunch, monkeypatch):
    """A full descriptor cache is cleared, and later launches encode the descriptors of K and V again."""
    monkeypatch.setattr(parameters, "MAX_DESCRIPTORS", 2)
    chance, layers = random.Random(2), make_layers(Mode.VERIFY, 16, sinks=True)
    batch, made = layers.batch(chance), [make_layers.new_tensor(4, 16, 2, 128) for _ in range(5)]
    q, out = layers.rows(batch, chance)
    calls = [KVCache(*chance.sample(made, 2)) for _ in range(30)]
    sinks = layers.layer(chance).sinks
    for cache in calls:
        one = q, replace(cache, sinks=sinks), batch, out
        with without_relaunch():
            wanted = triton_calls(library.gpu, layers.attention.attend, *one)
        assert (triton_calls(library.gpu, layers.attention.attend, *one) or driver_calls(library)) == wanted


def test_each_thread_gets_a_context_before_its_first_launch(library):
    """A thread without a CUDA context gets the device's primary one; a thread with a context keeps it."""
    own = {}

    def launch(context):
        own[context] = threading.get_ident()
        if context:
            library.contexts[own[context]] = context
        for _ in range(2):
            cuda_driver.bind_context(1)

    for context in (None, 7):
        one = threading.Thread(target=launch, args=(context,))
        one.start()
        one.join()
        assert library.contexts[own[context]] == (context or 121)
        library.contexts.clear()


def test_the_first_use_on_a_new_thread_is_recorded(library, make_layers):
    """A thread without a CUDA context gets one before the query whether its stream captures a graph."""
    chance, layers = random.Random(5), make_layers(Mode.DECODE, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    thread = threading.Thread(target=layers.attention.attend, args=(q, cache, batch, out))
    thread.start()
    thread.join()
    assert launches_of(layers.attention._relaunch) and library.captures


def test_kv_write_launches_through_the_driver(library, make_layers):
    """A recorded write_kv launch passes the parameters of a new launch, also for slices of one QKV projection."""
    chance, layers = random.Random(5), make_layers(Mode.DECODE, 16)
    cache = layers.layer(chance)
    for count in (3, 3, 16, 3):
        k, v, slots = layers.new_rows(count, chance)
        calls = k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots
        wanted = triton_calls(library.gpu, kv_write.launch_write_kv, *calls)
        launched, started = triton_calls(library.gpu, kv_write.write_kv, *calls), driver_calls(library)
        assert (launched or started) == wanted
    assert started
