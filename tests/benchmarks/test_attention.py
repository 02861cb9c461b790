"""Tests of the attention benchmark: cases, their names, and versions of a backend."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.attention.cases import CASES, Case, build, cleared, reference
from benchmarks.attention.drawn import MOST_BYTES, drawn
from benchmarks.attention.grid import PAGES, SUBSET, case, grid, named
from benchmarks.attention.models import PACKED, Model
from benchmarks.attention.ours import batch_of, ours
from benchmarks.attention.versions import versions
from benchmarks.attention.warming import warm
from draftmark import Mode
from draftmark_contract.cli.measuring import relative_error
from tests.benchmarks.small_cases import LENS, SMALL


def test_random_cases_cover_every_kind() -> None:
    """Random cases depend only on the seed, have names that reproduce them, and cover every kind and page size."""
    cases = drawn(300, 1)
    assert [one.name for one in cases] == [one.name for one in drawn(300, 1)]
    assert {one.name for one in cases} != {one.name for one in drawn(300, 2)}
    assert all(named(one.name) == one for one in cases) and len({one.name for one in cases}) == 300
    kinds = {re.match("[a-z]+", one.name)[0] for one in cases}  # type: ignore[index]
    assert kinds == {"decode", "chain", "uneven", "draft", "verify", "extend", "chunk", "chunks"}
    assert {one.model.page for one in cases} == {16, 32, 64, 128} == set(PAGES)
    assert {one.model.heads // one.model.kv_heads for one in cases} >= {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}
    assert max(one.held_bytes for one in cases) <= MOST_BYTES
    assert {min(one.q_len // 64, 3) for one in cases if one.tree} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        Model(4, 2, 16, 16, window=20, cap=2.0, sinks=True),
        *(replace(SMALL, packed=packed) for packed in PACKED),
    ],
    ids=["plain", "else", *PACKED],
)
@pytest.mark.parametrize(
    ("kind", "rows", "mode"),
    [
        ("decode", 1, Mode.DECODE),
        ("chain", 5, Mode.VERIFY),
        ("uneven", 5, Mode.RAGGED_VERIFY),
        ("verify", 7, Mode.VERIFY),
        ("draft", 4, Mode.DRAFT),
        ("extend", 1, Mode.EXTEND),
        ("chunk", 6, Mode.EXTEND),
        ("chunks", 6, Mode.EXTEND),
    ],
)
def test_reference_backend_matches_the_reference(kind: str, rows: int, mode: Mode, model: Model) -> None:
    """The reference backend gives the benchmark's float64 output, and the case has the mode that engines use."""
    inputs = build(case(model, kind, LENS, rows), "cpu", 1)
    assert batch_of(inputs)[1].mode is mode
    k, v = inputs.caches[0]
    assert (k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()) == bool(model.packed)
    peer = ours("reference", inputs)
    peer.calls[0]()
    wanted = reference(inputs, tuple(cleared(one) for one in inputs.caches[0]))
    assert relative_error(peer.outs[0], wanted) < 1e-2
    assert not torch.allclose(wanted.float(), reference(inputs, inputs.caches[0], "none").nan_to_num().float())
    if model.window:
        bare = replace(inputs, case=replace(inputs.case, model=replace(model, window=0)))
        assert not torch.allclose(wanted, reference(bare, tuple(cleared(one) for one in inputs.caches[0])))
        assert inputs.case.kv_bytes < inputs.case.held_bytes or not any(inputs.case.lens)


@pytest.mark.parametrize("of", [lambda: SUBSET, grid], ids=["subset", "grid"])
def test_every_case_has_its_own_name(of: Callable[[], tuple[Case, ...]]) -> None:
    """Names within a list of cases are different, and the list "grid" has every name of the list "subset"."""
    names = [one.name for one in of()]
    assert len(set(names)) == len(names)
    assert {one.name for one in SUBSET} <= {one.name for one in grid()}


