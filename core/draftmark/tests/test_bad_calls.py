"""Wrong calls of the engine API raise a one-sentence error: always, or in guard mode if the check reads the device."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.draftmark.tests.bad_calls import LENS, Rig
from core.draftmark.tests.free_calls import FREE
from core.draftmark.tests.guarded_calls import GUARDED
from draftmark import DraftmarkError, Mode, cache, commit, lengths, tree
from draftmark.batch import buffers
from draftmark.guard import GUARD_VARIABLE
from draftmark.runtime import Exact, TorchTreeOps
from draftmark_reference.backend import ReferenceBackend

CHECKS = [
    (buffers, "check_uniform"),
    (buffers, "check_ragged_verify"),
    (buffers, "check_ragged"),
    (tree, "check_tail"),
    (tree, "check_verify"),
    (tree, "check_accepted"),
    (cache, "check_slots_of_pool"),
    (cache, "check_positions"),
    (lengths, "check_advance"),
    (commit, "check_commit"),
]
"""Modules and names of the checks that a good step passes."""


def refused(call, rig, words):
    """Require an error of draftmark with one sentence: the expected words, a limit and a remedy."""
    with pytest.raises(DraftmarkError) as error:
        call(rig)
    text = str(error.value)
    assert words in text, text
    assert "\n" not in text and "; " in text, text


def test_at_least_122_calls_are_tried():
    """The lists of wrong calls contain at least 122 calls."""
    assert len(FREE) >= 122 and len(GUARDED) >= 60


@pytest.mark.parametrize("guard", ["0", "1"], ids=["plain", "guard"])
@pytest.mark.parametrize("name", FREE)
def test_bad_calls_are_refused_at_once(monkeypatch, name, guard):
    """A wrong host value, shape or type raises one sentence at once, with and without guard mode."""
    monkeypatch.setenv(GUARD_VARIABLE, guard)
    refused(FREE[name][0], Rig(), FREE[name][1])


@pytest.mark.parametrize("name", GUARDED)
def test_guard_mode_refuses_bad_calls(monkeypatch, name):
    """With DRAFTMARK_GUARD=1 wrong contents of device tensors raise one sentence."""
    monkeypatch.setenv(GUARD_VARIABLE, "1")
    refused(GUARDED[name][0], Rig(), GUARDED[name][1])


@pytest.mark.parametrize("guard", ["0", "1"], ids=["plain", "guard"])
def test_good_calls_pass(monkeypatch, guard):
    """The correct forward passes with and without guard mode, and the outputs are equal."""
    monkeypatch.setenv(GUARD_VARIABLE, guard)
    torch.manual_seed(0)
    rig = Rig()
    out = rig.forward().clone()
    rig.tree_ops.compact(rig.pool, rig.batch, rig.verify())
    rig.lengths.advance(torch.tensor([0, 5, 5]), torch.tensor([3, 1, 1]))
    assert out.isfinite().all()
    torch.manual_seed(0)
    monkeypatch.setenv(GUARD_VARIABLE, "0")
    torch.testing.assert_close(out, Rig().forward(), rtol=0, atol=0)


class Counter(TorchDispatchMode):
    """Counts dispatched operators, and operators that read a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.operators, self.reads = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        self.reads += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("absent", ["draftmark_tools", "draftmark_tools.guard"])
def test_guard_mode_without_its_checks_is_refused(monkeypatch, absent):
    """Without the distribution draftmark, DRAFTMARK_GUARD=1 and checked=True raise one sentence."""
    for name in {absent, "draftmark_tools.guard"}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv(GUARD_VARIABLE, "0")
    rig = Rig()
    rig.forward()
    words = "guard mode needs draftmark_tools.guard, which is not installed; run `pip install draftmark`"
    refused(lambda _: rig.loaded.open(rig.geometry, "cpu", checked=True), rig, words)
    monkeypatch.setenv(GUARD_VARIABLE, "1")
    refused(lambda _: Rig(), rig, words)
    refused(lambda _: rig.lengths.advance(torch.tensor([0]), torch.tensor([1])), rig, words)


def test_checks_are_free_without_guard(monkeypatch):
    """Without guard, checks dispatch no operator and read nothing on the host; no wrapper surrounds the backend."""
    monkeypatch.delenv(GUARD_VARIABLE, raising=False)
    rig = Rig()
    assert type(rig.backend) is ReferenceBackend and type(rig.tree_ops) is TorchTreeOps

    def step():
        with Counter() as seen:
            rig.uniform(Mode.VERIFY, 0, 2, 2, Exact(LENS), tree=True)
            rig.buffers.ragged_verify(8, 2, Exact(LENS), tree=True)
            rig.extend()
            rig.fill()
            rig.forward()
            rig.verify()
            rig.lengths.advance(torch.tensor([0]), torch.tensor([1]))
            rig.tree_ops.compact(rig.pool, rig.batch, rig.accepted())
            rig.commit()
        return seen.operators, seen.reads

    step()  # the first call fills caches, so its operators are not counted
    checked = step()
    for module, name in CHECKS:
        returns = (lambda _, budget, *rest: (3, (4,) * 3)) if name == "check_ragged_verify" else (lambda *_: None)
        monkeypatch.setattr(module, name, returns)
    assert step() == checked
    assert checked[1] == 0


def test_a_capture_is_not_read(monkeypatch):
    """In guard mode a captured region is checked without device reads, and replays equal eager steps."""
    from draftmark.runtime import GraphKey, Program, graph_state_for

    monkeypatch.setenv(GUARD_VARIABLE, "1")
    rig = Rig()
    want = rig.forward().clone()
    rig.backend.plan(rig.batch)

    def step():
        rig.backend.write_metadata(rig.batch)
        rig.backend.write_kv(rig.k, rig.v, rig.cache, rig.batch)
        rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out)
        return rig.out

    graphs = graph_state_for(torch.device("cpu"))
    graphs.capture(GraphKey(Program.VERIFY, 2), step)
    rig.out.zero_()
    rig.backend.plan(rig.batch)
    torch.testing.assert_close(graphs.replay(GraphKey(Program.VERIFY, 2)), want, rtol=0, atol=0)
