"""Tests with a backend that declares an opaque layout: metadata that the suite cannot decode counts as unjudged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from verdicts import judge

from draftmark import Geometry
from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.layouts import Layout
from draftmark_contract.runner.item import Item, all_items, run_item
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.verdict import Word

from . import catalog
from .mutant import Mutant

torch.set_num_threads(1)
BY_METADATA = "metadata.decodes_to_the_token_history[target-verify-edges]"
BY_OUTPUT = "padding.changes_no_live_byte[target-verify-3of8]"
BY_BOTH = (BY_METADATA, BY_OUTPUT)
BY_HOOKS = "supports.mandatory_profile[padded]"
ITEMS: dict[str, Item] = {item.id: item for item in all_items(Tier.HOST.includes)}


def _undecodable(geometry: Geometry, found: dict[Any, Any]) -> dict[Any, Any]:
    return {
        mode: replace(spec, levels=tuple(replace(level, layout=Layout.OPAQUE) for level in spec.levels))
        for mode, spec in found.items()
    }


OPAQUE = {"layouts": _undecodable}


def backend(defect: str = "", *, kernels: bool) -> LoadedBackend:
    """Return the CSR backend with an opaque layout and a mutant's defect.

    Args:
        defect: the mutant's id; empty for a correct backend.
        kernels: True if the backend's kernels run on this machine.
    """
    mutant = next((one for one in catalog.MUTANTS if one.id == defect), Mutant("none", "", ""))
    built = replace(mutant, hooks={**(mutant.hooks or {}), **OPAQUE}).build("csr")
    built.info = replace(built.info, host_kernels=kernels)
    return built


def end(item: str, subject: LoadedBackend) -> Result:
    """Run one item on the backend and return its result."""
    return run_item(ITEMS[item], BackendUnderTest(subject, "cpu", Tier.HOST), [])


@pytest.mark.parametrize("item", BY_BOTH)
def test_what_rows_see_is_not_judged_without_kernels(item: str) -> None:
    """An item that can read neither metadata nor outputs ends as unjudged, and its message names the layout."""
    result = end(item, backend(kernels=False))
    assert result.outcome is Outcome.UNJUDGED
    assert "opaque" in result.message


def test_kernels_decide_by_their_outputs() -> None:
    """An item that compares outputs passes. An item that reads only metadata stays unjudged."""
    assert end(BY_OUTPUT, backend(kernels=True)).outcome is Outcome.PASSED
    assert end(BY_METADATA, backend(kernels=True)).outcome is Outcome.UNJUDGED


@pytest.mark.parametrize("item", BY_BOTH)
def test_defect_in_what_is_hidden_does_not_pass(item: str) -> None:
    """A mutant with a reversed mask (V10) ends as unjudged without kernels, and fails a check with kernels."""
    assert end(item, backend("V10", kernels=False)).outcome is Outcome.UNJUDGED
    found = Outcome.FAILED if item == BY_OUTPUT else Outcome.UNJUDGED
    assert end(item, backend("V10", kernels=True)).outcome is found


@pytest.mark.parametrize("item", BY_BOTH)
def test_what_is_not_hidden_is_judged(item: str) -> None:
    """Slot mappings are not opaque, so mutant V01 (tail stored one token late) fails without kernels too."""
    assert end(item, backend("V01", kernels=False)).outcome is Outcome.FAILED


def test_verdict_counts_what_was_not_judged() -> None:
    """A verdict counts unjudged items separately. It does not list a profile that has an unjudged item."""
    subject = backend(kernels=False)
    ran = {name: end(name, subject) for name in (*BY_BOTH, BY_HOOKS)}
    due = all_items(Tier.HOST.includes, backend=subject)
    results = [ran.get(item.id, Result(item.id, item.tier.value, Outcome.PASSED)) for item in due]
    verdict = judge(subject, results)
    assert (verdict.word, verdict.counts.passed, verdict.counts.unjudged) == (Word.CONFORMS, len(results) - 2, 2)
    assert verdict.line.startswith("sizing and metadata of csr conform to draftmark contract")
    assert "tree" not in verdict.profiles and "core" in verdict.profiles


def test_decoded_layouts_are_judged() -> None:
    """A declared layout passes a metadata check without kernels. An output check then ends as unjudged."""
    for kernels, by_output in ((True, Outcome.PASSED), (False, Outcome.UNJUDGED)):
        plain = Mutant("none", "", "").build("csr")
        plain.info = replace(plain.info, host_kernels=kernels)
        assert [end(item, plain).outcome for item in BY_BOTH] == [Outcome.PASSED, by_output]
