"""What a backend may freely choose must not fail it: declarations that the suite has to follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftmark import HostLengthsNeed
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier

from . import catalog, corners, suite
from .mutant import USUAL, Mutant
from .test_opaque import OPAQUE

torch.set_num_threads(1)
MODULES = ("metadata", "padding", "lengths", "guards", "graphs")


def requiring(**fields: Any) -> dict[str, Any]:
    """A requirements hook that asks for something else."""
    return {"requirements": lambda g, found: replace(found, **fields)}


def without_kernels(layout: str, mutant: Mutant | None = None) -> Any:
    """A backend whose kernels need a device that is not here: its metadata is all there is to test."""
    backend = (mutant or Mutant("none", "", "")).build(layout)
    backend.info = replace(backend.info, host_kernels=False)
    return backend


def wrong(backend: Any, *modules: str) -> str:
    """The first failing item of some modules, on the matrix's sample."""
    checks = [one for one in suite.checks_for() if one.name.partition(".")[0] in modules]
    found = next(suite.failures(backend, checks, sampled=True), None)
    return "" if found is None else f"{found[0]}[{found[1]}]: {found[2]}"


@pytest.mark.parametrize("layout", USUAL)
def test_a_workspace_that_is_right_passes(layout: str) -> None:
    """The plugin's own buffers, sized as its usage() says for every device."""
    backend = Mutant("none", "", "", corners.RIGHT).build(layout)
    names = ("tightness.own_buffers", "sizing.covers_processors", "load.declares_types")
    checks = [one for one in suite.checks_for() if one.name in names]
    assert not list(suite.failures(backend, checks))


@pytest.mark.parametrize("layout", USUAL)
def test_interpreted_metadata_passes(layout: str) -> None:
    """A backend whose kernels cannot run here is judged by its metadata; the quick part of the slow test below."""
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
    """Unique null pages, and any need for host lengths, lead to other batches, not to failures.

    A backend that needs exact lengths must refresh its graphs itself at a replay; these two would keep the capture's.
    """
    exact = fields.get("host_lengths") is HostLengthsNeed.EXACT
    modules = [one for one in MODULES if one != "graphs" or not exact]
    assert not wrong(Mutant("none", "", "", requiring(**fields)).build(layout), *modules)


@pytest.mark.slow
@pytest.mark.parametrize("layout", USUAL)
def test_kernels_that_cannot_run_here_are_interpreted(layout: str) -> None:
    """Metadata, graphs and histories are checked all the same, and the item says that it was interpreted."""
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
    """Defects of metadata and capture do not need the device."""
    mutant = next(one for one in catalog.MUTANTS if one.id == name)
    if layout not in mutant.layouts or (layout == "reference" and name == "V13"):
        pytest.skip("the defect is in what only a kernel reads")
    assert wrong(without_kernels(layout, mutant), *MODULES, "history", "purity")


@pytest.mark.slow
def test_opaque_levels_are_left_to_numerics() -> None:
    """A layout that cannot be decoded passes by its outputs."""
    assert not wrong(Mutant("none", "", "", OPAQUE).build("csr"), *MODULES)
