"""Whatever a plugin does, an item ends with a result that says what happened."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sizing_backends import correct

from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Case, Check, ContractViolation, Refused, Tier
from draftmark_contract.runner.item import Item, Outcome, Result, run_item
from draftmark_contract.runner.known import KnownFailure
from draftmark_contract.runner.limits import LIMIT_S


def _raise(error: BaseException) -> Callable[[Any, Any], None]:
    def run(subject: Any, case: Any) -> None:
        raise error

    return run


def _hang(subject: Any, case: Any) -> None:
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= LIMIT_S, "no alarm is set"
    while True:
        try:
            signal.raise_signal(signal.SIGALRM)  # what the alarm does when the limit is over
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
) -> Result:
    check = Check("some.check", Tier.SIZING, lambda: [], run, since, (), "A rule.")
    return run_item(Item(check, Case("a", None, case_since)), correct("page_table"), list(known))


KNOWN = KnownFailure("k1", "some.check[[]a]".replace("[[]", "["), "vendor bug", "https://example.org/1", "vendor")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_raise(ValueError("odd")), "raised ValueError: odd"),
        (_raise(SystemExit(3)), "raised SystemExit: 3"),
        (_raise(ContractViolation("too small", batch="R=1", got=1, expected=2)), "too small\n  batch: R=1\n  got: 1"),
        (_hang, f"took longer than {LIMIT_S:g} s, stuck in _hang"),
        (_print, "the backend printed 'hello from the plugin"),
    ],
    ids=["raises", "exits", "violates", "hangs", "prints"],
)
def test_misbehaviour_fails_with_its_cause(run: Callable[[Any, Any], None], words: str) -> None:
    """An exception, an exit, a hang that swallows exceptions and a print each fail the item alone."""
    result = _end(run)
    assert result.outcome is Outcome.FAILED
    assert result.message.startswith("some.check: A rule.\n")
    assert words in result.message


def test_refusal_meets_an_item() -> None:
    """A geometry that is refused alike everywhere counts as met, with its reasons."""
    result = _end(_raise(Refused(["page_size 3 is not served"])))
    assert (result.outcome, result.message) == (Outcome.REFUSED, "page_size 3 is not served")


def test_known_failure_is_strict() -> None:
    """It excuses a failure that still happens, and fails once the failure is gone."""
    assert _end(_raise(ValueError("x")), (KNOWN,)).outcome is Outcome.KNOWN
    passed = _end(_pass, (KNOWN,))
    assert passed.outcome is Outcome.FAILED
    assert "remove it from contract.toml" in passed.message
    assert _end(_pass, (replace(KNOWN, item="other.check[*]"),)).outcome is Outcome.PASSED


def test_newer_check_is_upcoming() -> None:
    """A plugin written for contract 1.0 does not fail a check of 1.1; it is told of it."""
    assert _end(_raise(ValueError("x")), since=(1, 1)).outcome is Outcome.UPCOMING
    assert _end(_pass, since=(1, 1)).outcome is Outcome.PASSED


def test_newer_case_of_an_old_check_is_upcoming() -> None:
    """An item is as new as the newer of its check and its case."""
    assert _end(_raise(ValueError("x")), case_since=(1, 1)).outcome is Outcome.UPCOMING
    assert _end(_raise(ValueError("x")), since=(1, 1), case_since=(1, 0)).outcome is Outcome.UPCOMING
    assert _end(_pass, case_since=(1, 1)).outcome is Outcome.PASSED


def test_marks_are_those_of_one_item() -> None:
    """What an item says about itself does not stay on the subject."""

    def run(subject: BackendUnderTest, case: Any) -> None:
        subject.interpreted()

    assert _end(run).marks == ("interpreted",)
    assert _end(_pass).marks == ()


def test_result_survives_json() -> None:
    """Workers send results as JSON."""
    result = _end(_print)
    assert Result.from_json(result.as_json()) == result
