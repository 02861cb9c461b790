"""`prepared`: a prepared launch passes the driver what Triton's launcher passes, for any integers and addresses."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark.lengths import UpperBound
from draftmark_cuda_triton.launch.launcher import LAUNCHER
from draftmark_cuda_triton.launch.metadata import write_metadata_prefill
from draftmark_cuda_triton.launch.prepared import PreparedKernel
from plugins.cuda_triton.tests.cuda_library import Library, driver_calls, triton_calls, use_library

pytestmark = pytest.mark.usefixtures("without_machine_code")


@pytest.fixture
def library(fake_gpu, monkeypatch):
    """Fake libcuda in place of CUDA's driver."""
    return use_library(Library(fake_gpu), monkeypatch)


def batches_of(layers, count):
    """Return EXTEND batches of random sizes at new addresses, some with slots of the engine."""
    chance = random.Random()
    for _ in range(count):
        batch = layers.batch(chance)
        rows = tuple(chance.choice((1, 5, 17, 60)) for _ in range(batch.padded_reqs))
        batch = replace(batch, q_lens=rows, tail_lens=rows, num_rows=sum(rows))
        if chance.random() < 0.5:
            batch = replace(batch, slots=layers.new_tensor(sum(rows), dtype=torch.int64))
        yield batch


@pytest.mark.parametrize("page", [1, 16])
def test_driver_receives_what_triton_passes(library, make_layers, without_relaunch, page):
    """Prepared metadata launches pass the parameters of new launches, for batches of any size, with splits or not."""
    prefill = make_layers(Mode.EXTEND, page).attention
    for number, batch in enumerate(batches_of(make_layers(Mode.EXTEND, page), 30)):
        with without_relaunch():
            wanted = triton_calls(library.gpu, prefill.write_metadata, batch)
        launched, started = triton_calls(library.gpu, prefill.write_metadata, batch), driver_calls(library)
        assert len(wanted) == 1 and (launched, started) == (([], wanted) if number else (wanted, []))


@pytest.mark.parametrize("lacks", ["cuFuncGetParamInfo", "cuGraphKernelNodeGetParams_v2"])
def test_old_driver_falls_back_to_triton_launch(fake_gpu, make_layers, monkeypatch, caplog, lacks):
    """Without a required driver function every launch goes through Triton's launcher, which is logged once."""
    library = use_library(Library(fake_gpu, [lacks]), monkeypatch)
    prefill = make_layers(Mode.EXTEND, 16).attention
    for batch in batches_of(make_layers(Mode.EXTEND, 16), 3):
        assert len(triton_calls(fake_gpu, prefill.write_metadata, batch)) == 1 and not library.started
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def test_nothing_is_prepared_during_graph_capture(library, make_layers):
    """While a stream captures a graph Triton launches the kernel; a later call prepares, and one after it launches."""
    library.capturing = True
    prefill = make_layers(Mode.EXTEND, 16).attention
    (batch,) = batches_of(make_layers(Mode.EXTEND, 16), 1)
    for _ in range(2):
        assert triton_calls(library.gpu, prefill.write_metadata, batch) and not library.captures
    library.capturing = False
    assert triton_calls(library.gpu, prefill.write_metadata, batch) and library.captures and not library.started
    library.capturing = True  # a prepared launch can be captured
    assert not triton_calls(library.gpu, prefill.write_metadata, batch) and library.started


def test_collected_and_recorded_launches_pass_the_launcher(library, make_layers):
    """A launcher that collects or records calls sees a prepared kernel's calls, and collecting launches nothing."""
    prefill = make_layers(Mode.EXTEND, 16).attention
    (batch,) = batches_of(make_layers(Mode.EXTEND, 16), 1)
    for _ in range(2):
        prefill.write_metadata(batch)
    library.started.clear()
    seen = []
    with LAUNCHER.collect(seen.append):
        assert not triton_calls(library.gpu, prefill.write_metadata, batch)
    ((kernel, _, _),) = seen
    assert kernel.__name__ == write_metadata_prefill.__name__ and not library.started
    assert len(LAUNCHER.record(prefill.write_metadata, batch)) == 1 and not library.started


def test_kernel_with_a_compiled_in_argument_is_not_prepared(library, make_layers, monkeypatch, caplog):
    """A kernel for which Triton compiled an argument in stays with Triton's launcher, which is logged."""
    prefill = make_layers(Mode.EXTEND, 16).attention
    (batch,) = batches_of(make_layers(Mode.EXTEND, 16), 1)
    monkeypatch.setattr("draftmark_cuda_triton.launch.parameters.LaunchTemplate.param_index", lambda *_: {}[7])
    for _ in range(3):
        assert len(triton_calls(library.gpu, prefill.write_metadata, batch)) == 1
    assert "argument 7 was compiled in" in caplog.text and len(caplog.records) == 1


def test_prepared_kernel_of_another_device_launches_there(library, make_layers, monkeypatch):
    """A tensor of a device that is not current passes the launcher, which makes its device current."""
    made, calls = PreparedKernel(), []
    monkeypatch.setattr("draftmark_cuda_triton.launch.prepared.launch_kernel", lambda *args, **_: calls.append(args))
    tensor = make_layers.new_tensor(1)
    monkeypatch.setattr(type(tensor), "get_device", lambda _: 1)
    assert not made.again((1,), (tensor,))
    made("kernel", (1,), tensor)
    assert calls == [("kernel", (1,), tensor)]


def test_metadata_of_a_prompt_takes_few_python_calls(library, make_layers):
    """A prepared metadata launch of a new batch takes at most 30 Python calls, for which an engine's step waits."""
    prefill = make_layers(Mode.EXTEND, 16).attention
    first, second = batches_of(make_layers(Mode.EXTEND, 16), 2)
    prefill.write_metadata(first)
    calls = calls_of(prefill.write_metadata, replace(second, host=UpperBound((1000,) * second.num_reqs)))
    assert library.started and len(calls) <= 30, calls


def calls_of(function, *args):
    """Return the names of draftmark's Python functions that a call runs, with one entry for each call."""
    found = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("draftmark"):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found
