"""Tests of batches with recurrent state: buffers, validation, parents, digests and guard mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import (
    AttentionShape,
    BackendInfo,
    BackendPlugin,
    BackendRefusal,
    BatchError,
    DraftShape,
    Gate,
    Geometry,
    GeometryError,
    Limits,
    Mode,
    Recurrence,
    StateGeometry,
    StateShape,
)
from draftmark.loaded import LoadedBackend
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    StatePool,
    TorchTreeOps,
    VerifyResult,
    ragged,
    validate,
    write_tail,
)
from draftmark_reference import ReferencePlugin

MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY)
LIMITS, DRAFT = Limits(3, 64), DraftShape(2, 3, 4)
ATTENTION = Geometry.create(AttentionShape(2, 1, 8, 16, "float32", "float32"), LIMITS, DRAFT, modes=MODES)
STATE = StateGeometry.create(
    StateShape(Recurrence.DELTA, Gate.HEAD, 2, 1, 4, 3, 8, 4, "float32", "float32", "float32"), LIMITS, DRAFT
)
PARENTS = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]])


def verify_batch(mode: Mode = Mode.VERIFY):
    """Return a VERIFY batch of two live requests of a hybrid model, with its tree written."""
    buffers = BatchBuffers(ATTENTION, "cpu", STATE)
    if mode is Mode.RAGGED_VERIFY:
        return buffers.ragged_verify(10, 2, Exact((5, 0)), tree=True)
    batch = buffers.uniform(mode, 0, 3, 2, Exact((5, 0)), tree=True)
    batch.prefix_lens.copy_(torch.tensor([5, 0, 0]))
    batch.state_slots.copy_(torch.tensor([2, 3, 0]))
    batch.page_table.copy_(torch.arange(1, 1 + batch.page_table.numel()).view_as(batch.page_table))
    write_tail(batch, ATTENTION, PARENTS)
    return batch


def test_one_batch_fits_both_geometries() -> None:
    """A hybrid's batch has slots and parents, and matches its attention layers and its recurrent layers."""
    batch = verify_batch()
    assert torch.equal(batch.tail.parents.long(), PARENTS)
    assert batch.tail.parents.dtype is torch.int32 and batch.state_slots.dtype is torch.int32
    assert validate(batch, ATTENTION) is validate(batch, STATE) is batch
    flat = verify_batch(Mode.RAGGED_VERIFY)
    assert flat.tail.parents.shape == flat.tail.depth.shape == (10,)
    assert validate(flat, ATTENTION) is validate(flat, STATE) is flat


def test_attention_alone_has_neither() -> None:
    """Buffers without state give batches without slots and parents; `write_tail` accepts them."""
    buffers = BatchBuffers(ATTENTION, "cpu")
    batch = buffers.uniform(Mode.VERIFY, 0, 3, 2, Exact((5, 0)), tree=True)
    assert (buffers.parents, buffers.state_slots, batch.state_slots, batch.tail.parents) == (None,) * 4
    write_tail(batch, ATTENTION, PARENTS)
    with pytest.raises(BatchError, match="state_slots is None"):
        validate(batch, STATE)


