"""Tree operations: the core's own, and a backend's operations from the optional hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark import Mode
from draftmark.batch import BatchBuffers
from draftmark.errors import BackendHookError, LoadFailure
from draftmark.hookspecs import HOOKS, hooks_of
from draftmark.lengths import Unknown
from draftmark.loaded import LoadedBackend
from draftmark.tree import TorchTreeOps, TreeOps, write_tail
from draftmark_reference import ReferencePlugin

CPU = torch.device("cpu")


def offering(ops):
    """Return the reference backend with a `tree_ops` hook that returns, or raises, `ops`."""

    class Offering(ReferencePlugin):
        def tree_ops(self, geometry, device):
            if isinstance(ops, Exception):
                raise ops
            return ops

    return LoadedBackend("reference", Offering())


def test_a_backend_without_the_hook_gets_torch_operations(make_geometry):
    """A plugin without the optional hook loads and gets torch operations."""
    assert "draftmark_tree_ops" not in HOOKS
    reference = ReferencePlugin()
    bare = SimpleNamespace(**{name: vars(hooks_of(reference))[name] for name in HOOKS})
    for plugin in (bare, reference):
        assert isinstance(LoadedBackend("reference", plugin).tree_ops(make_geometry(), CPU), TorchTreeOps)


def test_a_hook_that_returns_none_gets_torch_operations(make_geometry):
    """A `tree_ops` hook that returns None, for a device without tree kernels, selects torch operations."""
    assert isinstance(offering(None).tree_ops(make_geometry(), CPU), TorchTreeOps)


def test_tree_ops_of_the_hook_are_returned(make_geometry):
    """`tree_ops` returns the object of the hook unchanged."""
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
def test_a_broken_tree_ops_hook_raises_a_hook_error(make_geometry, offer, failure, says):
    """A wrong type or an exception of tree_ops raises the same error as for any other hook."""
    with pytest.raises(BackendHookError, match=says) as caught:
        offering(offer).tree_ops(make_geometry(), CPU)
    assert (caught.value.hook, caught.value.failure) == ("tree_ops", failure)


def test_rows_of_a_draft_step_are_its_last_slots(make_geometry):
    """In DRAFT step 1 with topk 2, the query rows are tail slots 2 and 3; the parents of these slots are 1 and 0."""
    from draftmark import DRAFT_MODES

    geometry = make_geometry(topk=2, num_steps=3, num_draft_tokens=4, modes=DRAFT_MODES)
    batch = BatchBuffers(geometry, CPU).uniform(Mode.DRAFT, 1, 1, 1, Unknown(1, geometry.max_prefix_len), tree=True)
    batch.prefix_lens.fill_(5)
    write_tail(batch, geometry, torch.tensor([[-1, -1, 1, 0]]))
    assert batch.tail.depth.tolist() == [[0, 0, 1, 1]]
    assert [row[0] for row in batch.tail.mask.tolist()] == [0b0110, 0b1001]
    assert batch.positions.tolist() == [6, 6]
