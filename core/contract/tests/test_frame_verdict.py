"""Tests of the verdict line: each word follows from the items that ran and their outcomes."""

from __future__ import annotations

import pytest
from verdicts import backend, judge, verdict

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR
from draftmark_contract.backend_under_test import INTERPRETED, OPAQUE
from draftmark_contract.check import Tier
from draftmark_contract.profiles import OF_STATE, Profile
from draftmark_contract.runner import judging
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.judging import Suite
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.verdict import Scope, Word

VERSION = f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"
SHOWN = [one for one in Profile if one is Profile.CORE or any(one in item.needs for item in all_items())]
"""Profiles that at least one item needs."""
ALL = ", ".join(SHOWN)
HOST = len(all_items(Tier.HOST.includes))
DEVICE = len(all_items((Tier.DEVICE,)))


def _needing(profile: Profile, outcome: Outcome):
    return lambda item: outcome if profile in item.needs else None


def _in_core(item: Item) -> bool:
    return not item.needs


def test_complete_run_names_profiles_and_counts() -> None:
    """After a complete host run, the verdict line has profiles, all counts, and the device tier as not run."""
    judged = verdict()
    assert judged.line == (
        f"reference conforms to draftmark contract {VERSION} ({ALL}): {HOST:,} passed, 0 refused, 0 declared, "
        f"0 unjudged, 0 failed; device tier not run ({DEVICE:,} items)"
    )
    assert (judged.word, judged.exit_code()) == (Word.CONFORMS, 0)


def test_items_of_state_are_left_out_without_recurrences() -> None:
    """A plugin that serves no recurrent state has the counts and profiles that it had without those items."""
    judged = verdict(recurrences=())
    mine = [item for item in all_items(Tier.HOST.includes) if not item.needs & OF_STATE]
    assert f": {len(mine):,} passed, 0 refused, 0 declared" in judged.line
    assert judged.profiles == tuple(one for one in SHOWN if one not in OF_STATE)
    assert not {result.item for result in judged.results} & {item.id for item in all_items() if item.needs & OF_STATE}
    assert sum(judged.items.values()) == len(all_items()) - sum(bool(item.needs & OF_STATE) for item in all_items())


def test_refused_profile_is_not_named() -> None:
    """Refused items are counted separately, and a verdict does not name the profile that they need."""
    judged = verdict(_needing(Profile.FP8, Outcome.REFUSED))
    refused = sum(Profile.FP8 in item.needs for item in all_items(Tier.HOST.includes))
    assert judged.word is Word.CONFORMS
    assert ALL.replace(", fp8", "") in judged.line
    assert f": {HOST - refused:,} passed, {refused:,} refused, 0 declared" in judged.line


def test_known_failures_change_the_verdict() -> None:
    """If a profile has declared failures, the verdict does not name it; the exit code is 0 only with allow_known."""
    judged = verdict(_needing(Profile.WINDOW, Outcome.DECLARED))
    assert judged.line.startswith(f"reference conforms with known failures to draftmark contract {VERSION} (core, ")
    assert Profile.WINDOW not in judged.profiles
    assert (judged.exit_code(), judged.exit_code(allow_known=True)) == (1, 0)


@pytest.mark.parametrize("outcome", [Outcome.DECLARED, Outcome.FAILED])
def test_core_profile_must_be_complete(outcome: Outcome) -> None:
    """If one core item failed, declared or not, the verdict is "does not conform"."""
    only = next(item.id for item in all_items() if _in_core(item))
    judged = verdict(lambda item: outcome if item.id == only else None)
    assert judged.word is Word.DOES_NOT
    assert judged.line.startswith(f"reference does not conform to draftmark contract {VERSION}: ")
    assert outcome is Outcome.FAILED or f"core profile: 1 {outcome}" in judged.line
    assert judged.exit_code(allow_known=True) == 1


def test_unjudged_core_gives_no_verdict() -> None:
    """If the items of the core profile are unjudged, there is no verdict."""
    judged = verdict(lambda item: Result(item.id, "host", Outcome.UNJUDGED, OPAQUE) if item.tier is Tier.HOST else None)
    assert judged.word is Word.NONE and not judged.recorded(allow_part=True)
    assert ", because the core profile is open (" in judged.line and " unjudged): " in judged.line
    assert judged.exit_code(allow_part=True) == 2


def _interpreted(item: Item) -> Result | None:
    judged_here = item.tier is not Tier.HOST or item.check.name.startswith("metadata.")
    return None if judged_here else Result(item.id, "host", Outcome.UNJUDGED, INTERPRETED)


def test_without_kernels_verdict_covers_metadata() -> None:
    """If no kernel ran, items about outputs are unjudged, and the verdict covers sizing and metadata only."""
    judged = verdict(_interpreted, host_kernels=False)
    assert (judged.word, judged.scope) == (Word.CONFORMS, Scope.METADATA)
    assert judged.line.startswith(f"sizing and metadata of reference conform to draftmark contract {VERSION} (core, ")
    assert (
        f", {judged.counts.unjudged:,} unjudged, 0 failed; its kernels did not run; device tier not run" in judged.line
    )
    assert judged.counts.unjudged > judged.counts.passed / 10


