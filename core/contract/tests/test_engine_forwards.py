"""Tests that the `engine` checks find defects in optional tensor layouts and modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import draftmark
from draftmark.geometry import LAYOUT_FORMS, Mode
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.engine_forwards import blocks, captures, forms, of_the_device
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_reference import backend as reference

Patch = Callable[[pytest.MonkeyPatch], None]
ITEMS = {one.id: one for one in all_items((Tier.HOST,)) if one.check.name.startswith("engine.")}


def _run(item: str) -> Result:
    return run_item(ITEMS[item], BackendUnderTest(draftmark.load("reference"), "cpu", Tier.HOST), [])


def _ignore_slots(patch: pytest.MonkeyPatch) -> None:
    whole = reference.ReferenceBackend.write_metadata
    patch.setattr(reference.ReferenceBackend, "write_metadata", lambda self, b: whole(self, replace(b, slots=None)))


def _causal_blocks(patch: pytest.MonkeyPatch) -> None:
    def visibility(kv_lens: torch.Tensor, q_len: int, width: int, window: int) -> torch.Tensor:
        positions = (kv_lens - q_len)[:, None] + torch.arange(q_len, dtype=torch.int32)
        return reference.causal_visibility(positions, width, window)

    patch.setattr(reference, "block_visibility", visibility)


def _padding_rows_are_stored(patch: pytest.MonkeyPatch) -> None:
    whole = reference._rows

    def rows(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers, request, owned = whole(batch)
        return numbers, request, torch.ones_like(owned)

    patch.setattr(reference, "_rows", rows)


def _bounds_for_facts(patch: pytest.MonkeyPatch) -> None:
    """Lay out rows by the host's upper bound of each request's rows, instead of the device's exact number."""
    whole = reference.ReferenceBackend.write_metadata

    def write(self: Any, batch: Any) -> None:
        bounds = torch.tensor([0, *batch.q_lens], dtype=torch.int32).cumsum(0).int()
        whole(self, replace(batch, q_indptr=bounds.clamp(max=batch.num_rows)))

    patch.setattr(reference.ReferenceBackend, "write_metadata", write)


def _contiguous_copies(patch: pytest.MonkeyPatch) -> None:
    whole = reference.ReferenceBackend.write_kv

    def write(self: Any, k: Any, v: Any, cache: Any, batch: Any) -> None:
        whole(self, k, v, replace(cache, k=cache.k.contiguous(), v=cache.v.contiguous()), batch)

    patch.setattr(reference.ReferenceBackend, "write_kv", write)


WRONG: list[tuple[Patch, str]] = [
    (_ignore_slots, "engine.forms_are_taken_as_they_are[engine_slots-page16-decode]"),
    (_contiguous_copies, "engine.forms_are_taken_as_they_are[strided_kv-page16-decode]"),
    (_causal_blocks, "engine.blocks_see_themselves[page16]"),
    (_padding_rows_are_stored, "engine.rows_are_the_devices[page16-chain]"),
    (_bounds_for_facts, "engine.rows_are_the_devices[page16-random]"),
    (_bounds_for_facts, "engine.graphs_follow_the_device[page16-ragged_verify]"),
]


@pytest.mark.parametrize(("wrong", "item"), WRONG, ids=[f"{wrong.__name__}-{item}" for wrong, item in WRONG])
def test_a_wrong_backend_fails(wrong: Patch, item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item passes on the correct reference, and fails when the tested part of the reference is broken."""
    assert _run(item).outcome is Outcome.PASSED
    wrong(monkeypatch)
    found = _run(item)
    assert found.outcome is Outcome.FAILED, found


def test_every_mode_and_form_has_cases() -> None:
    """Cases cover each optional mode, each optional tensor layout in each mode, and ragged batches, padded and not."""
    ragged = [case.value for case in of_the_device()]
    assert {one.mode for one in ragged} == {Mode.RAGGED_VERIFY}
    assert {one.budget > len(one.rows) for one in ragged} == {True, False}
    assert {case.value.mode for case in blocks()} == {Mode.DRAFT_BLOCK}
    assert {case.value[0].mode for case in captures()} == {Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK}
    found = {(form, case.value.mode) for case in forms() for form in case.value.geometry.forms}
    assert found == {(form, mode) for form in LAYOUT_FORMS for mode in Mode}
