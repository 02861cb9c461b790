"""Tests that drawn histories contain every mode, engine form and event, and that a failing one is shortened."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest

import draftmark
from draftmark.geometry import LAYOUT_FORMS, Form, Geometry, Mode
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.forwards import ForwardCase
from draftmark_contract.cases.graph_rounds import programs_of
from draftmark_contract.cases.histories import CALLS, KV_LAYOUTS, Engine, Step, drawn
from draftmark_contract.cases.history_profiles import profiles
from draftmark_contract.cases.turns import forward_of, orders, triples
from draftmark_contract.check import Case, ContractViolation, Tier
from draftmark_contract.checks import random_history, turns
from draftmark_reference.backend import ReferenceBackend

ALL_MODES = [geometry for geometry in profiles().values() if geometry.modes == tuple(Mode)]


def _steps(geometry: Geometry) -> list[Step]:
    dice = random.Random(7)
    return [step for _ in range(60) for step in Engine(geometry).steps(drawn(dice, 16))]


def test_histories_contain_every_mode_eagerly_and_in_graphs() -> None:
    """Every mode is drawn eagerly, every mode except EXTEND in a graph, and each of them fails at some time."""
    steps = _steps(profiles()["seven"])
    assert {one.forward.mode for one in steps if one.program is None} == set(Mode)
    assert {one.forward.mode for one in steps if one.program is not None} == set(Mode) - {Mode.EXTEND}
    assert {one.failure.call for one in steps if one.failure} == set(range(len(CALLS)))
    assert any(one.sleeps for one in steps) and any(one.shared for one in steps)


def test_histories_contain_every_engine_form() -> None:
    """Slots of -1 for some rows and for all, every table layout, every KV layout, and layers without write_kv."""
    steps = _steps(profiles()["seven-forms"])
    assert {one.table for one in steps} == {0, 1, 2, 3} and {one.kv for one in steps} == {*range(KV_LAYOUTS)}
    stored = {len(one.forward.unstored) < one.forward.live_rows for one in steps if one.forward.unstored}
    assert stored == {True, False}
    assert any(one.forward.shares_kv for one in steps)
    alone = {geometry.forms for geometry in ALL_MODES}
    assert alone >= {(), (Form.ENGINE_SLOTS,), (Form.ENGINE_TABLE,), (Form.STRIDED_KV,), LAYOUT_FORMS}


def test_rows_change_while_the_hosts_numbers_stay() -> None:
    """Some ragged verify has the host numbers of the one before, but other rows on the device."""
    ragged = [one.forward for one in _steps(profiles()["seven"]) if one.forward.mode is Mode.RAGGED_VERIFY]
    kept = [
        (first, second)
        for first, second in pairwise(ragged)
        if (first.bounds, first.budget, first.live) == (second.bounds, second.budget, second.live)
        and [one.rows for one in first.requests] != [one.rows for one in second.requests]
    ]
    assert kept


def test_a_failing_history_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is wrong after a draft block fails, and the message lists fewer steps than were drawn."""
    whole = ReferenceBackend.plan

    def plan(self: ReferenceBackend, batch: object) -> None:
        whole(self, batch)  # type: ignore[arg-type]
        blocks = vars(self).setdefault("blocks", [])
        if blocks and batch.mode is Mode.DECODE:  # type: ignore[attr-defined]
            self._widths = (1,) * len(self._widths)
        if batch.mode is Mode.DRAFT_BLOCK:  # type: ignore[attr-defined]
            blocks.append(1)

    monkeypatch.setattr(ReferenceBackend, "plan", plan)
    subject = BackendUnderTest(draftmark.load("reference"), "cpu", Tier.HOST)
    with pytest.raises(ContractViolation) as caught:
        for slot in range(6):
            random_history.equals_the_oracle(subject, (profiles()["seven"], slot))
    steps = [line for line in str(caught.value.details["batch"]).split("\n    ") if line[0].isdigit()]
    assert len(steps) <= 4 and "draft_block" in str(steps[:-1]) and "decode" in steps[-1]


def test_orders_interleave_every_call() -> None:
    """Each order contains every call of each geometry; the first ones are regular, and all of them differ."""
    found = list(islice(orders([4, 2, 4], random.Random(1)), 10))
    assert all(sorted(order) == [0] * 4 + [1] * 2 + [2] * 4 for order in found)
    assert found[0] == [0, 1, 2, 0, 1, 2, 0, 2, 0, 2]
    assert len({tuple(order) for order in found}) == len(found)


@pytest.mark.parametrize("case", triples(), ids=lambda case: case.id)
def test_turns_draw_chains_for_topk_1(case: Case) -> None:
    """A geometry of topk 1 gets causal chains, eagerly and in graphs; one of a larger topk also gets trees."""
    for geometry in dict.fromkeys(case.value.geometries):
        dice = random.Random(case.id)
        forwards = [forward_of(geometry, dice) for _ in range(200)]
        forwards += [one for program in programs_of(geometry) for one in turns._rounds(geometry, program)]
        drafted = [one for one in forwards if one.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.DRAFT)]
        assert {one.mode for one in drafted} == {*geometry.modes} & {Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.DRAFT}
        chains = [one.causal for one in drafted]
        assert all(chains) if geometry.draft.topk == 1 else not any(chains), geometry.draft
        assert any(map(_branches, drafted)) == (geometry.draft.topk > 1), geometry.draft


def _branches(forward: ForwardCase) -> bool:
    """Return True if a live request of the forward has a tree that is no chain."""
    return any(one.live and one.parents != tuple(range(-1, one.tail - 1)) for one in forward.requests)


@pytest.mark.parametrize("case", triples(), ids=lambda case: case.id)
def test_a_violation_names_the_order_of_calls(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that keeps its plan in the class is wrong next to others, and the message has the order of calls."""
    monkeypatch.setattr(
        ReferenceBackend,
        "_widths",
        property(lambda self: ReferenceBackend.kept, lambda self, widths: setattr(ReferenceBackend, "kept", widths)),
        raising=False,
    )
    subject = BackendUnderTest(draftmark.load("reference"), "cpu", Tier.HOST)
    with pytest.raises((ContractViolation, RuntimeError, IndexError)) as caught:
        turns.of_three_geometries_are_right(subject, case.value)
    assert "geometry.call in order" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
