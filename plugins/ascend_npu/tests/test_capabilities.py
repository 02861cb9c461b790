"""Tests on variants of the emulator: runtimes without a function, other products, and the plugin's switches."""

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
START = "import torch, torch_npu\n"
REPLAYS = """
from test_graph import KEY, OneLayer, state
from draftmark_ascend_npu import graph
{change}
one, graphs = OneLayer(), state()
pairs = [(5, 7), (100, 300), (7, 5), (300, 100)]
want = [one.eager(([1, 2], list(keys))) for keys in pairs]
graphs.capture(KEY, one.step)
wrong = 0
for keys, expected in zip(pairs, want):
    one.lists = ([1, 2], list(keys))
    one.out.zero_()
    graphs.replay(KEY)
    wrong += not torch.equal(one.out.cpu(), expected)
print("wrong", wrong)
"""


def variant(name):
    """Return an LD_LIBRARY_PATH on which a variant of the emulator, which lacks some functions, comes first."""
    home = Path(os.environ["ASCEND_HOME_PATH"])
    assert (home / "variants" / name).is_dir(), f"no variant {name}; run emulator/build.sh"
    return f"{home / 'variants' / name}:{os.environ['LD_LIBRARY_PATH']}"


def test_without_external_events_graphs_are_refused(run_in_new_process):
    """A runtime without external events is refused for graphs. Without the guard, replays use wrong lengths."""
    path = variant("no-external-events")
    guarded = run_in_new_process(START + REPLAYS.format(change=""), LD_LIBRARY_PATH=path)
    assert guarded.returncode != 0 and "lacks aclrtValueWait or aclrtValueWrite" in guarded.stderr
    assert "run without graphs" in guarded.stderr
    change = "graph.require_graphs = lambda: None"
    silent = run_in_new_process(START + REPLAYS.format(change=change), LD_LIBRARY_PATH=path)
    assert "wrong" in silent.stdout and "wrong 0" not in silent.stdout, silent.stderr[-2000:]
    whole = run_in_new_process(START + REPLAYS.format(change=""))
    assert "wrong 0" in whole.stdout, whole.stderr[-2000:]


def test_emulator_without_its_mark_is_not_hardware(run_in_new_process):
    """An emulator that does not identify itself and reports a 910B3 is not hardware, because it has no driver."""
    program = "from draftmark_ascend_npu.device import machine; print(machine().stamp(), machine().hardware)"
    done = run_in_new_process(START + program, LD_LIBRARY_PATH=variant("unmarked"))
    assert "the runtime reports Ascend910B3, but there is no driver version" in done.stdout, done.stderr[-2000:]
    assert done.stdout.strip().endswith("False")


OPEN = """
from ascend_shapes import geometries
from draftmark.registry import load
load("ascend_npu").open(geometries()["target"], "npu")
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"DRAFTMARK_NPU_SOC": "Ascend310P3"}, "neither an A2"), ({"DRAFTMARK_NPU_CANN": "8.3.RC1"}, "older than 8.5.0")],
)
def test_other_products_and_old_cann_are_refused(run_in_new_process, setting, words):
    """Opening a backend raises an error on a product other than A2 or A3, and with a CANN before 8.5.0."""
    done = run_in_new_process(START + OPEN, **setting)
    assert done.returncode != 0 and words in done.stderr, done.stderr[-2000:]


FORWARD = """
from emulator_log import calls
from ascend_shapes import geometries
from draftmark.registry import load
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.cases.graph_rounds import programs_of
from draftmark_contract.check import Tier
from draftmark_contract.checks import graphs
from draftmark_contract.harness.harness import Harness, place
geometry = geometries()["target"]
subject = BackendUnderTest(load("ascend_npu"), "npu", Tier.DEVICE)
with calls() as log:
    for name in ("decode-edges", "verify-edges"):
        turn = next(one for one in all_forwards(geometry) if one.name == name)
        rig = Harness(subject, geometry, turn.num_pages)
        turn = place(rig, turn)
        rig.assert_forward(turn, rig.load(turn))
    graphs.replay_equals_eager(subject, (geometry, programs_of(geometry)[-1]))
used = sorted({line.split()[0] for line in log if line.startswith("aclnnFused") and "stream" in line})
print("used", used)
"""


@pytest.mark.parametrize(
    ("variant_name", "switch", "used"),
    [
        (None, {}, "aclnnFusedInferAttentionScoreV3"),
        ("no-v3", {}, "aclnnFusedInferAttentionScoreV4"),
        (None, {"DRAFTMARK_ASCEND_FUSED": "v2"}, "aclnnFusedInferAttentionScoreV4"),
    ],
    ids=["V3", "V3 is gone", "switch"],
)
def test_second_entry_point_serves_without_v3(run_in_new_process, variant_name, switch, used):
    """Forwards, trees and replays are right through the operator's V4 if CANN has no V3 or the switch selects v2."""
    path = {"LD_LIBRARY_PATH": variant(variant_name)} if variant_name else {}
    done = run_in_new_process(START + FORWARD, **path, **switch)
    assert f"used ['{used}']" in done.stdout, done.stderr[-3000:]


WAITS = """
from emulator_log import calls
from test_graph import KEY, OneLayer, state
one, graphs = OneLayer(), state()
graphs.capture(KEY, one.step)
torch.npu.synchronize()
with calls() as log:
    graphs.replay(KEY)
before = log[: next(i for i, line in enumerate(log) if line.startswith("replay model"))]
print("waits", sum(line.startswith("aclrtSynchronizeStream") for line in before))
"""


@pytest.mark.parametrize(("value", "count"), [("0", 0), ("1", 1)])
def test_replay_waits_on_the_host_only_with_the_switch(run_in_new_process, value, count):
    """A replay synchronises the stream on the host only with DRAFTMARK_ASCEND_HOST_WAIT=1."""
    done = run_in_new_process(START + WAITS, DRAFTMARK_ASCEND_HOST_WAIT=value)
    assert f"waits {count}" in done.stdout, done.stderr[-2000:]
