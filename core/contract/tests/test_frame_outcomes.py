"""Tests of item outcomes: whatever a plugin does, each item ends with a result that names the cause."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftmark.errors import BackendRefusal
from draftmark.geometry import Geometry
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Case, Check, ContractViolation, Need, Refused, Tier, Unjudged
from draftmark_contract.judge.layer import LayerUnderTest
from draftmark_contract.runner.item import Item, run_item
from draftmark_contract.runner.known import KnownFailure
from draftmark_contract.runner.limits import LIMIT_S
from draftmark_contract.runner.outcome import Counts, Outcome, Result
from draftmark_contract.sizing.geometries import mandatory
from draftmark_testing.sizing_backends import correct


def _raise(error: BaseException) -> Callable[[Any, Any], None]:
    def run(subject: Any, case: Any) -> None:
        raise error

    return run


def _hang(subject: Any, case: Any) -> None:
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= LIMIT_S, "no alarm is set"
    while True:
        try:
            signal.raise_signal(signal.SIGALRM)  # the suite ends an item at its time limit with this signal
        except Exception:
            continue


def _print(subject: Any, case: Any) -> None:
    print("hello from the plugin")


def _pass(subject: Any, case: Any) -> None:
    pass


def _end(
    run: Callable[[Any, Any], None],
    known: tuple[KnownFailure, ...] = (),
    since: tuple[int, int] = (1, 0),
    case_since: tuple[int, int] = (1, 0),
    subject: BackendUnderTest | None = None,
    geometry: Geometry | None = None,
) -> Result:
    check = Check("some.check", Tier.SIZING, lambda: [], run, since, ("sglang#1",), "A rule.")
    return run_item(Item(check, Case("a", None, case_since, geometry)), subject or correct("page_table"), list(known))


KNOWN = KnownFailure("k1", "some.check[[]a]".replace("[[]", "["), "vendor bug", "https://example.org/1", "vendor")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_raise(ValueError("odd")), "raised ValueError: odd"),
        (_raise(SystemExit(3)), "raised SystemExit: 3"),
        (_raise(ContractViolation("too small", batch="R=1", got=1, expected=2)), "too small\n  batch: R=1\n  got: 1"),
        (_hang, f"took longer than {LIMIT_S:g} s, stuck in _hang"),
        (_print, "the backend printed\n  got: 'hello from the plugin"),
        (_raise(Refused("not today")), "only supports() may refuse a geometry: not today"),
        (_raise(BackendRefusal("b", ["not today"])), "only supports() may refuse a geometry: backend 'b'"),
    ],
    ids=["raises", "exits", "violates", "hangs", "prints", "refuses by the suite's error", "refuses late"],
)
def test_misbehaviour_fails_with_its_cause(run: Callable[[Any, Any], None], words: str) -> None:
    """If a plugin raises, exits, hangs in code that catches exceptions, or prints, only the running item fails."""
    result = _end(run)
    assert result.outcome is Outcome.FAILED
    assert result.message.startswith("some.check: A rule.\n")
    assert words in result.message


def test_refusal_is_an_outcome_of_its_own() -> None:
    """If supports() refuses the item's geometry, the outcome is REFUSED, with the reasons. A core item fails."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        raise subject.refusal(["page_size 3 is not served"])

    core = mandatory()
    result = _end(run, geometry=replace(core, attention=replace(core.attention, page_size=3)))
    assert (result.outcome, result.message) == (Outcome.REFUSED, "page_size 3 is not served")
    result = _end(run, geometry=core)
    assert result.outcome is Outcome.FAILED
    assert "a geometry of the core profile is refused\n  got: page_size 3 is not served" in result.message


def test_partly_judged_item_has_a_mark() -> None:
    """If some geometries of a check are refused, its item passes and has the mark "partly refused"."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        subject.refusal(["page_size 3 is not served"])

    result = _end(run)
    assert (result.outcome, result.marks) == (Outcome.PASSED, ("partly refused",))


@pytest.mark.parametrize("mark, words", [("interpreted", "the suite computed the output"), ("opaque", "is opaque")])
def test_output_computed_by_the_suite_is_unjudged(mark: str, words: str) -> None:
    """An item is unjudged if the suite computed the output, or if the backend declares an opaque metadata layout."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        getattr(subject, mark)()

    result = _end(run)
    assert result.outcome is Outcome.UNJUDGED
    assert words in result.message


