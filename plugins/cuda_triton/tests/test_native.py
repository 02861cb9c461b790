"""`native`, `templates`: what the driver is given directly is what Triton's own call would give it."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import replace

import pytest

from draftmark import Mode
from draftmark.runtime import KVCache
from draftmark_cuda_triton import native, templates, writing
from draftmark_cuda_triton.again import Called, Direct
from draftmark_cuda_triton.native import Driver, DriverError
from draftmark_cuda_triton.wide import Wide

FLOATS = {"fp32": "f", "fp64": "d"}
BYTES = {"i32": 4, "i64": 8, "u32": 4, "u64": 8}


def packed(source, args):
    """Parameters of a launch: addresses, numbers, descriptors with shapes and pitches, and two nulls behind them."""
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


class Library:
    """What is used of libcuda, over launches that a driver without a GPU keeps."""

    def __init__(self, gpu, lacks=()):
        self.gpu, self.started, self.captures, self._captured, self.capturing = gpu, [], 0, [], False
        self._sizes = {}
        for name in lacks:
            setattr(self, name, None)

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = 5
        return 0

    def cuStreamIsCapturing(self, stream, status):
        status._obj.value = self.capturing
        return 0

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
        self._params = [ctypes.create_string_buffer(one, len(one)) for one in packed(source, given[9:])]
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
def library(compiled, monkeypatch):
    """Of a driver that is not there, in place of CUDA's."""
    return stand_in(Library(compiled), monkeypatch)


def stand_in(library, monkeypatch):
    driver = Driver(library)
    monkeypatch.setattr(native, "driver", lambda: driver)
    return library


def steps_of(again):
    return [one for steps in again._known.values() for one in steps.launches]


def given_anew(gpu, call, *args):
    """Grids and parameters that ``call(*args)`` would give the driver, if Triton gave them."""
    before = len(gpu.launched)
    call(*args)
    made = gpu.launched[before:]
    del gpu.launched[before:]
    return [(id(source), given[:3], packed(source, given[9:])) for source, given in made]


def direct(library):
    """Grids and parameters that the driver was given by `Direct` since it was last asked."""
    started = [(function, grid, params) for function, grid, _, _, _, params in library.started]
    library.started.clear()
    return started


def test_the_driver_is_given_what_triton_gives_it(library, asked_of_layers, anew):
    """Of all that is asked of layers."""
    layers, asked = asked_of_layers
    count = 0
    for one in asked:
        with anew():
            wanted = given_anew(library.gpu, layers.served.attend, *one)
        launched, started = given_anew(library.gpu, layers.served.attend, *one), direct(library)
        if isinstance(layers.served, Wide):  # what widens for a layer, and what attends to that, are each known or not
            assert wanted and wanted in (launched + started, started + launched)
        else:
            assert wanted and (launched or started) == wanted
        count += bool(started)
    assert count > 15
    served = layers.served
    parts = [one for part in served._parts.values() for one in (part, part.extend)] if isinstance(served, Wide) else []
    remembered = [one._again for one in parts or [served]]
    assert all(isinstance(step, Direct) for one in remembered for step in steps_of(one))


def test_a_kernel_that_waits_itself_is_launched_so(library, decodes, layers_of):
    """As programmatic dependents, on sm_90: attention of few rows and its merge, and the write before it, and EXTEND
    where row tiles may be cut; not where Triton's option is off, as of EXTEND's whole ones.
    """
    layers, asked = decodes
    for one in asked[:12]:
        layers.served.attend(*one)
    assert library.started and all(attributes == [native.DEPENDENT] for *_, attributes, _ in library.started)
    library.started.clear()
    chance = random.Random(5)
    cache, (k, v, slots) = layers.layer(chance), layers.new_rows(3, chance)
    for _ in range(2):
        writing.write_kv(k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots)
    assert library.started and all(attributes == [native.DEPENDENT] for *_, attributes, _ in library.started)
    library.started.clear()
    for page, expected in ((16, [native.DEPENDENT]), (1, [])):
        library.started.clear()
        extends = layers_of(Mode.EXTEND, page)
        batch, cache = extends.batch(chance), extends.layer(chance)
        q, out = extends.rows(batch, chance)
        for _ in range(2):
            extends.served.attend(q, cache, batch, out)
        assert library.started and all(attributes == expected for *_, attributes, _ in library.started)


