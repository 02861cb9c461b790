"""Tests of the suite as users run it: from any folder, with selected items, and with bad plugins."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from draftmark import load
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.runner.selection import select
from draftmark_tools.cli.errors import ArgumentError

ONE = "supports.mandatory_profile"


Judged = Callable[..., tuple[int, str, dict[str, str]]]


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch, draftmark: Callable[..., Any]) -> Judged:
    """Return a function that runs the contract in a folder, which is also on the path for plugins.

    The function takes (folder, backend, k, tier, …); further keywords are options of the command, and True is an
    option without a value. It returns the exit code, the output, and the outcome per item.
    """

    def run(folder: Path, name: str, k: str = "", tier: str = "sizing", **more: Any) -> tuple[int, str, dict[str, str]]:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        argv = ["contract", name, "--tier", tier, "--allow-part", *(["-k", k] if k else [])]
        for option, value in {"json": "verdict.json", **more}.items():
            argv += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        done = draftmark(*argv)
        verdict = folder / "verdict.json"
        results = json.loads(verdict.read_text())["results"] if verdict.exists() else []
        return done.code, done.out + done.err, {row["item"]: row["outcome"] for row in results}

    return run


def test_sample_takes_fixed_items_of_every_check(contract: Judged, tmp_path: Path) -> None:
    """--sample 2 selects at most two cases of each check, and every run selects the same cases."""
    ids = [item.id for item in all_items(Tier.SIZING.includes, backend=load("reference"))]
    taken = select(ids, sample=2)
    assert taken == select(ids, sample=2) and set(taken) <= set(ids)
    cases = Counter(item.partition("[")[0] for item in taken)
    assert set(cases.values()) == {1, 2}
    assert len(cases) >= 10
    code, text, ran = contract(tmp_path, "reference", k="load", sample=1)
    assert code == 0 and list(ran) == select(ids, k="load", sample=1), text


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        ("graphs", {"graphs.a[x]", "graphs.b[wide]"}),
        ("Graphs and not wide", {"graphs.a[x]"}),
        ("not graphs", {"padding.a[x]"}),
        ("b[wide or padding", {"graphs.b[wide]", "padding.a[x]"}),
        ("not (graphs or padding)", None),
        ("(graphs or padding) and [x]", {"graphs.a[x]", "padding.a[x]"}),
        ("", {"graphs.a[x]", "graphs.b[wide]", "padding.a[x]"}),
    ],
)
def test_expression_selects_by_parts_of_ids(k: str, expected: set[str] | None) -> None:
    """-k has parts of ids, and, or, not and parentheses; upper and lower case are equal."""
    ids = ["graphs.a[x]", "graphs.b[wide]", "padding.a[x]"]
    if expected is None:
        with pytest.raises(ArgumentError, match="selects no item"):
            select(ids, k=k)
    else:
        assert set(select(ids, k=k)) == expected


def test_other_projects_have_no_plugin_of_the_suite(tmp_path: Path) -> None:
    """The suite registers no pytest plugin, so a project that does not use it is not changed."""
    assert not [one for one in entry_points(group="pytest11") if one.value.startswith("draftmark")]


RAISES = "@hookimpl\ndef draftmark_buffers(geometry):\n    raise RuntimeError('no driver')\n"
EXITS = "@hookimpl\ndef draftmark_supports(geometry):\n    raise SystemExit('bye')\n"
WRONG = "@hookimpl\ndef draftmark_buffers(geometry):\n    return 'many'\n"
PRINTS = """
from types import SimpleNamespace
from draftmark_reference import contract

def layouts(geometry):
    print("hi")
    return contract.layouts(geometry)

def contract_notes():
    return SimpleNamespace(layouts=layouts)
"""


def _failing(name: str, check: str) -> list[str]:
    """Run all items of one check on a backend in this process; return the messages of the failed items."""
    subject = BackendUnderTest(load(name), "cpu", Tier.SIZING)
    ended = [run_item(item, subject, []) for item in all_items() if item.check.name == check]
    assert ended
    return [one.message for one in ended if one.outcome is Outcome.FAILED]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (RAISES, "buffers() raised RuntimeError: no driver"),
        (EXITS, "raised SystemExit: bye"),
        (WRONG, "buffers() must return list, got 'many'"),
        (PRINTS, "layouts() printed"),
    ],
    ids=["raises", "exits", "wrong", "prints"],
)
def test_bad_plugin_fails_with_a_clear_item(distribution: Callable[..., Path], body: str, words: str) -> None:
    """An item reports a hook that raises, exits, returns a wrong type or prints output."""
    distribution("bad", extra=body)
    assert any(words in message for message in _failing("bad", "load.answers_repeatably"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "workers", "words"),
    [
        (7, 1, "ended the process with code 7"),
        pytest.param(7, 2, "ended the process with code 7", marks=pytest.mark.slow),
        pytest.param(0, 1, "ended the process with code 0", marks=pytest.mark.slow),
    ],
)
def test_plugin_that_ends_the_process_fails_one_item(
    contract: Judged, distribution: Callable[..., Path], code: int, workers: int, words: str
) -> None:
    """If a hook calls os._exit, one item fails, and later items still run."""
    body = "import os\n@hookimpl\ndef draftmark_supports(geometry):\n"
    body += f"    os._exit({code}) if geometry.limits.max_context_len == 1000 else None\n    return []\n"
    status, text, items = contract(distribution("dies", extra=body), "dies", k=ONE, workers=workers)
    assert status == 1, text
    assert [item for item, outcome in items.items() if outcome == "failed"] == [f"{ONE}[padded]"]
    assert len(items) == 5
    assert words in text


LOSES = """
import torch
from draftmark import Mode

