"""Adaptive drafting beside plain decoding and fixed drafts: the 8B shape, by batch, context and acceptance.

    python -m benchmarks.decode.end_to_end.adaptive --minutes 5 --resume     # rows of results/end-to-end-h200.json
    python -m benchmarks.plots.speed_up                                      # the drawing of it

Acceptance is forced (`forced.RankedAcceptance`). "good" is what SmolLM2's head has on held-out prompts: how sure it
is of its drafts, and how often such drafts come true (`results/eagle-confidence.json`). "bad" keeps each first draft
with 0.2, whatever the head claims. One engine serves both, "good" before "bad", so an adaptive engine has to find out
that drafts ceased to pay. Every window decodes the same tokens of each request behind the same context, for longer
contexts cost more. What is most worth having comes first; `--minutes` ends a run between two engines, `--resume` goes
on with what the file lacks. A row is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from benchmarks.origin import RESULTS
from draftmark.devices import synchronize
from draftmark.runtime import TreeOps
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind
from draftmark_speculative.adaptive.budgets import row_budgets
from draftmark_speculative.adaptive.head import AdaptiveHeadDrafter

from .forced import Claiming, RankedAcceptance, Shares
from .measure import _run, release
from .models import LLAMA, Subject, llama, seat

CHAIN, TREE = (1, 4, 5), (4, 4, 16)
BAD_SHARE = 0.2
PROFILES = ("good", "bad")

WAYS = (("none", (1, 1, 1)), ("adaptive", TREE), ("adaptive", CHAIN))
FIXED = (("chain", CHAIN), ("tree", TREE))
COVER = [(64, 1024), (1, 1024), (256, 1024), (16, 1024), (4, 1024), (128, 1024)]
REST = [(64, 8192), (1, 8192), (16, 32768), (1, 32768), (16, 8192), (4, 8192), (4, 32768)]
"""Beyond these KV does not fit: a token of the 8B shape and its head takes 132 KiB, 128 x 8k would take 138 GiB."""
TINY = [(1, 64), (3, 64)]
WARM = {"adaptive": 60}
"""Rounds before each window; others need 6. An adaptive engine learns what drafts are worth in them."""


def good(topk: int) -> Shares:
    """What forces a head's acceptance, by the record of how sure it was and what came true; see `RankedAcceptance`."""
    rows = json.loads((RESULTS / "eagle-confidence.json").read_text())["rows"]
    levels = sorted((row for row in rows if row["topk"] == topk), key=lambda row: row["level"])
    return [[[kept, *((1 - kept) * share for share in row["siblings"])] for kept in row["kept"]] for row in levels]


def bad(topk: int) -> Shares:
    """The same form: the likeliest child alone, with one share."""
    return [[[BAD_SHARE] + [0.0] * (topk - 1) for _ in level] for level in good(topk)]


@dataclass(frozen=True)
class Unit:
    """One engine: its rows are one for each profile, of plain decoding one in all."""

    speculate: str
    shape: tuple[int, int, int]
    batch: int
    context: int

    @property
    def profiles(self) -> tuple[str, ...]:
        """What is forced, in order."""
        return ("",) if self.speculate == "none" else PROFILES

    def key(self, backend: str, profile: str) -> dict[str, Any]:
        """The columns that name a row."""
        topk, steps, nodes = self.shape
        return {
            "model": LLAMA, "kind": "window", "backend": backend, "speculate": self.speculate, "topk": topk,
            "num_steps": steps, "num_draft_tokens": nodes, "batch": self.batch, "context": self.context,
            "profile": profile,
        }  # fmt: skip


def units(points: list[tuple[int, int]]) -> Iterator[Unit]:
    """Every engine, point by point; fixed drafts come last, at short contexts alone."""
    for batch, context in points:
        yield from (Unit(way, shape, batch, context) for way, shape in WAYS)
    for batch, context in points:
        if (batch, context) not in REST:
            yield from (Unit(way, shape, batch, context) for way, shape in FIXED)


def open_engine(unit: Unit, subject: Subject, backend: str, limit: int) -> tuple[Engine, list[RankedAcceptance]]:
    """The engine, and what forces its acceptance."""
    cuda, forced = subject.model.device.type == "cuda", []
    drafts = None if unit.speculate == "none" else Eagle(subject.head, *unit.shape)
    if drafts is not None and unit.speculate == "adaptive":
        fitting = (b for b in row_budgets(unit.batch, unit.shape[2]) if b > unit.batch)  # smaller ones hold no batch
        drafts = Claiming(drafts, tuple(fitting), forced=forced)

    def wrap(ops: TreeOps) -> TreeOps:
        forced.append(RankedAcceptance(ops, good(unit.shape[0]), 0, subject.model.device, unit.batch))
        return forced[0]

    config = EngineConfig(
        backend=backend, speculate=drafts, page_size=64, max_num_reqs=unit.batch, max_context_len=limit,
        max_extend_tokens=8192, graph=cuda, capture_batch_sizes=(unit.batch,), host_lengths=HostKind.UPPER_BOUND,
        overlap=True,
    )  # fmt: skip
    return Engine(subject.model, config, wrap_tree_ops=None if drafts is None else wrap), forced


