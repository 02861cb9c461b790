"""Tests that wrong or almost empty backends do not get the verdict "conforms".

The items that decide a test really run on the backend. All other items get the best outcome that it could have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from verdicts import verdict

from draftmark import Geometry, LoadedBackend, Mode
from draftmark.runtime import Arena, AttentionBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Refused, Tier
from draftmark_contract.profiles import Profile, profiles_of
from draftmark_contract.runner.item import Item, all_items, run_item
from draftmark_contract.runner.known import KnownFailure
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.verdict import Word
from draftmark_reference import ReferencePlugin

ITEMS: dict[str, Item] = {item.id: item for item in all_items()}
DECODE = "numerics.match_float64[mandatory-decode]"
TREE128 = "numerics.match_float64[bf16-gqa4-128-page128-verify]"
Attend = Callable[..., None]
EVERYTHING = KnownFailure("all", "*", "not written yet", "https://example.org", "plugin")


class _False(ReferencePlugin):
    """Reference backend with a replaced `attend` or `supports`."""

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


def test_declared_core_failure_does_not_conform() -> None:
    """A backend that writes zeros does not conform, because a failed core item counts even if it is declared."""
    ended = _end(_plugin(_zeros), DECODE, EVERYTHING)
    assert ended.outcome is Outcome.DECLARED
    judged = verdict(lambda item: ended if item.id == DECODE else None)
    assert (judged.word, judged.exit_code(allow_known=True)) == (Word.DOES_NOT, 1)
    assert "core profile: 1 declared" in judged.line


def test_declared_failures_outside_core_are_named() -> None:
    """If all items outside the core are declared failures, the verdict names them and only the core profile."""
    judged = verdict(lambda item: Outcome.DECLARED if item.needs else None)
    assert judged.line.startswith("reference conforms with known failures to draftmark contract")
    assert list(judged.profiles) == [Profile.CORE]
    assert judged.exit_code() == 1


def test_refused_core_item_fails() -> None:
    """A backend that refuses a geometry of the core has a failed item, so it does not conform."""
    ended = _end(_plugin(supports=lambda geometry: ["bfloat16 is not served here; use float32"]), DECODE)
    assert ended.outcome is Outcome.FAILED
    assert "a geometry of the core profile is refused" in ended.message and "use float32" in ended.message
    assert verdict(lambda item: ended if item.id == DECODE else None).word is Word.DOES_NOT


def test_core_only_backend_conforms_with_refusals() -> None:
    """A backend that serves only the core profile conforms; the verdict names it and counts the refused items."""
    plugin = _plugin(supports=lambda g: ["only the mandatory profile is served here"] if profiles_of(g) else [])
    assert _end(plugin, DECODE).outcome is Outcome.PASSED
    refused = [item.id for item in all_items(Tier.HOST.includes) if item.needs]
    for item in (TREE128, "supports.answers_alike[target-cap]", "sizing.covers[draft-p16-k4]"):
        assert item in refused and _end(plugin, item).outcome is Outcome.REFUSED
    judged = verdict(lambda item: Outcome.REFUSED if item.needs else None)
    assert "(core): " in judged.line and f" {len(refused):,} refused, " in judged.line
    assert judged.counts.passed < judged.counts.refused / 5


def test_refusal_during_a_step_is_a_failure() -> None:
    """An item fails if `attend` raises `Refused` in the middle of a step, because refusals belong in `supports`."""

    def refuse(*arguments: Any) -> None:
        raise Refused("not this batch")

    ended = _end(_plugin(refuse), DECODE)
    assert ended.outcome is Outcome.FAILED
    assert "only supports() may refuse a geometry" in ended.message
    assert verdict(lambda item: ended if item.id == DECODE else None).word is Word.DOES_NOT


def test_old_target_does_not_hide_a_defect() -> None:
    """If a plugin targets contract 1.0, a failed newer check still removes its profile from the verdict."""

    def halve(right: Callable[..., None], q: torch.Tensor, cache: Any, batch: Any, out: torch.Tensor) -> None:
        right(q, cache, batch, out)
        if batch.mode is Mode.VERIFY and cache.k.shape[1] == 128:
            out.mul_(0.5)

    ended = _end(_plugin(halve, minor=0), TREE128)
    assert ended.outcome is Outcome.UPCOMING
    judged = verdict(lambda item: ended if item.id == TREE128 else None, contract_minor=0)
    assert judged.line.startswith("reference conforms to draftmark contract 1.0 (core, ")
    assert Profile.TREE not in judged.profiles
    assert "1 failing" in judged.line
    assert verdict(lambda item: Outcome.FAILED if item.id == TREE128 else None).word is Word.DOES_NOT