def lost(*_):
    raise RuntimeError("an illegal memory access was encountered")

@hookimpl
def draftmark_supports(geometry):
    shape = geometry.attention
    if shape.num_qo_heads == shape.num_kv_heads and Mode.VERIFY in geometry.modes and not geometry.limits.overlap:
        torch.cpu.synchronize = lost
    torch.cpu.synchronize()
    return []
"""


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_item_that_destroys_the_device_context_fails(
    contract: Judged, distribution: Callable[..., Path], workers: int
) -> None:
    """An item that causes an illegal memory access fails, and the remaining items run in a new process."""
    folder = distribution("loses", extra=LOSES)
    k = "opens_what_it_supports_on_device and (mha or gqa)"
    code, text, items = contract(folder, "loses", k=k, tier="device", device="cpu", workers=workers)
    assert code == 1, text
    failed = [item for item, outcome in items.items() if outcome == "failed"]
    assert failed == ["supports.opens_what_it_supports_on_device[target-mha]"]
    assert len(items) > 10
    record = json.loads((folder / "verdict.json").read_text())
    (message,) = (row["message"] for row in record["results"] if row["outcome"] == "failed")
    assert "raised RuntimeError: an illegal memory access" in message
    assert "the device accepted no more work from this process" in message


NAMED_OTHERWISE = "@hookimpl\ndef draftmark_describe():\n    return BackendInfo('somebody', 'any', 0, True)\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "no installed distribution registers it"),
        ("raise ValueError('no driver')\n", "raised ValueError: no driver"),
        ("import not_there\n", "No module named 'not_there'"),
        (NAMED_OTHERWISE, "returned the name 'somebody'"),
        ("import os\nos._exit(7)\n", "ended the process with code 7"),
        ("import ctypes\nctypes.string_at(0)\n", "ended the process with code -11"),
    ],
    ids=["missing", "raises", "lacks a module", "wrong name", "exits", "segfaults"],
)
def test_backend_that_does_not_load_has_no_verdict(
    contract: Judged, distribution: Callable[..., Path], tmp_path: Path, body: str | None, words: str
) -> None:
    """A plugin that fails to load gets no verdict and no record; the output has the cause, and no item runs."""
    folder = tmp_path if body is None else distribution("unloadable", extra=body)
    code, text, items = contract(folder, "unloadable")
    assert (code, items) == (2, {})
    assert not (folder / "verdict.json").exists()
    assert "unloadable has no verdict on draftmark contract" in text and words in text
    assert "does not conform" not in text
    assert len(text.splitlines()) < 5


def test_outputs_are_checked_before_anything_runs(contract: Judged, tmp_path: Path) -> None:
    """If an output path is in a missing folder or is a folder, the run ends before the first item."""
    code, text, _ = contract(tmp_path, "reference", json="results/verdict.json")
    assert code == 2
    assert "lies in a folder that does not exist; create the folder first" in text
    code, text, _ = contract(tmp_path, "reference", html=tmp_path)
    assert code == 2 and "is a folder; name a file" in text


def test_unknown_item_gets_suggestions(contract: Judged, tmp_path: Path) -> None:
    """An unknown item id ends the run with a list of similar ids."""
    code, text, _ = contract(tmp_path, "reference", item="numerics.match_float64[mandatory-decod]")
    assert code == 2 and "close to it are numerics.match_float64[mandatory-decode]" in text


ZEROS = """
from dataclasses import replace

reference = ReferencePlugin()

@hookimpl
def draftmark_describe():
    return replace(reference.info, name="zeros")

@hookimpl
def draftmark_open_backend(geometry, arena):
    backend = reference.open_backend(geometry, arena)
    backend.attend = lambda q, cache, batch, out: out.zero_()
    return backend
