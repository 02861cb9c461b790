"""Tests of NPU graphs: the runtime calls of a replay, and the errors for misuse."""

import pytest
import torch

from draftmark.errors import CaptureError, GraphError
from draftmark.geometry import Mode
from draftmark.graphs import GraphKey, Program

pytestmark = pytest.mark.device
KEY = GraphKey(Program.VERIFY, 2)
STEP = (Mode.VERIFY, 0)


class Lists(tuple):
    """Holds the two length lists of a call (rows, keys), in place of `HostLists` with exact lengths."""

    exact = True


class OneLayer:
    """Runs one paged attention call with length lists that the test sets, in place of a backend with plans."""

    def __init__(self, lists=([1, 2], [5, 7])):
        from draftmark_ascend_npu.ops import PagedAttention

        dice = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(shape, generator=dice).half() for shape in ((2, 8, 128), *[(6, 128, 2, 128)] * 2))
        tables = torch.arange(6, dtype=torch.int32).view(2, 3).npu()
        self.lists = lists
        self.out = torch.zeros_like(q).npu()
        self.call = PagedAttention(q.npu(), k.npu(), v.npu(), tables, None, 0.1, self.out, torch.empty(1).npu())

    def latest(self, step):
        return Lists(self.lists)

    def for_replay(self, step, requests, bounded=False):
        return Lists(self.lists)

    def step(self, layers=(1,)):
        from draftmark_ascend_npu.graph import ACTIVE

        capture = ACTIVE.get()
        for layer in layers:
            if capture.warming:
                self.call.launch(*self.lists)
            else:
                capture.add(layer, STEP, self.call, self, lambda lists: lists, 2)

    def eager(self, lists):
        self.call.launch(*lists)
        return self.out.cpu()


def state():
    from draftmark_ascend_npu.graph import NpuGraphState

    return NpuGraphState("npu")


def test_capture_and_replay_follow_the_protocol(emulated):
    """A replay makes the runtime calls in order: wait, replay, update with the operator, record."""
    from emulator_log import calls

    one, graphs = OneLayer(), state()
    graphs.capture(KEY, one.step)
    with calls() as replayed:
        graphs.replay(KEY)
    made = [line for line in replayed if not line.startswith(("aclrtMalloc", "aclrtSync"))]
    stream = made[0].rpartition(" ")[2]
    assert made == [
        f"wait stream {stream}",
        "replay model " + made[1].split(" ", 2)[2],
        f"update begin stream {stream}",
        "aclnnFusedInferAttentionScoreV3GetWorkspaceSize",
        f"aclnnFusedInferAttentionScoreV3 stream {stream}",
        f"update end stream {stream}",
        f"record external stream {stream}",
        made[-1],
    ]
    assert made[-1].startswith("record stream") and made[1].endswith("stream 0")


def test_replay_uses_current_lists():
    """Each replay uses the length lists of its own plan, and never the lists of the capture."""
    one, graphs = OneLayer(), state()
    want = {keys: one.eager(([1, 2], list(keys))) for keys in ((5, 7), (100, 300), (384, 1))}
    graphs.capture(KEY, one.step)
    for keys in ((5, 7), (100, 300), (384, 1), (5, 7)):
        one.lists = ([1, 2], list(keys))
        one.out.zero_()
        graphs.replay(KEY)
        assert torch.equal(one.out.cpu(), want[keys])


def test_replays_in_flight_do_not_mix_lists():
    """Two replays without a host wait between them use their own lists: each update waits for the previous replay."""
    one, graphs = OneLayer(), state()
    want = [one.eager(([1, 2], list(keys))) for keys in ((5, 7), (100, 300))]
    graphs.capture(KEY, one.step)
    for _ in range(5):
        found = []
        for keys in ((5, 7), (100, 300)):
            one.lists = ([1, 2], list(keys))
            graphs.replay(KEY)
            found.append(one.out.clone())
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))


def test_records_are_keyed_by_graph_layer_and_step():
    """The captured calls of two layers in two graphs have separate records, in any order of capture and replay."""
    from draftmark_ascend_npu.graph import RecordKey

    one, graphs = OneLayer(), state()
    keys = KEY, GraphKey(Program.VERIFY, 4)
    for key in keys:
        graphs.capture(key, lambda: one.step(layers=(11, 12)))
    found = [set(graphs._recordings[key]._records) for key in keys]
    assert found == [{RecordKey(key, layer, STEP) for layer in (11, 12)} for key in keys]


def test_layer_that_attends_twice_is_refused():
    """If one layer attends twice in a captured step, an error is raised, because both calls would share a record."""
    one = OneLayer()
    with pytest.raises(CaptureError, match="attends twice"):
        state().capture(KEY, lambda: one.step(layers=(11, 11)))


def test_item_in_a_capture_is_refused():
    """A host read in a capture raises an error. Its remedy is a RecordedGraph, which names the operator that reads."""
    tensor, graphs = torch.ones(3, device="npu"), state()
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 1:  # the first call is the warm-up, in which a host read is permitted
            tensor.sum().item()

    with pytest.raises(CaptureError, match=r"cannot be captured.*captur.*RecordedGraph"):
        graphs.capture(KEY, step)
    assert graphs.keys == ()


def test_capture_inside_a_capture_is_refused():
    """A capture inside another capture raises an error."""
    graphs, other = state(), state()
    with pytest.raises(CaptureError, match="inside another"):
        graphs.capture(KEY, lambda: other.capture(KEY, lambda: None))


def test_key_is_captured_once_before_replay():
    """Replaying a graph key that was not captured raises an error, and so does capturing a key twice."""
    one, graphs = OneLayer(), state()
    with pytest.raises(GraphError, match="never captured"):
        graphs.replay(KEY)
    graphs.capture(KEY, one.step)
    with pytest.raises(GraphError, match="already captured"):
        graphs.capture(KEY, one.step)
