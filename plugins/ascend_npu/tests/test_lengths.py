"""Tests of the host lists: running sums of rows, keys per request, and the batch that they belong to."""

import pytest
import torch
from ascend_shapes import ATTENTION

from draftmark import DraftShape, Geometry, Limits, Mode
from draftmark.batch import BatchBuffers, ragged
from draftmark.errors import GraphError, LengthsError
from draftmark.geometry import TARGET_MODES
from draftmark.lengths import Exact, Unknown
from draftmark_ascend_npu.lengths import HostLists, Plans

GEOMETRY = Geometry.create(ATTENTION, Limits(4, 300, 64), DraftShape(3, 1, 5), modes=TARGET_MODES)


def verify_batch(host, live=2, padded=3):
    return BatchBuffers(GEOMETRY, "cpu").uniform(Mode.VERIFY, 0, padded, live, host, tree=True)


def test_rows_are_summed_and_keys_are_not():
    """actual_seq_lengths is a running sum without a leading 0; actual_seq_lengths_kv has one length per request."""
    lists = HostLists.of(verify_batch(Exact((130, 7))))
    assert lists.rows == [5, 10, 15]
    assert lists.whole == [135, 12, 5]


def test_request_without_prefix_reads_one_token():
    """A request without a prefix gets one key in the prefix pass, because an empty key list is not documented."""
    assert HostLists.of(verify_batch(Exact((130, 0)))).prefix == [130, 1, 1]


def test_ragged_prefill_sums_its_rows():
    """The running sums of a ragged prefill's rows do not grow for padded requests."""
    batch = ragged(GEOMETRY, torch.tensor([7, 0, 0]).int(), torch.zeros(3, 3).int(), (4, 9, 0), Exact((7, 0)), 2)
    lists = HostLists.of(batch)
    assert lists.rows == [4, 13, 13] and lists.whole == [11, 9, 0]


def test_plan_of_another_batch_is_not_used():
    """A forward without its own plan() raises an error instead of using another batch's lists."""
    plans = Plans()
    with pytest.raises(LengthsError, match="call plan"):
        plans.of(verify_batch(Exact((1, 2))))
    plans.set(verify_batch(Exact((1, 2))))
    assert plans.of(verify_batch(Exact((1, 2)))).whole == [6, 7, 5]
    with pytest.raises(LengthsError, match="call plan"):
        plans.of(verify_batch(Exact((1, 3))))


@pytest.mark.parametrize(
    ("host", "requests"), [(None, 3), (Unknown(2, 300), 3), (Exact((1, 2)), 4)], ids=["none", "bounded", "other size"]
)
def test_replay_needs_exact_lengths_of_its_size(host, requests):
    """A replay raises an error without a plan, with only length bounds, and with another number of requests."""
    plans = Plans()
    if host is not None:
        plans.set(verify_batch(host))
    with pytest.raises(GraphError, match=f"needs {requests} exact host lengths"):
        plans.for_replay((Mode.VERIFY, 0), requests)
