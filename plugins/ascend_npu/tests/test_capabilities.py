"""What the plugin does on runtimes that lack a function, on other products, and with its switches: on variants of the
emulator."""

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
    """A library path on which some of the emulator's functions are hidden."""
    home = Path(os.environ["ASCEND_HOME_PATH"])
    assert (home / "variants" / name).is_dir(), "build.sh makes the variants"
    return f"{home / 'variants' / name}:{os.environ['LD_LIBRARY_PATH']}"


def test_without_external_events_no_graph_is_opened(in_process_of_its_own):
    """Without the guard, replays run with another round's lengths and nobody says so."""
    path = variant("no-external-events")
    guarded = in_process_of_its_own(START + REPLAYS.format(change=""), LD_LIBRARY_PATH=path)
    assert guarded.returncode != 0 and "lacks aclrtValueWait or aclrtValueWrite" in guarded.stderr
    assert "run without graphs" in guarded.stderr
    change = "graph.require_graphs = lambda: None"
    silent = in_process_of_its_own(START + REPLAYS.format(change=change), LD_LIBRARY_PATH=path)
    assert "wrong" in silent.stdout and "wrong 0" not in silent.stdout, silent.stderr[-2000:]
    whole = in_process_of_its_own(START + REPLAYS.format(change=""))
    assert "wrong 0" in whole.stdout, whole.stderr[-2000:]


def test_an_emulator_without_its_mark_is_no_hardware(in_process_of_its_own):
    """It names a 910B3 and lacks a driver."""
    program = "from draftmark_ascend_npu.device import machine; print(machine().stamp(), machine().hardware)"
    done = in_process_of_its_own(START + program, LD_LIBRARY_PATH=variant("unmarked"))
    assert "the runtime names Ascend910B3, but there is no driver version" in done.stdout, done.stderr[-2000:]
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
def test_other_products_and_old_versions_are_refused_at_open(in_process_of_its_own, setting, words):
    """By what torch_npu says of the device and of CANN."""
    done = in_process_of_its_own(START + OPEN, **setting)
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
    ids=["V3", "V3 is gone", "asked for"],
)
def test_the_second_entry_point_serves_where_the_first_is_gone(in_process_of_its_own, variant_name, switch, used):
    """CANN announces the end of V3: forwards, trees and replays are right through V4 as well."""
    path = {"LD_LIBRARY_PATH": variant(variant_name)} if variant_name else {}
    done = in_process_of_its_own(START + FORWARD, **path, **switch)
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
def test_a_replay_waits_on_the_host_only_when_it_is_told_to(in_process_of_its_own, value, count):
    """The switch that tells a race from a wrong rule."""
    done = in_process_of_its_own(START + WAITS, DRAFTMARK_ASCEND_HOST_WAIT=value)
    assert f"waits {count}" in done.stdout, done.stderr[-2000:]
