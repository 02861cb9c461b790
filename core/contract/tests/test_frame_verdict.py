"""The verdict's words: each follows from what ran and how it ended, and none says more."""

from __future__ import annotations

import pytest
from verdicts import backend, verdict

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR
from draftmark_contract.backend_under_test import INTERPRETED, OPAQUE
from draftmark_contract.check import Tier
from draftmark_contract.profiles import Profile
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.judging import judge
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.verdict import Scope, Word

VERSION = f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"
SHOWN = [one for one in Profile if one is Profile.CORE or any(one in item.needs for item in all_items())]
"""Profiles that some item needs."""
ALL = ", ".join(SHOWN)
HOST = len(all_items(Tier.HOST.includes))
DEVICE = len(all_items((Tier.DEVICE,)))


def _needing(profile: Profile, outcome: Outcome):
    return lambda item: outcome if profile in item.needs else None


def _in_core(item: Item) -> bool:
    return not item.needs


def test_a_whole_run_names_its_profiles_and_every_count() -> None:
    """Nothing reads as a share of what was never run."""
    told = verdict()
    assert told.line == (
        f"reference conforms to draftmark contract {VERSION} ({ALL}): {HOST:,} passed, 0 refused, 0 declared, "
        f"0 unjudged, 0 failed; device tier not run ({DEVICE:,} items)"
    )
    assert (told.word, told.exit_code()) == (Word.CONFORMS, 0)


def test_what_is_refused_is_not_named() -> None:
    """Refusals are a number of their own, and the profile that they are of is not served in full."""
    told = verdict(_needing(Profile.FP8, Outcome.REFUSED))
    refused = sum(Profile.FP8 in item.needs for item in all_items(Tier.HOST.includes))
    assert told.word is Word.CONFORMS
    assert ALL.replace(", fp8", "") in told.line
    assert f": {HOST - refused:,} passed, {refused:,} refused, 0 declared" in told.line


def test_known_failures_are_a_word_of_their_own() -> None:
    """Declared failures take their profile away, and the exit code needs leave."""
    told = verdict(_needing(Profile.WINDOW, Outcome.DECLARED))
    assert told.line.startswith(f"reference conforms with known failures to draftmark contract {VERSION} (core, ")
    assert Profile.WINDOW not in told.profiles
    assert (told.exit_code(), told.exit_code(allow_known=True)) == (1, 0)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.DECLARED, Outcome.FAILED])
def test_nothing_in_the_core_profile_may_be_missing(outcome: Outcome) -> None:
    """One item of the core that is refused, declared or wrong is enough."""
    only = next(item.id for item in all_items() if _in_core(item))
    told = verdict(lambda item: outcome if item.id == only else None)
    assert told.word is Word.DOES_NOT
    assert told.line.startswith(f"reference does not conform to draftmark contract {VERSION}: ")
    assert outcome is Outcome.FAILED or f"core profile: 1 {outcome}" in told.line
    assert told.exit_code(allow_known=True) == 1


def test_a_core_that_was_not_looked_at_gives_no_verdict() -> None:
    """An opaque layout without kernels fails nothing and shows nothing."""
    told = verdict(lambda item: Result(item.id, "host", Outcome.UNJUDGED, OPAQUE) if item.tier is Tier.HOST else None)
    assert told.word is Word.NONE
    assert "core profile: " in told.line and "unjudged" in told.line
    assert told.exit_code() == 1


def _interpreted(item: Item) -> Result | None:
    judged_here = item.tier is not Tier.HOST or item.check.name.startswith("metadata.")
    return None if judged_here else Result(item.id, "host", Outcome.UNJUDGED, INTERPRETED)


def test_without_kernels_the_word_is_said_of_sizes_and_metadata() -> None:
    """What the suite computed itself is unjudged; the sentence's subject says what was judged."""
    told = verdict(_interpreted, host_kernels=False)
    assert (told.word, told.scope) == (Word.CONFORMS, Scope.METADATA)
    assert told.line.startswith(f"sizing and metadata of reference conform to draftmark contract {VERSION} (core, ")
    assert f", {told.counts.unjudged:,} unjudged, 0 failed; its kernels did not run; device tier not run" in told.line
    assert told.counts.unjudged > told.counts.passed / 10


def test_the_device_decides_what_the_host_left_open() -> None:
    """An item that the host tier could not judge counts as unjudged and costs no profile once its twin has passed."""
    told = verdict(_interpreted, Tier.DEVICE, host_kernels=False)
    assert (told.word, told.scope, list(told.profiles)) == (Word.CONFORMS, Scope.BACKEND, SHOWN)
    assert told.counts.unjudged


def test_sizes_alone_are_said_to_be_alone() -> None:
    """A run of the first tier says nothing of the backend itself."""
    told = verdict(tier=Tier.SIZING)
    assert told.line.startswith("sizing of reference conforms to")
    host = sum(one.tier is Tier.HOST for one in all_items())
    assert told.line.endswith(f"host tier not run ({host:,} items), device tier not run ({DEVICE:,} items)")


def test_some_items_give_no_verdict() -> None:
    """A selection neither conforms nor fails; one that fails does."""
    some = verdict().results[:5]
    few = judge("reference", backend(), some)
    assert few.line.startswith(f"reference has no verdict on draftmark contract {VERSION}: 5 items selected; 5 passed")
    assert few.line.endswith(f"{len(all_items()) - 5:,} items not run")
    assert (few.conforms, few.exit_code()) == (False, 0)
    wrong = Result(some[0].item, some[0].tier, Outcome.FAILED, "why")
    assert judge("reference", backend(), [wrong]).exit_code() == 1


def test_the_line_names_the_contract_that_is_targeted() -> None:
    """Newer items are counted apart, and one that fails takes its profile's name away, but not the core's."""
    newer = {item.id for item in all_items(Tier.HOST.includes) if item.since > (1, 0)}
    failing = {item.id for item in all_items() if item.id in newer and Profile.TREE in item.needs}
    told = verdict(lambda item: Outcome.FAILED if item.id in failing else None, contract_minor=0)
    newest = "{}.{}".format(*max(item.since for item in all_items()))
    assert told.line.startswith("reference conforms to draftmark contract 1.0 (core, ")
    assert Profile.TREE not in told.profiles
    assert f"; upcoming: {len(newer):,} newer items, up to {newest}, {len(failing):,} failing; " in told.line
    assert told.counts.passed == HOST - len(newer)
    core = verdict(lambda item: Outcome.FAILED if item.id in newer and _in_core(item) else None, contract_minor=0)
    assert core.word is Word.CONFORMS and Profile.CORE in core.profiles


def test_a_backend_that_does_not_load_has_a_verdict() -> None:
    """With its cause, and nothing counted."""
    told = judge("nobody", None, [], "it does not load: no such thing")
    assert told.line.startswith(f"nobody does not conform to draftmark contract {VERSION}: it does not load: no such")
    assert (told.counts.not_run, told.exit_code(True)) == (len(all_items()), 1)
