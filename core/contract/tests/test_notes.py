"""Tests of contract_notes(): invalid notes are violations, and items that need missing notes are unjudged."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import draftmark
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


@pytest.mark.parametrize("count", [2, 6, True, 4.0, None, "4"])
def test_invalid_roundoffs_are_a_violation(count: Any) -> None:
    """If roundoffs() returns no int from 3 to 5, the sizing tier already fails, with the value and the limits."""
    subject = plugin(SimpleNamespace(layouts=contract.layouts, roundoffs=lambda geometry, mode: count))
    with pytest.raises(ContractViolation, match=r"roundoffs\(\)(.|\n)*an int from 3 to 5"):
        subject.notes.roundoffs(mandatory(), Mode.EXTEND)
    result = run_item(ITEMS["load.answers_repeatably[mandatory]"], subject, [])
    assert result.outcome is Outcome.FAILED and repr(count) in result.message


class Nudged(ReferencePlugin):
    """Reference backend with outputs that are 3 unit roundoffs of bfloat16 too large, before they are rounded."""

    def open_backend(self, geometry: Geometry, arena: Any) -> Any:
        backend: Any = super().open_backend(geometry, arena)
        right = backend.attend

        def attend(q: Any, cache: Any, batch: Any, out: Any, **more: Any) -> None:
            right(q, cache, batch, out, **more)
            out.copy_(out.float() * (1 + 3 * 2.0**-8))

        backend.attend = attend
        return backend


@pytest.mark.parametrize(
    ("declared", "outcome", "words"),
    [
        (None, Outcome.FAILED, "draftmark_contract.oracle.attention)\n"),
        (3, Outcome.FAILED, "draftmark_contract.oracle.attention)\n"),
        (4, Outcome.FAILED, "; the bound is 4 unit roundoffs, as the plugin's contract notes declare"),
        (5, Outcome.PASSED, ""),
    ],
)
def test_declared_roundoffs_decide_the_bound(declared: int | None, outcome: Outcome, words: str) -> None:
    """A declared bound decides, and the result and its message show it."""

    def roundoffs(geometry: Geometry, mode: Mode) -> int:
        return declared or 3

    made: Any = Nudged()
    made.contract_notes = lambda: SimpleNamespace(
        layouts=contract.layouts, **({} if declared is None else {"roundoffs": roundoffs})
    )
    subject = BackendUnderTest(LoadedBackend("reference", made), "cpu", Tier.HOST)
    result = run_item(ITEMS["numerics.match_float64[mandatory-decode]"], subject, [])
    assert result.outcome is outcome and words in result.message, result.message
    assert result.marks == ((f"within {declared} roundoffs (declared)",) if (declared or 3) > 3 else ())


def test_layers_in_float32_have_no_declared_bound() -> None:
    """A declaration changes neither the bound of a layer in float32 nor that of outputs that the suite computes."""
    subject = plugin(SimpleNamespace(layouts=contract.layouts, roundoffs=lambda geometry, mode: 5))
    core = mandatory()
    single = replace(core, attention=replace(core.attention, q_dtype="float32", kv_dtype="float32"))
    assert subject.roundoffs(single, Mode.DECODE) == 3 and not subject.marks
    assert subject.roundoffs(core, Mode.DECODE) == 5 and subject.marks
    kernels_elsewhere = BackendUnderTest(draftmark.load("cuda_trtllm"), "cpu", Tier.HOST)
    assert kernels_elsewhere.roundoffs(core, Mode.DECODE) == 3 and not kernels_elsewhere.marks


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
