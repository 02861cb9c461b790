"""The emulator is unforgiving: what a device would punish late, or never, it names at once."""

import pytest

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
START = "import torch, torch_npu\n"


@pytest.fixture
def fails(in_process_of_its_own):
    """Runs a program that must not end well; returns what it said."""

    def run(program, **environment):
        done = in_process_of_its_own(START + program, **environment)
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
def test_what_no_capture_may_contain_is_refused(fails, step, words):
    """Host reads, blocking copies and asynchronous copies of pageable memory, each by name."""
    assert words in fails(CAPTURE + f"capture(lambda: {step})")


def test_what_a_capture_may_contain_is_replayed(in_process_of_its_own):
    """Operators and pinned copies: nothing runs at capture, everything at replay."""
    program = CAPTURE + (
        "def step():\n    x.copy_(pinned, non_blocking=True); x.add_(1)\n"
        "x.zero_()\ngraph = capture(step)\nprint(x.tolist())\npinned.fill_(4)\ngraph.replay()\nprint(x.tolist())"
    )
    done = in_process_of_its_own(START + program)
    assert done.stdout.splitlines()[-2:] == ["[0.0, 0.0, 0.0, 0.0]", "[5.0, 5.0, 5.0, 5.0]"], done.stderr[-2000:]


def test_fresh_device_memory_is_poison(in_process_of_its_own):
    """All ones: NaN in every float, -1 in every signed integer."""
    done = in_process_of_its_own(
        START + "print(torch.empty(8 << 20, device='npu')[-1].item(), "
        "torch.empty(8 << 20, dtype=torch.int64, device='npu')[-1].item())"
    )
    assert done.stdout.splitlines()[-1] == "nan -1", done.stderr[-2000:]


def test_an_index_out_of_range_is_an_error_that_names_the_operator(fails):
    """On a device it would read foreign memory."""
    program = "x = torch.ones(4, device='npu'); print(x[torch.tensor([7], device='npu')].cpu())"
    assert "aclnnIndex" in (said := fails(program)) and "7" in said


def test_memory_past_an_allocation_is_refused(fails):
    """A view that reaches past the memory behind it is rejected when the operator is prepared."""
    program = (
        "x = torch.empty(8 << 20, device='npu', dtype=torch.uint8)\n"
        "base = torch_npu._C._weak_ref_tensor(x)\n"
        "del x; torch.npu.synchronize(); torch.npu.empty_cache()\n"
        "base.zero_(); torch.npu.synchronize()"
    )
    assert "are not in device memory (freed, or of the host)" in fails(program)


def test_a_function_that_is_not_emulated_aborts_with_its_name(fails):
    """Nothing silently succeeds: neither the runtime's functions nor operators."""
    assert "linalg_svd" in (said := fails("torch.linalg.svd(torch.ones(3, 3, device='npu'))")) or "not emulated" in said
    timed = (
        "a, b = (torch.npu.Event(enable_timing=True) for _ in range(2))\n"
        "a.record(); b.record(); torch.npu.synchronize(); a.elapsed_time(b)"
    )
    assert "the emulator has no clock" in fails(timed)


def test_a_wait_for_an_event_of_another_stream_is_kept(in_process_of_its_own):
    """With a wait the reader is right under every schedule; without one it is wrong under some."""
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
        kept = in_process_of_its_own(START + program.format(wait=wait), DRAFTMARK_NPU_SEED=seed)
        assert "wrong 0" in kept.stdout, kept.stderr[-2000:]
        dropped = in_process_of_its_own(START + program.format(wait="pass"), DRAFTMARK_NPU_SEED=seed)
        assert "wrong" in dropped.stdout and "wrong 0" not in dropped.stdout, dropped.stderr[-2000:]


def test_the_schedule_is_the_seeds(in_process_of_its_own):
    """One seed, one schedule: the same program is wrong in the same rounds every time."""
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
    first, second = (in_process_of_its_own(START + program, **environment).stdout for _ in range(2))
    assert first == second and "[" in first


def test_results_say_that_they_are_emulated():
    """And what measures time refuses to run."""
    from draftmark_ascend_npu.device import EMULATED, require_hardware, stamp

    assert stamp() == EMULATED == "emulated, not hardware"
    with pytest.raises(RuntimeError, match="means nothing here"):
        require_hardware("a benchmark")
