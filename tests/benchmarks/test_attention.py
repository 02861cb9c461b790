"""Tests of the attention benchmark: its cases, its float64 reference, and alternating measurements of the backends."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from benchmarks.attention import fa3, measuring
from benchmarks.attention.__main__ import without_page_sizes
from benchmarks.attention.cases import CASES, Case, Inputs, build, cleared, reference
from benchmarks.attention.drawn import MOST_BYTES, drawn
from benchmarks.attention.grid import PAGES, SUBSET, case, grid, named
from benchmarks.attention.models import PACKED, Model
from benchmarks.attention.ours import batch_of, ours
from benchmarks.attention.peers import Peer
from benchmarks.attention.stubs import Absent
from benchmarks.attention.versions import versions
from benchmarks.attention.warming import warm
from draftmark import Mode
from draftmark_contract.cli import measuring as cli_measuring
from draftmark_contract.cli.measuring import relative_error, replayed_us

SMALL = Model(4, 2, 16, 16)
LENS = (40, 15, 64)


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


def test_right_backends_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends with right output are timed alternately, every second turn backwards; other backends are not timed."""
    small = case(SMALL, "decode", LENS, 1)
    timed: list[str] = []

    def answer(name: str, out: float) -> Callable[[Inputs], Peer]:
        def make(_: Inputs) -> Peer:
            return Peer([lambda: name], [torch.full((2,), out)], note="as asked")

        return make

    def absent(_: Inputs) -> Peer:
        raise Absent("not here")

    def broken(_: Inputs) -> Peer:
        raise ValueError("of its own")

    def turn_of(calls: list[Callable[[], str]]) -> Callable[[], float]:
        name = calls[0]()

        def take() -> float:
            timed.append(name)
            return {"a": 3.0, "b": 5.0}[name] + len(timed)

        return take

    peers = {"a": answer("a", 1.0), "wrong": answer("wrong", 2.0), "none": absent, "broken": broken}
    peers["b"] = answer("b", 1.0)
    monkeypatch.setattr(measuring, "OURS", {})
    monkeypatch.setattr(measuring, "backends", lambda _: peers)
    monkeypatch.setattr(measuring, "build", lambda _: build(small, "cpu", 1))
    monkeypatch.setattr(measuring, "reference", lambda *_: torch.ones(2))
    monkeypatch.setattr(measuring, "turn_of", turn_of)
    monkeypatch.setattr(measuring, "WARM_TURNS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = {row["backend"]: row for row in measuring.measure(small, None, turns=2)}
    assert timed == ["a", "b", "b", "a", "a", "b"]  # WARM_TURNS is 1, so the first "a" and "b" are not counted
    assert (rows["a"]["turns"], rows["a"]["us"]) == ([7.0, 8.0], 7.5)
    assert (rows["b"]["turns"], rows["b"]["us"], rows["b"]["note"]) == ([8.0, 11.0], 9.5, "as asked")
    assert not any(rows[name]["turns"] or rows[name]["us"] for name in ("wrong", "none", "broken"))
    assert [rows[name]["note"] for name in ("wrong", "none", "broken")] == [
        "wrong answer, not timed", "not here", "failed: ValueError: of its own",
    ]  # fmt: skip


@pytest.mark.parametrize(("rounds", "checked"), [(True, True), (False, False)])
def test_e4m3_rounded_answers_are_distinguished(rounds: bool, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output with rounding to e4m3 counts as right only if the backend declares this rounding."""
    small = case(replace(SMALL, kv_dtype="float8_e4m3fn"), "decode", (900, 700), 1)
    inputs = build(small, "cpu", 1)
    clean = tuple(cleared(one) for one in inputs.caches[0])
    exact, rows = reference(inputs, clean).bfloat16(), inputs.q.to(clean[0].dtype).to(inputs.q.dtype)
    rounded = _with_rounded_weights(replace(inputs, q=rows), clean)
    peers = {
        "exact": lambda _: Peer([lambda: None], [exact], rounds=True),
        "rounded": lambda _: Peer([lambda: None], [rounded], rounds=rounds),
        "wrong": lambda _: Peer([lambda: None], [rounded * 1.1], rounds=True),
    }
    monkeypatch.setattr(measuring, "OURS", {})
    monkeypatch.setattr(measuring, "backends", lambda _: peers)
    monkeypatch.setattr(measuring, "build", lambda _: inputs)
    monkeypatch.setattr(measuring, "turn_of", lambda _: lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = {row["backend"]: row for row in measuring.measure(small, None, turns=1)}
    assert [(row["rounded"], row["checked"]) for row in found.values()] == [
        (False, True),
        (rounds, checked),
        (True, False),
    ]
    assert found["exact"]["max_err"] < 1e-2 < found["rounded"]["max_err"]


def _with_rounded_weights(inputs: Inputs, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute one row per request with softmax weights rounded to e4m3, relative to the largest weight."""
    out, model = torch.empty_like(inputs.q), inputs.case.model
    k, v = (one.flatten(0, 1).double() for one in (cache[0].float(), cache[1].float()))
    for r, n in enumerate(inputs.case.lens):
        at = torch.arange(n + 1)
        slots = inputs.page_table[r, at // model.page].long() * model.page + at % model.page
        for head in range(model.heads):
            of = head * model.kv_heads // model.heads
            scores = k[slots, of] @ inputs.q[r, head].double() * model.scale
            weights = (scores - scores.max()).exp()
            narrow = (weights * 256).to(cache[0].dtype).double() / 256
            out[r, head] = (narrow @ v[slots, of] / weights.sum()).to(out.dtype)
    return out


@pytest.mark.parametrize(
    ("kind", "rows", "tail"), [("decode", 1, "exact"), ("verify", 7, "causal"), ("draft", 4, "none")]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_fa3_gets_queries_in_the_kv_dtype(
    kv_dtype: str, kind: str, rows: int, tail: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FA3 gets queries in the KV dtype, because it has no kernel for other queries, and writes bf16."""
    seen: list[tuple[torch.dtype, ...]] = []

    def schedule(*given: object) -> None:
        seen.append((given[7],))

    def forward(*given: torch.Tensor) -> tuple[None, None]:
        seen.append((given[0].dtype, given[1].dtype, given[6].dtype))
        return None, None

    library = tmp_path / "fa3.so"
    library.touch()
    monkeypatch.setenv(fa3.FA3_LIBRARY, str(library))
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=forward, get_scheduler_metadata=schedule), False)
    peer = fa3.fa3(build(case(replace(SMALL, kv_dtype=kv_dtype), kind, LENS, rows), "cpu", 1))
    peer.calls[0]()
    dtype = getattr(torch, kv_dtype)
    assert seen == [(dtype,), (dtype, dtype, torch.bfloat16)]
    assert (peer.tail, peer.rounds) == (tail, kv_dtype != "bfloat16")


class Recorded:
    """Substitute for torch's CUDA graph and event: each replay advances the clock by 0.4 ms."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def replay(self) -> None:
        self.log.append("replay")

    def record(self) -> None:
        self.at = self.log.count("replay")

    def synchronize(self) -> None:
        self.log.append("wait")

    def elapsed_time(self, end: Recorded) -> float:
        return 0.4 * (end.at - self.at)


def test_turn_replays_one_graph_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn replays for at least 8 ms without waits between replays; `draftmark bench` waits after each replay."""
    log = Recorded.log
    log.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext(log.append("capture")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("device"))
    calls = [lambda: log.append("call")] * 4
    take = measuring.turn_of(calls)
    assert log == [*["call"] * 4, "device", "capture", *["call"] * 4, *["replay", "wait"] * 2]
    log.clear()
    assert take() == 100.0 and log == [*["replay"] * 20, "wait"]
    log.clear()
    monkeypatch.setattr(cli_measuring, "WARM_SECONDS", 0.0)
    assert replayed_us(calls, 3) == pytest.approx(100.0)
    assert log == ["capture", *["call"] * 4, *["replay", "wait"] * 3]


def test_two_page_sizes_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two page sizes of one case have their own caches and are timed alternately; both rows have the case's name."""
    used: list[int] = []

    def answer(inputs: Inputs) -> Peer:
        page = inputs.case.model.page
        assert {one.shape[1] for one in inputs.caches[0]} == {page}
        return Peer([lambda: used.append(page)], [torch.ones(2)])

    def turn_of(calls: list[Callable[[], None]]) -> Callable[[], float]:
        def take() -> float:
            calls[0]()
            return float(used[-1] + len(used))

        return take

    monkeypatch.setattr(measuring, "OURS", {})
    monkeypatch.setattr(measuring, "backends", lambda _: {"a": answer})
    monkeypatch.setattr(measuring, "build", lambda one: build(one, "cpu", 1))
    monkeypatch.setattr(measuring, "reference", lambda *_: torch.ones(2))
    monkeypatch.setattr(measuring, "turn_of", turn_of)
    monkeypatch.setattr(measuring, "WARM_TURNS", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = measuring.measure_pages(case(SMALL, "decode", LENS, 1), (16, 8), None, turns=2)
    assert used == [16, 8, 16, 8, 8, 16]  # each page size runs once for the output check, then the two alternate
    assert [(row["page_size"], row["us"]) for row in rows] == [(16, 16 + 4.5), (8, 8 + 4.5)]
    assert named("verify16-64x8192@32/8x128-p16-w4096").paged(64) == named("verify16-64x8192@32/8x128-p64-w4096")
    names = [(one.name, one.model) for one in without_page_sizes()]
    assert len(set(names)) == len(names) and not any("@" in name for name, _ in names)