"""
"""A plugin with a kernel that writes zeros and claims to support everything that the reference supports."""


@pytest.mark.long
def test_backend_with_many_failures_prints_one_screen(contract: Judged, distribution: Callable[..., Path]) -> None:
    """The first failed checks are printed in full, the others in one line each; the verdict comes last."""
    folder = distribution("zeros", extra=ZEROS)
    most = "numerics or padding or lengths or purity or graphs or history or windows or layers or sinks or pools"
    code, text, items = contract(folder, "zeros", tier="host", sample=1, k=most)
    assert code == 1
    assert Counter(items.values())["failed"] > 30
    lines = text.splitlines()
    assert len(lines) <= 60, text
    assert lines[0] == "numerics.match_float64[mandatory-decode]", "one eager forward comes first"
    for words in ("batch: decode: decode step 0", "got: 0 at request 0", "bugs of this class: vllm#43961"):
        assert words in text
    assert "run it again: draftmark contract zeros --item 'numerics.match_float64[mandatory-decode]'" in text
    assert "more checks fail" in text and "graphs.replay_equals_eager: " in text
    assert lines[-2].startswith("zeros does not conform to draftmark contract")


@pytest.mark.long
def test_failed_history_names_its_seed(contract: Judged, distribution: Callable[..., Path]) -> None:
    """--seed selects other random test histories, and a failure prints the seed that reproduces it."""
    folder = distribution("zeros", extra=ZEROS)
    item = "random_history.equals_the_oracle[plain-0]"
    code, text, items = contract(folder, "zeros", item=item, seed=7)
    assert (code, items) == (1, {item: "failed"})
    assert "the shortest history that was found, with --seed 7" in text
    code, text, _ = contract(folder, "reference", seed=7, journal="run.jsonl")
    assert code == 2 and "--seed cannot be used with --journal" in text


KNOWN = """[[known_failure]]
id = "k"
reason = "r"
url = "u"
fault = "vendor"
item = "supports.mandatory_profile[*]"
"""


@pytest.mark.long
def test_known_failures_are_read_from_the_plugins_folder(contract: Judged, distribution: Callable[..., Path]) -> None:
    """A failure that matches an entry of contract.toml in the plugin's folder has the outcome DECLARED."""
    folder = distribution("excused", extra=RAISES)
    (folder / "throwaway_draftmark_excused" / "contract.toml").write_text(KNOWN)
    code, text, items = contract(folder, "excused", k=ONE, allow_known=True)
    assert code == 0, text
    assert set(items.values()) == {"declared"}


def test_known_failures_must_match_an_item(distribution: Callable[..., Path]) -> None:
    """An entry of contract.toml that matches no item is itself a failure."""
    current, name = "load.known_failures_are_current", "throwaway_draftmark_bad"
    folder = distribution("bad") / name
    (folder / "contract.toml").write_text(KNOWN)
    assert _failing("bad", current) == []
    (folder / "contract.toml").write_text(KNOWN.replace("mandatory_profile[*]", "no_such[*]"))
    (message,) = _failing("bad", current)
    assert "matches no item" in message


def test_items_are_listed_by_tier(contract: Judged, tmp_path: Path) -> None:
    """--list prints the items of the chosen tiers with the numbers of their rules, and runs none."""
    code, text, ran = contract(tmp_path, "reference", list=True)
    lines = text.splitlines()
    sizing = [item.id for item in all_items(Tier.SIZING.includes, backend=load("reference"))]
    assert code == 0 and not ran and [one.partition(" ")[0] for one in lines[:-1]] == sizing
    assert lines[-1] == f"{len(sizing):,} items" and "load.describes_itself[plugin]  (rule " in text


@pytest.mark.long
def test_item_that_became_worse_exits_with_1(contract: Judged, distribution: Callable[..., Path]) -> None:
    """--against compares with an earlier run: only an item that became worse gives exit code 1."""
    folder = distribution("zeros")
    assert contract(folder, "zeros", k=ONE, json="old.json")[0] == 0
    code, text, _ = contract(folder, "zeros", k=ONE, against="old.json")
    assert code == 0 and "0 items worse, 0 better, 0 still failing" in text
    module = folder / "throwaway_draftmark_zeros" / "__init__.py"
    module.write_text(module.read_text() + RAISES)
    code, text, _ = contract(folder, "zeros", k=ONE, against="old.json")
    assert code == 1 and "5 items worse" in text and f"worse: {ONE}[padded]: passed → failed" in text, text


def test_device_tier_needs_a_device(contract: Judged, tmp_path: Path) -> None:
    """Without an accelerator, a run of the device tier ends before the first item; it does not fall back to the CPU."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    code, text, _ = contract(tmp_path, "reference", tier="device")
    assert code == 2
    assert "torch sees no accelerator here" in text
