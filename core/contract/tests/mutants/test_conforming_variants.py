"""Tests that a correct backend passes with any allowed declaration: own workspaces, null pages, host lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftmark import HostLengthsNeed
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier

from . import catalog, suite
from .designs import workspaces
from .mutant import USUAL, Mutant
from .test_opaque import OPAQUE

torch.set_num_threads(1)
MODULES = ("metadata", "padding", "lengths", "guards", "graphs")


def requiring(**fields: Any) -> dict[str, Any]:
    """Return a `requirements` hook that changes these fields."""
    return {"requirements": lambda g, found: replace(found, **fields)}


def without_kernels(layout: str, mutant: Mutant | None = None) -> Any:
    """Return a backend with kernels that need another device; only its metadata can be tested here."""
    backend = (mutant or Mutant("none", "", "")).build(layout)
    backend.info = replace(backend.info, host_kernels=False)
    return backend


def wrong(backend: Any, *modules: str) -> str:
    """Return the first failure of these check modules on sampled cases, or an empty string."""
    checks = [one for one in suite.checks_for() if one.name.partition(".")[0] in modules]
    found = next(suite.failures(backend, checks, sampled=True), None)
    return "" if found is None else f"{found[0]}[{found[1]}]: {found[2]}"


@pytest.mark.parametrize("layout", USUAL)
def test_correct_workspace_passes(layout: str) -> None:
    """A plugin's own workspace passes when its size matches usage() on every device."""
    backend = Mutant("none", "", "", workspaces.RIGHT).build(layout)
    names = ("tightness.own_buffers", "sizing.covers_processors", "load.declares_types")
    checks = [one for one in suite.checks_for() if one.name in names]
    assert not list(suite.failures(backend, checks))


@pytest.mark.parametrize("layout", USUAL)
def test_interpreted_metadata_passes(layout: str) -> None:
    """A backend without kernels for this machine passes the checks of metadata and padding."""
    assert not wrong(without_kernels(layout), "metadata", "padding")


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
@pytest.mark.parametrize(
    "fields",
    [
        {"unique_slots": True},
        {"host_lengths": HostLengthsNeed.UPPER_BOUND},
        {"host_lengths": HostLengthsNeed.EXACT},
    ],
    ids=["unique-slots", "upper-bound", "exact"],
)
def test_declarations_are_followed(layout: str, fields: dict[str, Any]) -> None:
    """A backend passes if it declares separate null pages for each padded request, or stricter host lengths.

    A backend that needs exact lengths must refresh its graphs in a replay. These two backends do not, so the graph
    checks are left out for them.
    """
    exact = fields.get("host_lengths") is HostLengthsNeed.EXACT
    modules = [one for one in MODULES if one != "graphs" or not exact]
    assert not wrong(Mutant("none", "", "", requiring(**fields)).build(layout), *modules)


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
def test_kernels_that_cannot_run_here_are_interpreted(layout: str) -> None:
    """Checks of metadata, graphs and histories pass if kernels cannot run. Their items are marked as interpreted."""
    backend = without_kernels(layout)
    assert not wrong(backend, *MODULES, "history", "purity")
    subject = BackendUnderTest(backend, "cpu", Tier.HOST)
    check = next(one for one in suite.checks_for() if one.name == "graphs.replay_equals_eager")
    check.run(subject, check.cases()[0])
    assert "interpreted" in subject.marks


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
@pytest.mark.parametrize("name", ["M09", "M10", "M17", "M19", "M20", "M29b", "V01", "V13", "V20", "V22", "V31", "V32"])
def test_metadata_mutants_die_without_kernels(layout: str, name: str) -> None:
    """The suite kills mutants with defects in metadata or capture, although their kernels cannot run here."""
    mutant = next(one for one in catalog.MUTANTS if one.id == name)
    if layout not in mutant.layouts or (layout == "reference" and name == "V13"):
        pytest.skip("only a kernel reads the data that this mutant breaks")
    assert wrong(without_kernels(layout, mutant), *MODULES, "history", "purity")


@pytest.mark.slow
def test_opaque_levels_are_left_to_numerics() -> None:
    """A backend with an opaque layout is judged by its outputs and passes."""
    assert not wrong(Mutant("none", "", "", OPAQUE).build("csr"), *MODULES)
