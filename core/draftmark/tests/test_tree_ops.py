"""Tree operations: the core's own, and those that a backend offers through the optional hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark import Mode
from draftmark.batch import BatchBuffers
from draftmark.errors import BackendHookError, LoadFailure
from draftmark.hookspecs import HOOKS
from draftmark.lengths import Unknown
from draftmark.loaded import LoadedBackend
from draftmark.reference import ReferencePlugin
from draftmark.tree import TorchTreeOps, TreeOps, write_tail

CPU = torch.device("cpu")


def offering(ops):
    """The reference with `tree_ops` that gives `ops`."""

    class Offering(ReferencePlugin):
        def tree_ops(self, geometry, device):
            if isinstance(ops, Exception):
                raise ops
            return ops

    return LoadedBackend("reference", Offering())


def test_a_backend_without_the_hook_gets_the_cores_operations(make_geometry):
    """Without an implementation, since the hook is not among the required ones."""
    assert "draftmark_tree_ops" not in HOOKS
    reference = ReferencePlugin()
    bare = SimpleNamespace(**{name: getattr(reference, name) for name in HOOKS})
    for plugin in (bare, reference):
        assert isinstance(LoadedBackend("reference", plugin).tree_ops(make_geometry(), CPU), TorchTreeOps)


def test_a_backend_that_has_none_for_a_device_gets_the_cores_operations(make_geometry):
    """None means that the kernels do not run there."""
    assert isinstance(offering(None).tree_ops(make_geometry(), CPU), TorchTreeOps)


def test_an_offer_is_taken(make_geometry):
    """The very object that the hook returned."""
    own = TorchTreeOps(make_geometry())
    assert isinstance(own, TreeOps)
    assert offering(own).tree_ops(make_geometry(), CPU) is own


@pytest.mark.parametrize(
    ("offer", "failure", "says"),
    [
        (SimpleNamespace(walk=None), LoadFailure.WRONG_RETURN, "write_tail, verify_tree, compact"),
        (RuntimeError("no compiler"), LoadFailure.HOOK_RAISED, "no compiler"),
    ],
)
def test_a_broken_offer_is_an_error_of_its_hook(make_geometry, offer, failure, says):
    """It reads like the failure of any other hook."""
    with pytest.raises(BackendHookError, match=says) as caught:
        offering(offer).tree_ops(make_geometry(), CPU)
    assert (caught.value.hook, caught.value.failure) == ("tree_ops", failure)


def test_a_draft_steps_rows_are_its_last_slots(make_geometry):
    """Step 1 of topk 2: slots 2 and 3 continue slots 1 and 0 of a forest, and only they have rows."""
    from draftmark import DRAFT_MODES

    geometry = make_geometry(topk=2, num_steps=3, num_draft_tokens=4, modes=DRAFT_MODES)
    batch = BatchBuffers(geometry, CPU).uniform(Mode.DRAFT, 1, 1, 1, Unknown(1, geometry.max_prefix_len), tree=True)
    batch.prefix_lens.fill_(5)
    write_tail(batch, geometry, torch.tensor([[-1, -1, 1, 0]]))
    assert batch.tail.depth.tolist() == [[0, 0, 1, 1]]
    assert [row[0] for row in batch.tail.mask.tolist()] == [0b0110, 0b1001]
    assert batch.positions.tolist() == [6, 6]