@pytest.mark.parametrize("of", [lambda: CASES, lambda: SUBSET, grid], ids=["twelve", "subset", "grid"])
def test_name_reproduces_its_case(of: Callable[[], tuple[Case, ...]]) -> None:
    """A case can be built from its name, even if the case is in no list."""
    assert [named(one.name) for one in of()] == list(of())
    other = named("verify24-3xragged500@12/2x160-p16-e4m3")
    assert (other.q_len, other.tree, len(other.lens), max(other.lens) <= 500) == (24, True, 3, True)
    assert other.model == Model(12, 2, 160, 16).narrow() and other.name == "verify24-3xragged500@12/2x160-p16-e4m3"
    other = named("chain5-2x90@4/2x64-p16-e4m3-w128-cap2.5-sinks")
    assert other.model == Model(4, 2, 64, 16, window=128, cap=2.5, sinks=True).narrow()
    assert other.name == "chain5-2x90@4/2x64-p16-e4m3-w128-cap2.5-sinks"
    for packed in PACKED:
        other = named(f"decode-2x90@4/2x64-p16-sinks-{packed}")
        assert other.model == Model(4, 2, 64, 16, sinks=True, packed=packed)
        assert other.name == f"decode-2x90@4/2x64-p16-sinks-{packed}"


@pytest.mark.parametrize(
    "name", ["verify-8x100", "decode4-8x100", "decode-8x", "extend-8xragged", "decode-0x8", "decode-8x100@32/8x128", ""]
)
def test_invalid_case_name_raises(name: str) -> None:
    """A case name raises an error if it lacks rows, length, requests or page, or has a part foreign to its kind."""
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is not a case's name; write KIND")):
        named(name)


@pytest.mark.long
def test_version_is_a_backend_of_its_own(tmp_path: Path) -> None:
    """A version (a copy of a backend in a folder) is imported once from that folder and gives equal output.

    It runs in a new process, because two copies that replace Triton's interpreter would stay in this one.
    """
    spec = importlib.util.find_spec("draftmark_cuda_triton")
    assert spec is not None and spec.submodule_search_locations
    copy = shutil.copytree(spec.submodule_search_locations[0], tmp_path / "copy")
    folders = [f"as_it_is={spec.submodule_search_locations[0]}", f"copied={copy}"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        once, files, alike, worst = pool.apply(answers_of, (folders,))
    assert once and files == {"as_it_is": spec.submodule_search_locations[0], "copied": str(copy)}
    assert alike and worst < 1e-2


def answers_of(folders: list[str]) -> tuple[bool, dict[str, str], bool, float]:
    """Return (versions are imported once, their code folders, whether outputs are equal, error against float64)."""
    found = versions(folders)
    once = versions(folders)["copied"].plugin.__class__ is found["copied"].plugin.__class__
    files = {name: str(Path(inspect.getfile(type(one.plugin))).parent) for name, one in found.items()}
    inputs = build(case(Model(4, 2, 64, 16), "verify", LENS, 7), "cpu", 1)
    outs = []
    for one in found.values():
        peer = ours(one, inputs)
        peer.calls[0]()
        outs.append(peer.outs[0])
    wanted = reference(inputs, tuple(cleared(one) for one in inputs.caches[0]))
    return once, files, torch.equal(*outs), relative_error(outs[0], wanted)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (["old"], "'old' is not NAME=FOLDER"),
        (["old="], "'old=' is not NAME=FOLDER"),
        (["a-b=x"], "'a-b=x' is not NAME=FOLDER"),
        (["old=nowhere"], "version 'old' has no backend.py in "),
    ],
)
def test_invalid_version_raises(argument: list[str], error: str) -> None:
    """An argument that is not NAME=FOLDER, or a folder without a backend, raises an error before any measurement."""
    with pytest.raises(ValueError, match=re.escape(error)):
        versions(argument)


@pytest.mark.long
def test_cases_are_warmed_up_in_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """Each of our backends runs each case once, with repeated pages; a failure is printed and stops nothing else."""
    two = [case(SMALL, "decode", (6000,), 1), case(Model(4, 2, 16, 0), "chain", LENS, 3)]
    assert warm(two, ["cuda_triton"], [], 2, 120.0, "cpu") == 2
    assert build(two[0], "cpu", 1, 10).caches[0][0].shape[0] == 11
    printed = capfd.readouterr().out
    assert two[1].name in printed and two[0].name not in printed


def test_uneven_rows_are_equal_in_every_run() -> None:
    """The uneven row counts of a case are equal in every run, and range from 1 to the case's number of rows."""
    one, again = (case(SMALL, "uneven", (100,) * 64, 5) for _ in range(2))
    assert one == again and set(one.q_lens) == {1, 2, 3, 4, 5} and one.q_lens == one.tail_lens