def measure(unit: Unit, subject: Subject, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The unit's rows, one for each profile, behind rounds that are not counted."""
    warm, topk = WARM.get(unit.speculate, 6), unit.shape[0]
    longest = unit.shape[1] + 1 if unit.speculate != "none" else 1
    wanted = args.tokens + 4 * args.tokens // unit.batch  # of each request: few of them vary more
    limit = -(-(unit.context + max(warm * longest, wanted) + 16 * longest) // 64) * 64
    start = time.perf_counter()
    engine, forced = open_engine(unit, subject, args.backend, limit)
    opened = time.perf_counter() - start
    for profile in unit.profiles:
        for one in forced:
            one.force(bad(topk) if profile == "bad" else good(topk))
        seated(engine, unit)
        _run(engine, warm)
        seated(engine, unit)
        _run(engine, 4)
        before = copy.copy(engine.statistics)
        tokens, seconds = _decode(engine, wanted * unit.batch)
        counted = _counted(before, engine.statistics)
        yield {
            **unit.key(args.backend, profile), **counted,
            "tokens_per_s": round(tokens / seconds, 1), "round_ms": round(seconds / counted["rounds"] * 1e3, 3),
            "graph_mib": round(engine.graph_bytes / 2**20, 1), "open_s": round(opened, 1),
            "seconds": round(time.perf_counter() - start, 1), **_table(engine), "commit": args.commit, "run": args.run,
            "torch": torch.__version__,
            "device": args.device_name, "note": "",
        }  # fmt: skip


def seated(engine: Engine, unit: Unit) -> None:
    """Give the engine the unit's requests anew, at their context's end."""
    for request in list(engine._scheduler.running):
        engine.cancel(request.id)
    while engine._pending:
        engine.step()
    seat(engine, unit.batch, unit.context)
    drafting = engine._drafting
    if isinstance(drafting, AdaptiveHeadDrafter):  # as a prefill does
        rows = torch.tensor([request.row for request in engine._scheduler.running], device=engine.model.device)
        drafting._backlog.forget(rows)
        drafting._calibration.forget(rows)


def _decode(engine: Engine, tokens: int) -> tuple[int, float]:
    """Tokens accepted until there are as many as that, and seconds."""
    before = engine.statistics.accepted
    synchronize(engine.model.device)
    start = time.perf_counter()
    while engine.statistics.accepted - before < tokens:
        engine.step()
    synchronize(engine.model.device)
    return engine.statistics.accepted - before, time.perf_counter() - start


def _counted(before: Any, after: Any) -> dict[str, Any]:
    rounds = max(1, after.rounds - before.rounds)
    return {
        "accepted_len": round((after.accepted - before.accepted) / max(1, after.verified - before.verified), 3),
        "rounds": rounds, "plain_rounds": after.plain - before.plain,
        "rows_per_round": round((after.rows - before.rows) / rounds, 1),
    }  # fmt: skip


def _table(engine: Engine) -> dict[str, Any]:
    """An adaptive engine's cost table, in ms at the window's lengths."""
    policy = getattr(engine._drafting, "_policy", None)
    if policy is None:
        return {}
    rows = [request.row for request in engine._scheduler.running]
    kv, table = sum(engine._state.lengths.upper_bound(rows).lens), policy.table
    at = {"plain": kv, "verify": kv, "drafting": kv, "catching_up": len(rows) * engine._drafting._backlog.room}
    return {"costs_ms": {
        name: {str(size): round(cost.at(much) * 1e3, 3) for size, cost in sorted(getattr(table, name).items())}
        for name, much in at.items()
    }}  # fmt: skip


def main() -> None:
    """Measure until the time is up; write the file after every row."""
    args = _arguments()
    start, cuda = time.perf_counter(), args.device.startswith("cuda")
    args.commit, args.device_name = args.commit or origin.commit(), origin.device_name(args.device)
    args.run = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    result = json.loads(args.json.read_text()) if args.json.exists() else {"schema": 2, "rows": []}
    result["forced_shares"] = {"good": "eagle-confidence.json", "bad": BAD_SHARE}
    # Rows with a profile are this benchmark's; those of `end_to_end` itself in the same file stay as they are.
    rows = result["rows"] = [row for row in result["rows"] if args.resume or "profile" not in row]
    points = TINY if args.tiny else [*COVER, *([] if args.cover else REST)]
    done = [{name: row.get(name) for name in Unit("", (0, 0, 0), 0, 0).key("", "")} for row in rows]
    pending = [u for u in units(points) if any(u.key(args.backend, p) not in done for p in u.profiles)]
    subject, left = llama({}, args.device, args.tiny), 0
    for unit in pending:
        if time.perf_counter() - start > args.minutes * 60:
            left += 1
            continue
        try:
            for row in measure(unit, subject, args):
                key = unit.key(args.backend, row["profile"])
                rows[:] = [r for r in rows if any(r.get(name) != value for name, value in key.items())] + [row]
                print(
                    json.dumps({n: v for n, v in row.items() if n not in ("commit", "costs_ms", "model")}), flush=True
                )
                origin.write(args.json, result)
        except Exception:  # one engine must not cost the others
            traceback.print_exc()
        release()
    print(f"{len(rows)} rows, {left} engines left out, {time.perf_counter() - start:.0f} s, cuda {cuda}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "end-to-end-h200.json", help="where to write the rows")
    parser.add_argument("--resume", action="store_true", help="keep this benchmark's rows that the file has")
    parser.add_argument("--minutes", type=float, default=8, help="no engine is opened after them")
    parser.add_argument("--cover", action="store_true", help="contexts of 1k alone: every batch")
    parser.add_argument(
        "--tokens", type=int, default=72, help="of each request in a window; of a single one five times"
    )
    parser.add_argument("--backend", default="cuda_triton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny Llama shape, to try the benchmark itself")
    parser.add_argument("--commit", help="what to write where git knows nothing; else DRAFTMARK_COMMIT")
    return parser.parse_args()


if __name__ == "__main__":
    main()