def test_a_model_without_attention_has_no_pages() -> None:
    """A state geometry sizes buffers by itself; its page table has no columns."""
    batch = BatchBuffers(STATE, "cpu").uniform(Mode.DECODE, 0, 2, 2, Exact((0, 0)), tree=False)
    assert batch.page_table.shape == (2, 0)
    validate(batch, STATE)
    slots = torch.zeros(2, dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    made = ragged(STATE, lens, batch.page_table, (2, 3), Exact((0, 0)), state_slots=slots)
    validate(made, STATE)
    with pytest.raises(BatchError, match="state_slots is None"):
        ragged(STATE, lens, batch.page_table, (2, 3), Exact((0, 0)))


def test_buffers_of_different_limits_are_refused() -> None:
    """Attention and state layers share the draft shape and the limits."""
    other = replace(STATE, limits=replace(LIMITS, max_num_reqs=4))
    with pytest.raises(GeometryError, match="limits"):
        BatchBuffers(ATTENTION, "cpu", other)
    with pytest.raises(BatchError, match="StateGeometry"):
        BatchBuffers(ATTENTION, "cpu", ATTENTION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: replace(b, state_slots=b.state_slots.long()), "state_slots"),
        (lambda b: replace(b, state_slots=b.state_slots[:2]), "state_slots"),
        (lambda b: replace(b, tail=replace(b.tail, parents=None)), "parents is None"),
        (lambda b: replace(b, tail=replace(b.tail, parents=b.tail.parents.long())), "tail.parents"),
        (lambda b: replace(b, tail=replace(b.tail, parents=b.tail.parents.flatten())), "tail.parents"),
    ],
)
def test_wrong_slots_and_parents_are_refused(change, words) -> None:
    """A state layer needs int32 slots of each request, and parents where depth is."""
    with pytest.raises(BatchError, match=words):
        validate(change(verify_batch()), STATE)


class _OldTreeOps:
    """Tree operations of a plugin that has never heard of parents."""

    def __init__(self) -> None:
        self.own = TorchTreeOps(ATTENTION)
        self.verify_tree, self.compact = self.own.verify_tree, self.own.compact

    def write_tail(self, batch, parents=None) -> None:
        """Write mask, depth and positions only."""
        self.own.write_tail(replace(batch, tail=replace(batch.tail, parents=None)), parents)


class _OldPlugin(ReferencePlugin):
    info = BackendInfo("old", "any", 5, True, modes=MODES)

    def tree_ops(self, geometry, device):
        return _OldTreeOps()


@pytest.mark.parametrize("guard", ["0", "1"])
def test_old_tree_operations_write_parents_too(guard, monkeypatch) -> None:
    """The core adds the parents to the kernels of a plugin that does not write them."""
    monkeypatch.setenv("DRAFTMARK_GUARD", guard)
    batch = verify_batch()
    batch.tail.parents.fill_(77)
    LoadedBackend("old", _OldPlugin()).tree_ops(ATTENTION, torch.device("cpu")).write_tail(batch, PARENTS)
    assert torch.equal(batch.tail.parents.long(), PARENTS)


def test_a_plugin_without_hooks_serves_no_state() -> None:
    """A plugin that lists no recurrence is refused by name, and a wrong geometry by its type."""
    backend = LoadedBackend("old", _OldPlugin())
    with pytest.raises(BackendRefusal, match="recurrence delta is not served"):
        backend.open_state(STATE, "cpu")
    assert BackendPlugin.state_supports(backend.plugin, STATE) == []  # type: ignore[arg-type]
    assert BackendPlugin.state_buffers(backend.plugin, STATE) == []  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match="StateGeometry"):
        LoadedBackend("reference", ReferencePlugin()).state_supports(ATTENTION)  # type: ignore[arg-type]


# -- guard mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.state_slots.copy_(torch.tensor([2, 2, 0])), "both have state slot 2"),
        (lambda b: b.state_slots.copy_(torch.tensor([2, 3, -1])), "-1"),
        (lambda b: b.tail.parents[0].copy_(torch.tensor([-1, 0, 1, 1])), "tail.parents of slot 2"),
        (lambda b: b.tail.parents[1].copy_(torch.tensor([-1, 0, 2, 2])), "tail.parents of slot 2"),
        (lambda b: b.tail.parents[1].copy_(torch.tensor([-1, 0, 1, -2])), "tail.parents of slot 3"),
    ],
)
def test_guard_names_wrong_contents(change, words) -> None:
    """Shared slots, negative slots, and parents that contradict the mask are named before a kernel runs."""
    guarded = LoadedBackend("reference", ReferencePlugin()).open_state(STATE, "cpu", guard=True)
    batch = verify_batch()
    change(batch)
    guarded.plan(batch)
    with pytest.raises(BatchError, match=words):
        guarded.write_metadata(batch)