def test_one_capture_serves_every_number_of_rows(library, layers_of):
    """Batches of sizes never seen are captured for no more, nor layers whose descriptors are known."""
    chance, layers = random.Random(3), layers_of(Mode.RAGGED_VERIFY, 64)
    batches, cache = [layers.batch(chance) for _ in range(6)], layers.layer(chance)
    known = 0
    for asked in (batches[:3], batches):
        known = len(layers.served._again._templates)
        for batch in asked:
            q, out = layers.rows(batch, chance)
            layers.served.attend(q, cache, batch, out)
    templates_made = layers.served._again._templates
    assert len(templates_made) - known <= 4
    boxed = sum(bool(one._boxes) for one in templates_made.values())
    assert library.captures <= 2 * len(templates_made) + boxed


@pytest.mark.parametrize("lacks", ["cuFuncGetParamInfo", "cuGraphKernelNodeGetParams_v2"])
def test_an_older_driver_is_left_to_triton(compiled, decodes, monkeypatch, lacks):
    """Nothing is launched but by Triton's call, and all of it."""
    stand_in(Library(compiled, [lacks]), monkeypatch)
    layers, asked = decodes
    for one in asked:
        assert given_anew(compiled, layers.served.attend, *one)
    assert all(isinstance(step, Called) for step in steps_of(layers.served._again))


def test_a_refusal_of_the_driver_is_told(library, decodes, monkeypatch):
    """With the driver's code: no launch is lost in silence."""
    layers, asked = decodes
    monkeypatch.setattr(native.driver(), "start", lambda *_: 700)
    with pytest.raises(DriverError, match="cuLaunchKernelEx: CUresult 700"):
        for one in asked:
            layers.served.attend(*one)


def test_a_launch_that_fails_in_a_capture_is_the_drivers_failure(library):
    """So that the kernel is left to Triton's own call, and the stream is no longer captured."""

    def fails(stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(DriverError, match="not permitted"):
        Driver(library).captured(fails, 0)
    assert library.captures == 1


def test_in_a_capture_nothing_is_remembered(library, layers_of):
    """What is captured is Triton's own launch; the first eager call behind it is noted."""
    library.capturing = True
    chance, layers = random.Random(2), layers_of(Mode.DECODE, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        assert given_anew(library.gpu, layers.served.attend, q, cache, batch, out)
    assert not layers.served._again._known
    library.capturing = False
    for _ in range(2):
        layers.served.attend(q, cache, batch, out)
    assert library.started


def test_a_grid_without_programs_is_not_launched(library, layers_of):
    """The driver refuses it, and Triton does not launch it."""
    chance, layers = random.Random(2), layers_of(Mode.DECODE, 16)
    cache, (k, v, slots) = layers.layer(chance), layers.new_rows(0, chance)
    for _ in range(3):
        writing.write_kv(k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots)
    assert not library.started


def test_descriptors_that_were_forgotten_are_made_again(library, layers_of, anew, monkeypatch):
    """K's is known and V's is not, when the room for both is full: neither is read where it was."""
    monkeypatch.setattr(templates, "MOST_MAPS", 2)
    chance, layers = random.Random(2), layers_of(Mode.VERIFY, 16, sinks=True)
    batch, made = layers.batch(chance), [layers_of.made(4, 16, 2, 128) for _ in range(5)]
    q, out = layers.rows(batch, chance)
    asked = [KVCache(*chance.sample(made, 2)) for _ in range(30)]
    sinks = layers.layer(chance).sinks
    for cache in asked:
        one = q, replace(cache, sinks=sinks), batch, out
        with anew():
            wanted = given_anew(library.gpu, layers.served.attend, *one)
        assert (given_anew(library.gpu, layers.served.attend, *one) or direct(library)) == wanted


def test_rows_are_written_by_the_driver(library, layers_of):
    """write_kv too, with tensors that are parts of one projection."""
    chance, layers = random.Random(5), layers_of(Mode.DECODE, 16)
    cache = layers.layer(chance)
    for count in (3, 3, 16, 3):
        k, v, slots = layers.new_rows(count, chance)
        asked = k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots
        wanted = given_anew(library.gpu, writing._launch, *asked)
        launched, started = given_anew(library.gpu, writing.write_kv, *asked), direct(library)
        assert (launched or started) == wanted
    assert started
