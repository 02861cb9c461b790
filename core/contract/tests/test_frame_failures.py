"""Tests of the terminal report: failures on one screen, and reasons below the verdict."""

from __future__ import annotations

from verdicts import verdict

from draftmark_contract.profiles import Profile
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.report import LISTED, SCREEN, failure_lines, verdict_lines
from draftmark_contract.screen import LONGEST


def _wrong(item: Item, lines: int = 8) -> Result:
    text = [f"{item.check.name}: A rule.", *(f"  line {n}" for n in range(lines)), "  run it again: …"]
    return Result(item.id, item.tier.value, Outcome.FAILED, "\n".join(text))


def test_everything_wrong_takes_one_screen() -> None:
    """The first failed checks are printed in full, the next ones in one line each, and the rest only as a number."""
    lines = failure_lines(verdict(_wrong))
    checks = {item.check.name for item in all_items() if item.tier.value != "device"}
    assert len(lines) <= SCREEN + LISTED + 2
    assert lines[0] == "load.describes_itself[plugin]"
    assert "  sizing.covers: " in "\n".join(lines) and " fail, [target-p1-k1], [target-p1-k2]" in "\n".join(lines)
    named = {line.split("[")[0].split(":")[0].strip() for line in lines} & checks
    assert lines[-1] == f"  and {len(checks) - len(named)} more"


def test_long_failure_keeps_head_and_command() -> None:
    """A long message keeps its first lines and its command, and names the number of removed lines."""
    only = all_items()[0]
    lines = failure_lines(verdict(lambda item: _wrong(item, 500) if item.id == only.id else None))
    assert len(lines) <= LONGEST + 2
    assert any("lines more" in line for line in lines)
    assert lines[-2].strip().startswith("run it again: ")


def test_no_failure_prints_nothing() -> None:
    """A run without failures has no failure lines."""
    assert failure_lines(verdict()) == []


def test_reasons_follow_the_verdict() -> None:
    """The verdict line is followed by the reasons of refused items and known failures, with counts."""

    def ending(item: Item) -> Result | None:
        if Profile.FP8 in item.needs:
            return Result(item.id, item.tier.value, Outcome.REFUSED, "fp8 is not served here")
        if Profile.WINDOW in item.needs:
            return Result(item.id, item.tier.value, Outcome.DECLARED, "k1: the vendor's kernel\nlong story")
        return None

    judged = verdict(ending)
    first, *rest = verdict_lines(judged)
    assert first == judged.line
    assert rest == [
        f"  refused: {judged.counts.refused:,} x fp8 is not served here",
        f"  declared: {judged.counts.declared:,} x k1: the vendor's kernel",
    ]