def _calls():
    """Return a guarded backend after write_metadata, its batch, its pool and good inputs."""
    guarded = LoadedBackend("reference", ReferencePlugin()).open_state(STATE, "cpu", guard=True)
    batch, pool = verify_batch(), StatePool(STATE, 6, 1, "cpu")
    guarded.plan(batch)
    guarded.write_metadata(batch)
    rows = batch.num_rows
    recur = [
        torch.zeros(rows, 1, 4), torch.zeros(rows, 1, 4), torch.zeros(rows, 2, 3), torch.zeros(rows, 2),
        torch.zeros(rows, 2), pool.layers[0], batch, torch.zeros(rows, 2, 3),
    ]  # fmt: skip
    convolve = [torch.zeros(rows, 8), torch.zeros(8, 4), None, pool.layers[0], batch, torch.zeros(rows, 8)]
    path = torch.arange(4).repeat(3, 1)
    commit = [pool, batch, VerifyResult(path, torch.ones(3, dtype=torch.int64), path), None]
    return guarded, {"recur": recur, "convolve": convolve, "commit": commit}


@pytest.mark.parametrize("call", ["recur", "convolve", "commit"])
def test_guard_passes_good_calls(call) -> None:
    """Good calls reach the backend."""
    guarded, calls = _calls()
    getattr(guarded, call)(*calls[call])


@pytest.mark.parametrize(
    ("call", "index", "value", "words"),
    [
        ("recur", 0, torch.zeros(12, 2, 4), "q is"),
        ("recur", 2, torch.zeros(12, 2, 3).double(), "v is"),
        ("recur", 3, torch.zeros(12, 2, 4), "log_decay is"),
        ("recur", 4, None, "beta is"),
        ("recur", 7, torch.zeros(12, 3, 2).transpose(1, 2), "out has strides"),
        ("recur", 7, torch.zeros(11, 2, 3), "out is"),
        ("convolve", 1, torch.zeros(8, 3), "weight is"),
        ("convolve", 2, torch.zeros(7), "bias is"),
        ("convolve", 5, torch.zeros(12, 9), "out is"),
        ("commit", 2, None, "accepted is None"),
        ("commit", 3, torch.tensor([2, 5, 0], dtype=torch.int32), "save_slots"),
        ("commit", 3, torch.tensor([5, 5, 0], dtype=torch.int32), "save_slots"),
        ("commit", 3, torch.tensor([4, 6, 0], dtype=torch.int32), "save_slots"),
        ("commit", 3, torch.tensor([4, 5, 0]), "save_slots"),
    ],
)
def test_guard_names_wrong_arguments(call, index, value, words) -> None:
    """The error of the guard names each wrong tensor."""
    guarded, calls = _calls()
    calls[call][index] = value
    with pytest.raises(BatchError, match=words):
        getattr(guarded, call)(*calls[call])


def test_guard_names_a_count_above_the_rows() -> None:
    """More accepted rows than verified ones are refused (Avarok atlas#604)."""
    guarded, calls = _calls()
    pool, batch, accepted, _ = calls["commit"]
    with pytest.raises(BatchError, match="accept_lens"):
        guarded.commit(pool, batch, accepted._replace(accept_lens=torch.tensor([1, 5, 1])))


def test_guard_names_a_batch_that_was_not_planned() -> None:
    """A layer before write_metadata, and metadata before plan, are refused."""
    guarded = LoadedBackend("reference", ReferencePlugin()).open_state(STATE, "cpu", guard=True)
    with pytest.raises(BatchError, match="plan did not get"):
        guarded.write_metadata(verify_batch())
    _, calls = _calls()
    with pytest.raises(BatchError, match="write_metadata did not get last"):
        guarded.recur(*calls["recur"])
