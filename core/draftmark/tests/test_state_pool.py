"""Tests of the pool of state slots, and of the lengths of checkpoints."""

from __future__ import annotations

import pytest
import torch

from draftmark import BatchError, BufferError, Gate, Limits, Recurrence, StateGeometry, StateShape
from draftmark.runtime import StatePool, checkpoint_lens

SHAPE = StateShape(Recurrence.DELTA, Gate.HEAD, 2, 1, 4, 3, 8, 4, "float32")
GEOMETRY = StateGeometry.create(SHAPE, Limits(3, 64), num_layers=2)


@pytest.fixture
def pool() -> StatePool:
    """Return a pool of seven slots; two are null slots."""
    return StatePool(GEOMETRY, 7, 2, "cpu")


def test_pool_has_one_view_per_layer(pool) -> None:
    """The pool's shapes follow from the geometry, and a layer's cache is a view that names the layer."""
    assert pool.state.shape == (2, 7, 2, 3, 4) and pool.state.dtype is torch.float32
    assert pool.conv.shape == (2, 7, 8, 3) and pool.conv.dtype is torch.bfloat16
    assert not pool.state.any() and not pool.conv.any()
    for layer, cache in enumerate(pool.layers):
        assert cache.layer == layer
        assert cache.state.data_ptr() == pool.state[layer].data_ptr()
        assert cache.conv.data_ptr() == pool.conv[layer].data_ptr()


def test_copy_reads_before_it_writes(pool) -> None:
    """Two slots swap in every layer, states and windows, and other slots keep their bytes."""
    pool.state.copy_(torch.randn(pool.state.shape))
    pool.conv.copy_(torch.randn(pool.conv.shape))
    state, conv = pool.state.clone(), pool.conv.clone()
    pool.copy(torch.tensor([3, 5]), torch.tensor([5, 3]))
    order = [0, 1, 2, 5, 4, 3, 6]
    assert torch.equal(pool.state, state[:, order]) and torch.equal(pool.conv, conv[:, order])


@pytest.mark.parametrize("source", [torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.tensor([1, 2]), 1])
def test_copy_refuses_other_tensors(pool, source) -> None:
    """Slots are two int64 lists of one length."""
    with pytest.raises(BatchError, match=r"source|target"):
        pool.copy(source, torch.tensor([2]))


@pytest.mark.parametrize("counts", [(1, 1), (4, 0), (4, 4), (4.0, 1), (4, True)])
def test_pools_need_a_null_slot_and_another(counts) -> None:
    """A pool has at least one null slot and one slot of a request."""
    with pytest.raises(BufferError):
        StatePool(GEOMETRY, *counts, "cpu")


@pytest.mark.parametrize(
    ("prefix", "count", "interval", "expected"),
    [(0, 3, 4, 0), (0, 4, 4, 4), (3, 1, 4, 4), (3, 6, 4, 8), (4, 3, 4, 0), (4, 0, 4, 0), (5, 9, 4, 12), (7, 9, 0, 0)],
)
def test_checkpoint_is_the_largest_multiple_reached(prefix, count, interval, expected) -> None:
    """A checkpoint lies after the prefix and at or before the end of the round."""
    found = checkpoint_lens(torch.tensor([prefix], dtype=torch.int32), torch.tensor([count]), interval)
    assert found.tolist() == [expected] and found.dtype is torch.int32


def test_pool_over_an_engines_tensors() -> None:
    """A pool over an engine's slots writes nothing and keeps their strides: here windows lie as [window, channels]."""
    state, windows = torch.randn(2, 7, 2, 3, 4), torch.randn(2, 7, 3, 8).bfloat16()
    before = state.clone(), windows.clone()
    pool = StatePool.over(GEOMETRY, state, windows.transpose(2, 3), 2)
    assert torch.equal(state, before[0]) and torch.equal(windows, before[1])
    assert (pool.num_slots, pool.null_slots, len(pool.layers)) == (7, 2, 2)
    pool.copy(torch.tensor([3]), torch.tensor([5]))
    assert torch.equal(state[:, 5], before[0][:, 3]) and torch.equal(windows[:, 5], before[1][:, 3])
    assert pool.layers[1].conv.data_ptr() == windows[1].data_ptr()


def test_pool_over_other_tensors_is_refused() -> None:
    """Tensors of another shape or dtype than the geometry's are refused."""
    state, conv = torch.zeros(2, 7, 2, 3, 4), torch.zeros(2, 7, 8, 3).bfloat16()
    with pytest.raises(BatchError, match="conv is bfloat16"):
        StatePool.over(GEOMETRY, state, conv.transpose(2, 3), 1)
    with pytest.raises(BatchError, match="state is float64"):
        StatePool.over(GEOMETRY, state.double(), conv, 1)
    with pytest.raises(BufferError, match="null_slots"):
        StatePool.over(GEOMETRY, state, conv, 7)
