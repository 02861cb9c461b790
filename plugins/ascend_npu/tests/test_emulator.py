"""Tests of the emulator: it reports at once the mistakes that a device would report late or never."""

import pytest

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
START = "import torch, torch_npu\n"


@pytest.fixture
def fails(run_in_new_process):
    """Return a function that runs a program, checks that it fails, and returns its stderr."""

    def run(program, **environment):
        done = run_in_new_process(START + program, **environment)
        assert done.returncode != 0, done.stdout
        return done.stderr

    return run


CAPTURE = """
def capture(step):
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph, stream=stream):
        step()
    return graph
x = torch.ones(4, device="npu")
pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
torch.npu.synchronize()
"""


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("x.sum().item()", "a stream cannot be synchronised while it captures"),
        ("x.copy_(pageable)", "a stream cannot be synchronised while it captures"),
        ("x.copy_(pageable, non_blocking=True)", "host to device with pageable host memory"),
        ("torch.npu.synchronize()", "cannot be synchronised while a stream captures"),
    ],
    ids=["item", "blocking copy", "pageable copy", "device sync"],
)
def test_capture_refuses_host_reads_and_blocking_copies(fails, step, words):
    """The emulator names host reads, blocking copies and asynchronous copies of pageable memory in a capture."""
    assert words in fails(CAPTURE + f"capture(lambda: {step})")


def test_captured_operators_and_pinned_copies_replay(run_in_new_process):
    """Captured operators and copies of pinned memory do not run during the capture, but run in a replay."""
    program = CAPTURE + (
        "def step():\n    x.copy_(pinned, non_blocking=True); x.add_(1)\n"
        "x.zero_()\ngraph = capture(step)\nprint(x.tolist())\npinned.fill_(4)\ngraph.replay()\nprint(x.tolist())"
    )
    done = run_in_new_process(START + program)
    assert done.stdout.splitlines()[-2:] == ["[0.0, 0.0, 0.0, 0.0]", "[5.0, 5.0, 5.0, 5.0]"], done.stderr[-2000:]


def test_new_device_memory_is_poisoned(run_in_new_process):
    """New memory has all bits set: NaN as a float, -1 as a signed integer."""
    done = run_in_new_process(
        START + "print(torch.empty(8 << 20, device='npu')[-1].item(), "
        "torch.empty(8 << 20, dtype=torch.int64, device='npu')[-1].item())"
    )
    assert done.stdout.splitlines()[-1] == "nan -1", done.stderr[-2000:]


def test_index_out_of_range_is_reported(fails):
    """An index out of range is an error that names the operator; a device would read other memory."""
    program = "x = torch.ones(4, device='npu'); print(x[torch.tensor([7], device='npu')].cpu())"
    assert "aclnnIndex" in (stderr := fails(program)) and "7" in stderr


def test_freed_memory_is_refused(fails):
    """An operator on a view of freed memory is rejected when it is prepared."""
    program = (
        "x = torch.empty(8 << 20, device='npu', dtype=torch.uint8)\n"
        "base = torch_npu._C._weak_ref_tensor(x)\n"
        "del x; torch.npu.synchronize(); torch.npu.empty_cache()\n"
        "base.zero_(); torch.npu.synchronize()"
    )
    assert "are not in device memory (freed, or of the host)" in fails(program)


def test_missing_functions_abort_with_their_names(fails):
    """An operator or runtime function that the emulator lacks is an error, never a silent success."""
    stderr = fails("torch.linalg.svd(torch.ones(3, 3, device='npu'))")
    assert "linalg_svd" in stderr or "not emulated" in stderr
    timed = (
        "a, b = (torch.npu.Event(enable_timing=True) for _ in range(2))\n"
        "a.record(); b.record(); torch.npu.synchronize(); a.elapsed_time(b)"
    )
    assert "the emulator has no clock" in fails(timed)


def test_stream_waits_are_kept(run_in_new_process):
    """With a wait on the writing stream each schedule reads right values. Without the wait some values are wrong."""
    program = (
        "import sys\n"
        "side, x, wrong = torch.npu.Stream(), torch.zeros(4, device='npu'), 0\n"
        "torch.npu.synchronize()\n"
        "for i in range(1, 30):\n"
        "    with torch.npu.stream(side):\n"
        "        x.fill_(i)\n"
        "    {wait}\n"
        "    wrong += int((x + 0).cpu()[0].item() != i)\n"
        "    torch.npu.synchronize()\n"
        "print('wrong', wrong)"
    )
    wait = "torch.npu.current_stream().wait_stream(side)"
    for seed in ("1", "2"):
        kept = run_in_new_process(START + program.format(wait=wait), DRAFTMARK_NPU_SEED=seed)
        assert "wrong 0" in kept.stdout, kept.stderr[-2000:]
        dropped = run_in_new_process(START + program.format(wait="pass"), DRAFTMARK_NPU_SEED=seed)
        assert "wrong" in dropped.stdout and "wrong 0" not in dropped.stdout, dropped.stderr[-2000:]


def test_schedule_depends_only_on_the_seed(run_in_new_process):
    """Two runs of an unsynchronized program with one seed read the same values in the same iterations."""
    program = (
        "side, x, seen = torch.npu.Stream(), torch.zeros(4, device='npu'), []\n"
        "torch.npu.synchronize()\n"
        "for i in range(1, 20):\n"
        "    with torch.npu.stream(side):\n"
        "        x.fill_(i)\n"
        "    seen.append((x + 0).cpu()[0].item())\n"
        "    torch.npu.synchronize()\n"
        "print(seen)"
    )
    environment = {"DRAFTMARK_NPU_SEED": "5", "TASK_QUEUE_ENABLE": "0"}
    first, second = (run_in_new_process(START + program, **environment).stdout for _ in range(2))
    assert first == second and "[" in first


def test_results_are_marked_as_emulated():
    """The device's stamp names the emulator, and benchmarks refuse to run on it."""
    from draftmark_ascend_npu.device import EMULATED, require_hardware, stamp

    assert stamp() == EMULATED == "emulated, not hardware"
    with pytest.raises(RuntimeError, match="needs hardware"):
        require_hardware("a benchmark")
