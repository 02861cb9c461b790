"""Tests of contract_notes(): invalid notes are violations, and items that need missing notes are unjudged."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftmark import BackendInfo, BackendPlugin, BufferSpec, Geometry, LoadedBackend, Mode
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Tier
from draftmark_contract.layouts import UNDECLARED
from draftmark_contract.notes import notes_of
from draftmark_contract.runner.item import Outcome, all_items, run_item
from draftmark_contract.sizing.geometries import mandatory
from draftmark_reference import ReferencePlugin, contract

ITEMS = {item.id: item for item in all_items(Tier.HOST.includes)}


def plugin(notes: object, workspace: bool = False) -> BackendUnderTest:
    """Return the reference backend with these contract notes, and on request with a workspace buffer of its own."""

    class Noted(ReferencePlugin):
        def contract_notes(self) -> object:
            return notes

        def buffers(self, geometry: Geometry) -> list[BufferSpec]:
            own = [BufferSpec("scratch", (64,), "uint8", "64")] if workspace else []
            return [*super().buffers(geometry), *own]

    return BackendUnderTest(LoadedBackend("reference", Noted()), "cpu", Tier.HOST)


def end(item: str, subject: BackendUnderTest) -> Outcome:
    """Run one item and return its outcome."""
    return run_item(ITEMS[item], subject, []).outcome


def item_of(check: str) -> str:
    """Return the id of the first item of a check with a target geometry."""
    return next(name for name in ITEMS if name.startswith(f"{check}[") and "target" in name)


@pytest.mark.parametrize("check", ["sizing.covers", "tightness.index_buffers", "metadata.decodes_to_the_token_history"])
def test_without_notes_metadata_is_not_judged(check: str) -> None:
    """If a backend has no notes, items about metadata are unjudged: none fails and none passes."""
    item = item_of(check)
    assert end(item, plugin(contract)) is Outcome.PASSED
    assert end(item, plugin(None)) is Outcome.UNJUDGED


def test_without_notes_outputs_are_judged() -> None:
    """If a backend has no notes, its outputs are still compared with float64."""
    item = next(name for name in ITEMS if name.startswith("numerics.") and "target" in name)
    assert end(item, plugin(None)) is Outcome.PASSED


def test_workspace_without_usage_is_not_judged() -> None:
    """`usage` is optional for a backend without own buffers; with an own buffer and no `usage` the item is unjudged."""
    item = item_of("tightness.own_buffers")
    layouts_alone = SimpleNamespace(layouts=contract.layouts)
    assert end(item, plugin(layouts_alone)) is Outcome.PASSED
    assert end(item, plugin(layouts_alone, workspace=True)) is Outcome.UNJUDGED
    complete = SimpleNamespace(layouts=contract.layouts, usage=lambda geometry, batch: {"scratch": 64})
    assert end(item, plugin(complete, workspace=True)) is Outcome.PASSED


def test_undeclared_layouts_are_opaque() -> None:
    """If a backend has no notes, the layout of every mode is opaque (not described, so not decoded)."""
    subject = plugin(None)
    assert subject.layouts(mandatory()) == dict.fromkeys(mandatory().modes, UNDECLARED)
    assert UNDECLARED.opaque and subject.unjudged


def raising(*_: Any) -> Any:
    raise KeyError("aground")


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (lambda geometry: None, "wrong type"),
        (lambda geometry: {}, "a MetadataSpec for extend, decode"),
        (lambda geometry: {Mode.EXTEND: UNDECLARED}, "a MetadataSpec for decode"),
        (raising, "raised KeyError: 'aground'"),
    ],
    ids=["none", "empty", "one mode", "raises"],
)
def test_invalid_layouts_are_a_violation(layouts: Any, words: str) -> None:
    """If layouts() is invalid, the message names the function, the returned value and the expected value."""
    with pytest.raises(ContractViolation) as caught:
        plugin(SimpleNamespace(layouts=layouts)).layouts(mandatory())
    assert words in str(caught.value) and "layouts()" in str(caught.value)


@pytest.mark.parametrize("usage", [lambda geometry, batch: 12, raising], ids=["number", "raises"])
def test_invalid_usage_is_a_violation(usage: Any) -> None:
    """If usage() returns anything but a dict of bytes by buffer name, that is a violation."""
    with pytest.raises(ContractViolation, match=r"usage\(\)"):
        plugin(SimpleNamespace(usage=usage)).notes.usage(mandatory(), None)  # type: ignore[arg-type]


def test_contract_notes_are_the_module_next_to_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes are the module `contract` of the plugin's package, else of a base class's package, else None."""
    lonely = ModuleType("lonely_plugin")
    monkeypatch.setitem(sys.modules, "lonely_plugin", lonely)

    class Derived(ReferencePlugin):
        __module__ = "lonely_plugin"

    class Alone(BackendPlugin):
        __module__ = "lonely_plugin"
        info = BackendInfo("alone", "any", 0, True)

        def buffers(self, geometry: Geometry) -> list[BufferSpec]:
            return []

        def open_backend(self, geometry: Geometry, arena: Any) -> Any:
            raise NotImplementedError

    assert notes_of(Derived()).__name__ == "draftmark_reference.contract"
    assert notes_of(Alone()) is None