def test_exception_is_reported_with_its_batch() -> None:
    """A plugin's exception is reported with the current batch, known bugs of this class, and a command to repeat."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        subject.current = "r0: L=3"
        raise ValueError("odd")

    lines = _end(run).message.splitlines()
    assert lines[-3:] == [
        "  batch: r0: L=3",
        "  bugs of this class: sglang#1",
        "  run it again: draftmark contract sized --item 'some.check[a]'",
    ]


def test_six_counts() -> None:
    """Each outcome has its own count, and items without a result count as not run."""
    outcomes = (Outcome.PASSED, Outcome.PASSED, Outcome.REFUSED, Outcome.UNJUDGED, Outcome.FAILED)
    counts = Counts.of([Result(str(n), "host", outcome) for n, outcome in enumerate(outcomes)], 9)
    assert (counts.passed, counts.refused, counts.declared, counts.unjudged, counts.failed, counts.not_run) == (
        *(2, 1, 0, 1, 1, 4),
    )
    assert str(counts) == "2 passed, 1 refused, 0 declared, 1 unjudged, 1 failed"


def test_known_failure_is_strict() -> None:
    """A known failure has the outcome DECLARED while it fails; once its check passes, the item fails as outdated."""
    assert _end(_raise(ValueError("x")), (KNOWN,)).outcome is Outcome.DECLARED
    passed = _end(_pass, (KNOWN,))
    assert passed.outcome is Outcome.FAILED
    assert "remove it from contract.toml" in passed.message
    assert _end(_pass, (replace(KNOWN, item="other.check[*]"),)).outcome is Outcome.PASSED


def test_newer_check_is_upcoming() -> None:
    """If a plugin targets contract 1.0, a failing check of 1.1 has the outcome UPCOMING instead of FAILED."""
    assert _end(_raise(ValueError("x")), since=(1, 1)).outcome is Outcome.UPCOMING
    assert _end(_pass, since=(1, 1)).outcome is Outcome.PASSED


def test_newer_case_of_an_old_check_is_upcoming() -> None:
    """An item is as new as the newer of its check and its case, so a new case of an old check is UPCOMING."""
    assert _end(_raise(ValueError("x")), case_since=(1, 1)).outcome is Outcome.UPCOMING
    assert _end(_raise(ValueError("x")), since=(1, 1), case_since=(1, 0)).outcome is Outcome.UPCOMING
    assert _end(_pass, case_since=(1, 1)).outcome is Outcome.PASSED


def test_item_is_unjudged_if_its_subject_lacks_what_it_needs() -> None:
    """An item that needs graphs does not run on a layer without graphs; the reason is the layer's."""
    layer = LayerUnderTest("draftmark judge fake:X", {Need.GRAPHS: "the engine captures no graphs"})
    check = Check("some.check", Tier.HOST, tuple, _raise(ValueError("ran")), (1, 0), (), "A rule.")
    needs = replace(check, needs=frozenset({Need.FORWARD, Need.GRAPHS}))
    result = run_item(Item(needs, Case("a", None)), layer)
    assert (result.outcome, result.message) == (Outcome.UNJUDGED, "the engine captures no graphs") and not result.ran
    assert run_item(Item(replace(needs, needs=frozenset({Need.FORWARD})), Case("a", None)), layer).ran


def test_plugin_cannot_declare_itself_unjudged() -> None:
    """If a plugin raises `Unjudged`, its item fails: only what the suite knows decides what is judged."""
    assert _end(_raise(Unjudged("not today"))).outcome is Outcome.FAILED


def test_marks_belong_to_one_item() -> None:
    """A mark set during one item does not appear on the next item of that backend."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        subject.interpreted()

    subject = correct("page_table")
    assert _end(run, subject=subject).marks == ("interpreted",)
    assert _end(_pass, subject=subject).marks == ()


def test_result_survives_json() -> None:
    """A result can be written as JSON and read back, which workers need to send results."""
    result = _end(_print)
    assert Result.from_json(result.as_json()) == result
