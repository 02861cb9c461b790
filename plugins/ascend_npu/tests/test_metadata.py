"""Tests of the metadata of draft trees, on the CPU, against the contract's record of every token's slot."""

import pytest
from ascend_shapes import geometries

from draftmark import Mode
from draftmark.registry import load
from draftmark_ascend_npu.metadata import is_tree
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.check import Tier
from draftmark_contract.harness.harness import Harness, place
from draftmark_contract.oracle.history import kv_slots


def trees():
    for name, geometry in geometries().items():
        for turn in all_forwards(geometry):
            if turn.mode in (Mode.VERIFY, Mode.DRAFT) and not turn.causal:
                yield pytest.param(turn, id=f"{name}-{turn.name}")


@pytest.mark.parametrize("turn", list(trees()))
def test_tree_mask_and_slots_match_the_history(turn):
    """Each tail slot is the KV slot of its draft token, and the mask is 1 exactly for slots that a row does not see."""
    rig = Harness(BackendUnderTest(load("ascend_npu"), "cpu", Tier.HOST), turn.geometry, 1)
    turn = place(rig, turn)
    batch = rig.tensors.set(turn, "exact")
    rig.backend.plan(batch)
    rig.backend.write_metadata(batch)
    if not is_tree(batch):
        assert batch.q_lens[0] == 1
        return
    found = rig.backend._metadata.tree(batch)
    slots, mask, has_prefix = found.slots.view(len(turn.requests), -1).tolist(), found.mask.tolist(), found.has_prefix
    for n, one in enumerate(turn.requests):
        assert has_prefix[n].item() == float(one.prefix > 0)
        if one.live:
            assert slots[n] == list(kv_slots(one, turn.geometry.attention.page_size)[-one.tail :])
            for row in range(one.rows):
                seen = set(one.seen(one.own_slot(row)))
                assert mask[n][0][row] == [int(slot not in seen) for slot in range(one.tail)]
