"""Known mistakes on an NPU, each tested twice: the guard reports the mistake, and without the guard it does harm.

The second part proves that the guard is needed. Without it outputs are wrong, the operator rejects the call, or the
device hangs.
"""

import pytest
import torch
from ascend_shapes import geometries

from draftmark.errors import LengthsError
from draftmark_ascend_npu import backend, lengths, ops, rules, sizing
from draftmark_ascend_npu.rules import OperatorRule
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.check import ContractViolation

pytestmark = pytest.mark.device
TARGET = geometries()["target"]
TURNS = {turn.name: turn for turn in all_forwards(TARGET)}


def loaded(subject, name):
    """Return the contract's harness, a forward by its name, and the batch of the forward, ready to run."""
    from draftmark_contract.harness.harness import Harness, place

    rig = Harness(subject, TARGET, TURNS[name].num_pages)
    turn = place(rig, TURNS[name])
    return rig, turn, rig.load(turn)


def paged(columns=3):
    from draftmark_ascend_npu.ops import PagedAttention

    q = torch.randn(2, 8, 128).half().npu()
    k, v = (torch.randn(6, 128, 2, 128).half().npu() for _ in range(2))
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)[:, :columns].contiguous().npu()
    return PagedAttention(q, k, v, tables, None, 0.1, torch.zeros_like(q), torch.empty(1).npu())


def nothing(*arguments):
    """Do nothing. Tests put this in place of a guard to remove the guard."""


def test_seed_e_table_without_draft_token_columns(monkeypatch, emulated):
    """A block table of two blocks is refused for 256 committed and eight draft tokens (sglang#22778)."""
    with pytest.raises(OperatorRule, match=r"2 columns, but 264 tokens need 3; size it from max_kv_len"):
        paged(columns=2).launch([1, 2], [264, 7])
    monkeypatch.setattr(rules, "check_tables", nothing)
    with pytest.raises(RuntimeError, match=r"2 columns, but a request of 264 tokens needs 3"):
        paged(columns=2).launch([1, 2], [264, 7])


def test_running_sums_and_lengths_swapped(monkeypatch, emulated):
    """Row counts per request are refused as actual_seq_lengths, which must be running sums."""
    with pytest.raises(OperatorRule, match="q has 2 rows"):
        paged().launch([1, 1], [5, 12])
    monkeypatch.setattr(rules, "check_lists", nothing)
    with pytest.raises(RuntimeError, match="actual_seq_lengths ends at 1, but the query has 2"):
        paged().launch([1, 1], [5, 12])


def test_summed_keys_are_wrong(subject, monkeypatch):
    """No rule can detect key lengths given as running sums, but the contract's oracle finds the wrong output."""

    def summed(lists):
        return lists.rows, [sum(lists.whole[: i + 1]) % 300 for i in range(len(lists.whole))]

    rig, turn, batch = loaded(subject, "decode-edges")
    rig.assert_forward(turn, batch)
    monkeypatch.setattr(backend, "_whole", summed)
    rig, turn, batch = loaded(subject, "decode-edges")
    with pytest.raises(ContractViolation, match="the output is wrong"):
        rig.assert_forward(turn, batch)


def test_stale_host_list(subject, monkeypatch):
    """A forward without its plan() raises an error. Without this guard it uses another batch's lengths and is wrong."""
    rig, other, later = loaded(subject, "verify-wall")
    rig.backend.plan(loaded(subject, "verify-full")[2])
    rig.backend.write_metadata(later)
    with pytest.raises(LengthsError, match="call plan"):
        rig.layer(other, later)
    monkeypatch.setattr(lengths.Plans, "of", lambda self, batch: self.latest((batch.mode, batch.step)))
    monkeypatch.setattr(rules, "check_lists", nothing)
    monkeypatch.setattr(rules, "check_tables", nothing)
    expected = rig.expected(other)
    with pytest.raises((RuntimeError, ContractViolation)):
        rig.layer(other, later)
        rig.assert_output(other, expected)


def test_stale_lists_in_a_replay(subject, monkeypatch):
    """A replay that updates its calls with the capture's lists, not its own, is wrong if a length has changed."""
    from draftmark.graphs import Program
    from draftmark_contract.checks import graphs

    first = {}

    def captured_lists(self, step, requests, bounded=False):
        return first.setdefault((id(self), step, requests), self.latest(step))

    monkeypatch.setattr(lengths.Plans, "for_replay", captured_lists)
    with pytest.raises(ContractViolation, match=r"the replay of VERIFY\[\d+\] on verify-replay-\d is wrong"):
        graphs.replay_equals_eager(subject, (TARGET, Program.VERIFY))


def test_window_is_refused():
    """A geometry with a window is refused, because no sparse_mode is a window over a tree's depths."""
    from dataclasses import replace

    from draftmark_ascend_npu.support import reasons_against

    windowed = replace(TARGET, attention=replace(TARGET.attention, window_left=5))
    assert reasons_against(windowed) and not reasons_against(TARGET)


def test_wrong_cache_mode(monkeypatch, emulated):
    """A scatter without cache_mode "Norm" is an error on the emulator: the default NZ would store rows elsewhere."""
    rows, pages, slots = torch.zeros(2, 2, 128).half().npu(), torch.zeros(3, 128, 2, 128).half().npu(), torch.arange(2)
    ops.scatter_kv(rows, rows, pages, pages.clone(), slots.int().npu())

    class WithoutNorm:
        @staticmethod
        def npu_scatter_pa_kv_cache(*tensors, cache_mode):
            import torch_npu

            torch_npu.npu_scatter_pa_kv_cache(*tensors)

    monkeypatch.setattr(ops, "_library", WithoutNorm)
    with pytest.raises(RuntimeError, match="NZ layout"):
        ops.scatter_kv(rows, rows, pages, pages.clone(), slots.int().npu())


