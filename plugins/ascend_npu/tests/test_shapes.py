"""Tests that run the contract's behaviour checks on more geometries that an NPU serves.

The contract's own geometries have few of these cases: trees of 35 rows at the context limit on pages of 128, SmolLM2's
heads with overlap, and MHA.
"""

import pytest
from ascend_shapes import geometries

from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.cases.graph_rounds import programs_of
from draftmark_contract.checks import graphs, purity

pytestmark = pytest.mark.device
SHAPES = geometries()
PROGRAMS = [pytest.param((g, p), id=f"{name}-{p.value}") for name, g in SHAPES.items() for p in programs_of(g)]
TURNS = [pytest.param(turn, id=f"{name}-{turn.name}") for name, g in SHAPES.items() for turn in all_forwards(g)]


@pytest.mark.parametrize("turn", TURNS)
def test_every_forward_is_right(subject, turn):
    """Metadata, stored KV and outputs are right in every forward, with NaN in unused KV and guard words intact."""
    from draftmark_contract.harness.harness import Harness, place

    rig = Harness(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    rig.assert_forward(turn, rig.load(turn))


@pytest.mark.parametrize("value", PROGRAMS)
def test_captured_run_is_right(subject, value):
    """The warm-up, the capture and the first replays are right at every captured size."""
    graphs.captured_run_is_right(subject, value)


@pytest.mark.parametrize("value", PROGRAMS)
def test_replays_equal_eager(subject, value):
    """Replays equal eager forwards while batches and lengths grow and shrink."""
    graphs.replay_equals_eager(subject, value)


SCHEDULED = """
import torch_npu
from ascend_shapes import geometries
from draftmark_contract.check import Tier
from draftmark_contract.checks import graphs
from draftmark_contract.cases.graph_rounds import programs_of
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark.registry import load
subject = BackendUnderTest(load("ascend_npu"), "npu", Tier.DEVICE)
for name in ("target", "draft"):
    for program in programs_of(geometries()[name]):
        graphs.replay_equals_eager(subject, (geometries()[name], program))
print("right")
"""


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_no_schedule_breaks_a_replay(run_in_new_process, emulated, seed):
    """Replays equal eager forwards under random schedules of the emulator's streams."""
    done = run_in_new_process(SCHEDULED, DRAFTMARK_NPU_SEED=seed)
    assert "right" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("value", PROGRAMS)
def test_order_of_captures_does_not_matter(subject, value):
    """Graphs are right on large batches even if small batches were captured first."""
    graphs.capture_order_does_not_matter(subject, value)


@pytest.mark.parametrize("geometry", SHAPES.values(), ids=SHAPES)
def test_programs_do_not_disturb_each_other(subject, geometry):
    """All captured programs on one arena stay right if they replay in turn, with eager prefills between them."""
    graphs.programs_do_not_disturb_each_other(subject, geometry)


@pytest.mark.parametrize("geometry", SHAPES.values(), ids=SHAPES)
def test_nothing_is_kept_or_moved(subject, geometry):
    """The backend keeps no tensor except those that open_backend passed, and no buffer changes its address."""
    purity.nothing_is_kept_or_moved(subject, geometry)


@pytest.mark.parametrize("turn", [one for one in TURNS if "target-" in one.id or "draft-verify" in one.id][::4])
def test_each_call_writes_its_own(subject, turn):
    """`plan` and `write_metadata` write only the arena, `write_kv` only the cache, `attend` only its rows of `out`."""
    purity.each_call_writes_its_own(subject, turn)
