"""`cuda_driver` and `parameters`: direct driver launches pass the parameters that Triton's launcher passes."""

from __future__ import annotations

import random
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
from plugins.cuda_triton.tests.cuda_library import (
    Library,
    driver_calls,
    launches_of,
    reversed_descriptors,
    triton_calls,
    use_library,
)

pytestmark = pytest.mark.usefixtures("without_machine_code")


@pytest.fixture
def library(fake_gpu, monkeypatch):
    """Fake libcuda in place of CUDA's driver."""
    return use_library(Library(fake_gpu), monkeypatch)


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
