"""Backends that once "conformed" and are wrong or nearly empty: what is said of them now.

The items that matter run for real; every other one is taken to have ended as well as it could for the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from verdicts import verdict

from draftmark import Geometry, LoadedBackend, Mode
from draftmark.reference import ReferencePlugin
from draftmark.runtime import Arena, AttentionBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Refused, Tier
from draftmark_contract.profiles import Profile, profiles_of
from draftmark_contract.runner.item import Item, all_items, run_item
from draftmark_contract.runner.known import KnownFailure
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.verdict import Word

ITEMS: dict[str, Item] = {item.id: item for item in all_items()}
DECODE = "numerics.match_float64[mandatory-decode]"
TREE128 = "numerics.match_float64[bf16-gqa4-128-page128-verify]"
Attend = Callable[..., None]
EVERYTHING = KnownFailure("all", "*", "not written yet", "https://example.org", "plugin")


class _False(ReferencePlugin):
    """The reference with another `attend`, which is handed the right one, or with other limits."""

    def __init__(self, attend: Attend | None = None, supports: Callable[[Geometry], list[str]] | None = None) -> None:
        self._attend, self._supports = attend, supports

    def supports(self, geometry: Geometry) -> list[str]:
        return self._supports(geometry) if self._supports else super().supports(geometry)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        backend: Any = super().open_backend(geometry, arena)
        right, wrong = backend.attend, self._attend
        if wrong is not None:
            backend.attend = lambda *args: wrong(right, *args)
        return backend


def _plugin(attend: Attend | None = None, minor: int = 2, **more: Any) -> LoadedBackend:
    loaded = LoadedBackend("reference", _False(attend, **more))
    loaded.info = replace(loaded.info, contract_minor=minor)
    return loaded


def _end(backend: LoadedBackend, item: str, *known: KnownFailure) -> Result:
    return run_item(ITEMS[item], BackendUnderTest(backend, "cpu", Tier.HOST), list(known))


def _zeros(right: Callable[..., None], q: torch.Tensor, cache: Any, batch: Any, out: torch.Tensor) -> None:
    out.zero_()


def test_declaring_what_is_not_written_does_not_conform() -> None:
    """An attend that writes zeros, with every failure declared: one declared item of the core profile is enough."""
    ended = _end(_plugin(_zeros), DECODE, EVERYTHING)
    assert ended.outcome is Outcome.DECLARED
    told = verdict(lambda item: ended if item.id == DECODE else None)
    assert (told.word, told.exit_code(allow_known=True)) == (Word.DOES_NOT, 1)
    assert "core profile: 1 declared" in told.line


def test_declaring_all_but_the_core_says_so_in_its_first_words() -> None:
    """Right where nobody may declare and declared elsewhere: known failures, and nothing but the core is named."""
    told = verdict(lambda item: Outcome.DECLARED if item.needs else None)
    assert told.line.startswith("reference conforms with known failures to draftmark contract")
    assert list(told.profiles) == [Profile.CORE]
    assert told.exit_code() == 1


def test_serving_the_mandatory_profile_only_is_said_and_counted() -> None:
    """It conforms, for that is what the core profile is for; the line names the core alone and counts the refusals."""
    plugin = _plugin(supports=lambda g: ["only the mandatory profile is served here"] if profiles_of(g) else [])
    assert _end(plugin, DECODE).outcome is Outcome.PASSED
    refused = [item.id for item in all_items(Tier.HOST.includes) if item.needs]
    for item in (TREE128, "supports.answers_alike[target-cap]", "sizing.covers[draft-p16-k4]"):
        assert item in refused and _end(plugin, item).outcome is Outcome.REFUSED
    told = verdict(lambda item: Outcome.REFUSED if item.needs else None)
    assert "(core): " in told.line and f" {len(refused):,} refused, " in told.line
    assert told.counts.passed < told.counts.refused / 5


def test_refusing_by_the_suites_own_error_is_a_failure() -> None:
    """An attend that raises `Refused`, or a refusal of its own, in the middle of a step has failed."""

    def refuse(*arguments: Any) -> None:
        raise Refused(["not this batch"])

    ended = _end(_plugin(refuse), DECODE)
    assert ended.outcome is Outcome.FAILED
    assert "only supports() may refuse a geometry" in ended.message
    assert verdict(lambda item: ended if item.id == DECODE else None).word is Word.DOES_NOT


def test_an_old_target_does_not_hide_what_is_wrong() -> None:
    """Wrong on trees in pages of 128, which contract 1.0 did not try: the line names 1.0, and no tree."""

    def halve(right: Callable[..., None], q: torch.Tensor, cache: Any, batch: Any, out: torch.Tensor) -> None:
        right(q, cache, batch, out)
        if batch.mode is Mode.VERIFY and cache.k.shape[1] == 128:
            out.mul_(0.5)

    ended = _end(_plugin(halve, minor=0), TREE128)
    assert ended.outcome is Outcome.UPCOMING
    told = verdict(lambda item: ended if item.id == TREE128 else None, contract_minor=0)
    assert told.line.startswith("reference conforms to draftmark contract 1.0 (core, ")
    assert Profile.TREE not in told.profiles
    assert "1 failing" in told.line
    assert verdict(lambda item: Outcome.FAILED if item.id == TREE128 else None).word is Word.DOES_NOT
