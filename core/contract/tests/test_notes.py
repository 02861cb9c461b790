"""What a plugin tells the suite alone: it is checked where it is read, and what it leaves out is not judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftmark import BufferSpec, Geometry, LoadedBackend, Mode, Role, Unit
from draftmark.reference import ReferencePlugin, contract
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Tier
from draftmark_contract.layouts import UNDECLARED
from draftmark_contract.runner.item import Outcome, all_items, run_item
from draftmark_contract.sizing.geometries import mandatory

ITEMS = {item.id: item for item in all_items(Tier.HOST.includes)}


def plugin(notes: object, workspace: bool = False) -> BackendUnderTest:
    """The reference with these notes, and if asked with a workspace whose need only it knows."""

    class Noted(ReferencePlugin):
        def contract_notes(self) -> object:
            return notes

        def buffers(self, geometry: Geometry) -> list[BufferSpec]:
            own = [BufferSpec("scratch", Role.WORKSPACE, (64,), "uint8", Unit.BYTES, "64")] if workspace else []
            return [*super().buffers(geometry), *own]

    return BackendUnderTest(LoadedBackend("reference", Noted()), "cpu", Tier.HOST)


def end(item: str, subject: BackendUnderTest) -> Outcome:
    """How one item ends."""
    return run_item(ITEMS[item], subject, []).outcome


def item_of(check: str) -> str:
    """The first item of a check that serves a target."""
    return next(name for name in ITEMS if name.startswith(f"{check}[") and "target" in name)


@pytest.mark.parametrize("check", ["sizing.covers", "tightness.index_buffers", "metadata.decodes_to_the_token_history"])
def test_without_notes_metadata_is_not_judged(check: str) -> None:
    """Nothing fails for want of a declaration, and nothing that needs one passes."""
    item = item_of(check)
    assert end(item, plugin(contract)) is Outcome.PASSED
    assert end(item, plugin(None)) is Outcome.UNJUDGED


def test_without_notes_outputs_still_judge() -> None:
    """Kernels that run here are compared with float64, whatever the plugin tells of its metadata."""
    item = next(name for name in ITEMS if name.startswith("numerics.") and "target" in name)
    assert end(item, plugin(None)) is Outcome.PASSED


def test_a_workspace_without_usage_is_not_judged() -> None:
    """`usage` may be left out where no buffer is the plugin's own; with one, its size is open."""
    item = item_of("tightness.own_buffers")
    layouts_alone = SimpleNamespace(layouts=contract.layouts)
    assert end(item, plugin(layouts_alone)) is Outcome.PASSED
    assert end(item, plugin(layouts_alone, workspace=True)) is Outcome.UNJUDGED
    told = SimpleNamespace(layouts=contract.layouts, usage=lambda geometry, batch: {"scratch": 64})
    assert end(item, plugin(told, workspace=True)) is Outcome.PASSED


def test_unsaid_layouts_are_opaque_in_every_mode() -> None:
    """What stands in for a declaration claims nothing."""
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
def test_layouts_that_are_none_are_a_violation(layouts: Any, words: str) -> None:
    """The message names the function, what was got and what was expected."""
    with pytest.raises(ContractViolation) as caught:
        plugin(SimpleNamespace(layouts=layouts)).layouts(mandatory())
    assert words in str(caught.value) and "layouts()" in str(caught.value)


@pytest.mark.parametrize("usage", [lambda geometry, batch: 12, raising], ids=["number", "raises"])
def test_usage_that_is_none_is_a_violation(usage: Any) -> None:
    """Bytes by buffer name, in a dict."""
    with pytest.raises(ContractViolation, match=r"usage\(\)"):
        plugin(SimpleNamespace(usage=usage)).notes.usage(mandatory(), None)  # type: ignore[arg-type]
