"""Tests of the attention benchmark: backends alternate, and wrong answers are left out."""

from __future__ import annotations

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
from benchmarks.attention.cases import Inputs, build, cleared, reference
from benchmarks.attention.grid import case, named
from benchmarks.attention.peers import Peer
from benchmarks.attention.stubs import Absent
from draftmark_contract.cli import measuring as cli_measuring
from draftmark_contract.cli.measuring import replayed_us
from tests.benchmarks.small_cases import LENS, SMALL


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