def test_device_tier_decides_unjudged_host_items() -> None:
    """If a host item is unjudged but its device item passed, the verdict keeps the profile that the item needs."""
    judged = verdict(_interpreted, Tier.DEVICE, host_kernels=False)
    assert (judged.word, judged.scope, list(judged.profiles)) == (Word.CONFORMS, Scope.BACKEND, SHOWN)
    assert judged.counts.unjudged


def test_sizing_run_gives_a_verdict_on_sizing() -> None:
    """A run of only the sizing tier gives a verdict on sizing."""
    judged = verdict(tier=Tier.SIZING)
    assert judged.line.startswith("sizing of reference conforms to")
    host = sum(one.tier is Tier.HOST for one in all_items())
    assert judged.line.endswith(f"host tier not run ({host:,} items), device tier not run ({DEVICE:,} items)")


def test_selected_items_give_no_verdict() -> None:
    """A run of some items has no verdict: exit code 2, or 0 with allow_part, and 1 only if an item failed."""
    some = verdict().results[:5]
    few = judge(backend(), some)
    assert few.line.startswith(
        f"reference has no verdict on draftmark contract {VERSION}, because only 5 of {len(all_items()):,} items ran: "
        "5 passed"
    )
    assert few.line.endswith(f"{len(all_items()) - 5:,} items not run")
    assert not few.conforms
    assert [few.exit_code(allow_part=part) for part in (False, True)] == [2, 0]
    assert [few.recorded(part) for part in (False, True)] == [False, True]
    wrong = judge(backend(), [Result(some[0].item, some[0].tier, Outcome.FAILED, "why")])
    assert (wrong.word, wrong.exit_code(allow_part=True), wrong.recorded()) == (Word.DOES_NOT, 1, True)
    declared = judge(backend(), [Result(some[0].item, some[0].tier, Outcome.DECLARED, "why")])
    assert [declared.exit_code(known, True) for known in (False, True)] == [1, 0]


def test_line_names_the_targeted_contract() -> None:
    """Checks newer than the targeted contract have their own count. If one fails, only an optional profile is lost."""
    newer = {item.id for item in all_items(Tier.HOST.includes) if item.since > (1, 0)}
    failing = {item.id for item in all_items() if item.id in newer and Profile.TREE in item.needs}
    judged = verdict(lambda item: Outcome.FAILED if item.id in failing else None, contract_minor=0)
    newest = "{}.{}".format(*max(item.since for item in all_items()))
    assert judged.line.startswith("reference conforms to draftmark contract 1.0 (core, ")
    assert Profile.TREE not in judged.profiles
    assert f"; upcoming: {len(newer):,} newer items, up to {newest}, {len(failing):,} failing; " in judged.line
    assert judged.counts.passed == HOST - len(newer)
    core = verdict(lambda item: Outcome.FAILED if item.id in newer and _in_core(item) else None, contract_minor=0)
    assert core.word is Word.CONFORMS and Profile.CORE in core.profiles


def test_backend_that_does_not_load_has_no_verdict() -> None:
    """A backend that does not load has no verdict; the line has the cause, and nothing is recorded."""
    judged = judging.judge(Suite.unopened("missing"), [], "it does not load: no such thing")
    assert judged.line == (
        f"missing has no verdict on draftmark contract {VERSION}, because it does not load: no such thing: "
        "nothing is recorded"
    )
    assert (judged.counts.not_run, judged.exit_code(True)) == (0, 2)


def test_stopped_run_has_no_verdict_even_with_failures() -> None:
    """A run that stopped for a reason outside the backend has no verdict, whatever the outcomes of its items."""
    wrong = Result(all_items()[0].id, "sizing", Outcome.FAILED, "why")
    judged = judge(backend(), [wrong], "the run was interrupted")
    assert judged.word is Word.NONE and judged.exit_code(allow_known=True) == 2
    assert ", because the run was interrupted: 0 passed, " in judged.line and "1 failed" in judged.line


def test_selection_that_is_refused_whole_gives_no_verdict() -> None:
    """If the backend refuses every selected item, nothing was tested, so the exit code is 2 even with allow_part."""
    refused = Result(all_items()[0].id, "sizing", Outcome.REFUSED, "why")
    judged = judge(backend(), [refused])
    assert "1 of " in judged.line and "the backend refuses all of them" in judged.line
    assert judged.exit_code(allow_part=True) == 2 and not judged.recorded(allow_part=True)


def test_partial_run_serves_no_profile() -> None:
    """A run of selected items serves no profile, and the verdict counts how many items of each profile ran."""
    some = judge(backend(), verdict().results[:5])
    assert some.profiles == ()
    tried, of = some.tried[Profile.CORE]
    assert 0 < tried <= 5 < of