FORWARD = """
import torch, torch_npu
from ascend_shapes import geometries
from draftmark_contract.check import Tier
from draftmark_contract.harness.harness import Harness, place
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark.registry import load
from draftmark_ascend_npu import sizing
{change}
subject = BackendUnderTest(load("ascend_npu"), "npu", Tier.DEVICE)
turn = next(one for one in all_forwards(geometries()["target"]) if one.name == "verify-wall")
rig = Harness(subject, turn.geometry, turn.num_pages)
turn = place(rig, turn)
rig.run(turn, rig.load(turn))
torch.npu.synchronize()
print("ran")
"""
SHARED_NULL_PAGE = """
from draftmark import HostLengthsNeed, Requirements
from draftmark_ascend_npu import AscendPlugin
AscendPlugin.requirements = lambda self, geometry: Requirements(HostLengthsNeed.EXACT)
"""


def test_slots_that_are_not_unique(run_in_new_process, emulated):
    """Without the unique-slots requirement, padded requests share a page, and the scatter rejects duplicate slots."""
    guarded = run_in_new_process(FORWARD.format(change=""))
    assert guarded.returncode == 0 and "ran" in guarded.stdout, guarded.stderr[-2000:]
    shared = run_in_new_process(FORWARD.format(change=SHARED_NULL_PAGE))
    assert shared.returncode != 0 and "given twice; slots must be unique" in shared.stderr


REPLAYS = """
import torch, torch_npu
from test_graph import KEY, OneLayer, state
from draftmark_ascend_npu import graph
one, graphs = OneLayer(), state()
pairs = [(5, 7), (100, 300)]
want = [one.eager(([1, 2], list(keys))) for keys in pairs]
graphs.capture(KEY, one.step)
{change}
wrong = 0
for _ in range(10):
    found = []
    for keys in pairs:
        one.lists = ([1, 2], list(keys))
        graphs.replay(KEY)
        found.append(one.out.clone())
    wrong += sum(not torch.equal(a.cpu(), b) for a, b in zip(found, want))
print("wrong", wrong)
"""
NO_UPDATE = "graphs._recordings[KEY]._update_all = lambda lists: None"
NO_WAIT = "graphs._recordings[KEY]._update.wait_event = lambda event: None"
SEEDS = ("1", "2", "3")


def test_replay_without_its_update_deadlocks(run_in_new_process, emulated):
    """A replay without its update stops at the event; the emulator reports it, and a device would hang."""
    guarded = run_in_new_process(REPLAYS.format(change=""))
    assert "wrong 0" in guarded.stdout, guarded.stderr[-2000:]
    missing = run_in_new_process(REPLAYS.format(change=NO_UPDATE))
    assert missing.returncode != 0
    assert "deadlock" in missing.stderr and "an external event that was never recorded" in missing.stderr


def test_update_without_waiting_for_the_last_replay(run_in_new_process, emulated):
    """If an update waits for the last replay, every schedule is right. Without the wait, one is wrong or deadlocks."""
    failed = []
    for seed in SEEDS:
        guarded = run_in_new_process(REPLAYS.format(change=""), DRAFTMARK_NPU_SEED=seed)
        assert "wrong 0" in guarded.stdout, (seed, guarded.stderr[-2000:])
        racing = run_in_new_process(REPLAYS.format(change=NO_WAIT), DRAFTMARK_NPU_SEED=seed)
        failed.append("wrong 0" not in racing.stdout)
    assert any(failed)


PINNED = """
import torch, torch_npu
source = torch.full((1024,), 1.0).pin_memory()
target = torch.empty(1024, device="npu")
target.copy_(source, non_blocking=True)
{wait}
source.fill_(2.0)
print("first", target.cpu()[0].item())
"""


def test_pinned_buffer_reused_too_early(run_in_new_process, emulated):
    """A copy reads pinned memory when it runs, so overwriting the buffer without a wait changes the copied values."""
    waited = run_in_new_process(PINNED.format(wait="torch.npu.current_stream().synchronize()"))
    assert "first 1.0" in waited.stdout, waited.stderr[-2000:]
    early = run_in_new_process(PINNED.format(wait=""))
    assert "first 2.0" in early.stdout, early.stderr[-2000:]


ALLOCATE = """
import torch, torch_npu
try:
    torch.empty(256 << 20, dtype=torch.uint8, device="npu")
    print("fits")
except torch.OutOfMemoryError as error:
    print("refused", str(error).splitlines()[0])
"""


def test_out_of_hbm(run_in_new_process, emulated):
    """An allocation beyond the emulated device's memory raises OutOfMemoryError."""
    assert "fits" in run_in_new_process(ALLOCATE, DRAFTMARK_NPU_HBM_MIB="512").stdout
    assert "refused" in run_in_new_process(ALLOCATE, DRAFTMARK_NPU_HBM_MIB="64").stdout


def test_context_limit_needs_an_extra_block(subject):
    """In the geometry at the context limit, the draft tokens after the prefix need one more block."""
    wall = geometries()["target-fp16-wall"]
    table = next(one for one in sizing.buffers(wall) if one.name == sizing.TABLES)
    assert table.shape[1] == wall.limits.max_context_len // 128 + 1
