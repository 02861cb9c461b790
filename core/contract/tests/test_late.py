"""Tests of the `late` checks, which run work after the host has moved on: only staging memory with fences passes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from draftmark.geometry import Mode
from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.geometries import behaviours
from draftmark_contract.cases.graph_rounds import MODES
from draftmark_contract.cases.late_rounds import in_flight
from draftmark_contract.check import Case, Check, ContractViolation, Tier, all_checks
from draftmark_contract.late_device import LateDevice
from draftmark_contract.late_device.task_queue import TaskQueue

from .mutants import catalog, suite
from .mutants.designs import staging
from .mutants.mutant import LAYOUTS, USUAL, Mutant, after

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKS = [one for one in all_checks() if one.name.startswith("late.") and one.tier is Tier.HOST]
LATE = [one for one in catalog.MUTANTS if one.id.startswith("L")]
QUICK = ("L01", "L12")
PAIRS = [
    pytest.param(one, layout, id=f"{one.id}-{layout}", marks=() if one.id in QUICK else pytest.mark.slow)
    for one in LATE
    for layout in one.layouts
]
EAGER, REPLAYS, HALFWAY, REOPENED = (
    next(one for one in CHECKS if one.name.endswith(name))
    for name in ("rounds_in_flight_are_their_own", "replays_in_flight_are_their_own", "half_run", "their_backend")
)


def original(layout: str) -> LoadedBackend:
    """Return the correct backend with this metadata layout."""
    return LoadedBackend(layout, LAYOUTS[layout])


def case(check: Check, name: str) -> Case:
    """Return the case of a check with this id."""
    return next(one for one in check.cases() if one.id == name)


def run(check: Check, backend: LoadedBackend, name: str = "target") -> None:
    """Run one case of a check on a backend."""
    check.run(BackendUnderTest(backend, "cpu", Tier.HOST), case(check, name))


@pytest.mark.parametrize("layout", USUAL)
@pytest.mark.parametrize("kind", staging.RIGHT)
@pytest.mark.parametrize("check", [pytest.param(one, id=one.name) for one in CHECKS])
def test_fenced_staging_passes(layout: str, kind: str, check: Check) -> None:
    """A plan that stages numbers in pinned memory passes if it waits with fences or copies with blocking calls."""
    run(check, Mutant("none", "", "", staging.HOOKS, patch=staging.staged(staging.RIGHT[kind])).build(layout))


@pytest.mark.parametrize(("mutant", "layout"), PAIRS)
def test_late_mutants_fail_the_late_checks(mutant: Mutant, layout: str) -> None:
    """Each mutant fails a `late` check because the device runs late, and the message names the fence to use."""
    backend = mutant.build(layout)
    found = next(suite.failures(backend, CHECKS, True), None) or next(suite.failures(backend, CHECKS), None)
    assert found, f"{mutant.id} survives in {layout}: {mutant.what}"
    error = found[2]
    assert isinstance(error, ContractViolation) and "late device" in str(error), error
    assert "draftmark.transfer.fence" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.id) for one in LATE])
def test_other_checks_pass_late_mutants(mutant: Mutant) -> None:
    """A sample of all other checks passes on the mutants, because they are correct without a late device."""
    checks = [one for one in suite.checks_for(mutant) if one not in CHECKS]
    wrong = next(suite.failures(mutant.build(mutant.layouts[0]), checks, True), None)
    assert wrong is None, wrong


def test_last_round_is_sent_before_any_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference never waits, so the late device runs nothing until all batches are sent."""
    seen: list[tuple[int, int]] = []
    leave = LateDevice.__exit__

    def looked_at(device: LateDevice, *args: Any) -> None:
        queue: TaskQueue = device._queue
        assert not device.waits
        seen.append((queue.done, queue.sent))
        leave(device, *args)

    monkeypatch.setattr(LateDevice, "__exit__", looked_at)
    rounds = len(in_flight(behaviours()["target"]))
    for check in (EAGER, REPLAYS, REOPENED):
        run(check, original("reference"))
        done, sent = seen.pop()
        assert done == 0 and sent > 10 * rounds, (check.name, done, sent)
    run(HALFWAY, original("reference"))
    done, sent = seen.pop()
    assert 0 < done < sent


def test_rounds_share_no_page_and_differ() -> None:
    """Batches in flight use different pages, and lengths grow and shrink, so that mixing up two batches is detected."""
    for geometry in behaviours().values():
        rounds = in_flight(geometry)
        pages = [page for one in rounds for request in one.requests if request.live for page in request.pages]
        assert len(pages) == len(set(pages)) and 0 not in pages
        assert {one.mode for one in rounds} == set(geometry.modes) & {Mode.EXTEND, *MODES.values()}
        longest = [max(request.prefix for request in one.requests) for one in rounds]
        assert any(a > b for a, b in pairwise(longest)) and any(a < b for a, b in pairwise(longest))


def test_step_that_waits_is_a_violation() -> None:
    """A host read in attend() is a violation, because it stops the host until the device has finished."""
    reads = Mutant("none", "", "", patch=lambda b: after(b, "attend", lambda q, cache, batch, out: out.sum().item()))
    with pytest.raises(ContractViolation, match=r"a step waits for the device"):
        run(EAGER, reads.build("reference"))


def test_late_error_names_the_rounds() -> None:
    """An error in work that the late device runs is a violation, with the batches that were sent."""
    beyond = Mutant("none", "", "", patch=lambda b: after(b, "write_metadata", lambda batch: _reach(b, batch)))
    with pytest.raises(ContractViolation, match="when a late device gets there") as caught:
        run(EAGER, beyond.build("reference"))
    text = str(caught.value)
    assert "late-verify-long" in text and "IndexError" in text and "index_select" in text


def _reach(backend: Any, batch: Any) -> None:
    """Queue a read of an index past the end."""
    backend.arena["slot_mapping"].index_select(0, batch.prefix_lens.long() + 10**6)
