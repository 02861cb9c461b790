"""Adaptive drafting compared with plain decoding and fixed drafts: the 8B shape, by batch, context and acceptance.

    python -m benchmarks.decode.end_to_end.adaptive --minutes 5 --resume     # rows of results/end-to-end-h200.json
    python -m benchmarks.plots.speed_up                                      # draws them

Acceptance is forced (`forced.RankedAcceptance`), with two profiles:

* "good": confidence and acceptance of SmolLM2's head on held-out prompts (`results/eagle-confidence.json`).
* "bad": each first draft is accepted with probability 0.2, whatever the head's confidence.

One engine runs "good", then "bad", so an adaptive engine must detect that drafts no longer help. Every window decodes
an equal number of tokens per request after an equal context, because longer contexts cost more. The most useful engines
come first. `--minutes` ends a run between two engines, and `--resume` adds missing rows. Each row is written at once.
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
"""Other points. Larger ones do not fit: a token of the 8B shape and its head takes 132 KiB of KV, 128 x 8k 138 GiB."""
TINY = [(1, 64), (3, 64)]
WARM = {"adaptive": 60}
"""Rounds before each window, 6 by default. An adaptive engine learns the value of drafts in them."""


def good(topk: int) -> Shares:
    """Return acceptance probabilities recorded from a trained head, per level and class (see `RankedAcceptance`)."""
    rows = json.loads((RESULTS / "eagle-confidence.json").read_text())["rows"]
    levels = sorted((row for row in rows if row["topk"] == topk), key=lambda row: row["level"])
    return [[[kept, *((1 - kept) * share for share in row["siblings"])] for kept in row["kept"]] for row in levels]


def bad(topk: int) -> Shares:
    """Return acceptance probabilities of a bad head: only the most probable child is accepted, in each class alike."""
    return [[[BAD_SHARE] + [0.0] * (topk - 1) for _ in level] for level in good(topk)]


@dataclass(frozen=True)
class Unit:
    """One engine to measure. Plain decoding gives one row; other engines give one row per acceptance profile."""

    speculate: str
    shape: tuple[int, int, int]
    batch: int
    context: int

    @property
    def profiles(self) -> tuple[str, ...]:
        """Names of the acceptance profiles that this engine runs, in order."""
        return ("",) if self.speculate == "none" else PROFILES

    def key(self, backend: str, profile: str) -> dict[str, Any]:
        """Return the columns that identify a row."""
        topk, steps, nodes = self.shape
        return {
            "model": LLAMA, "kind": "window", "backend": backend, "speculate": self.speculate, "topk": topk,
            "num_steps": steps, "num_draft_tokens": nodes, "batch": self.batch, "context": self.context,
            "profile": profile,
        }  # fmt: skip


def units(points: list[tuple[int, int]]) -> Iterator[Unit]:
    """Yield every engine, for one (batch, context) after another. Fixed drafts come last, only at short contexts."""
    for batch, context in points:
        yield from (Unit(way, shape, batch, context) for way, shape in WAYS)
    for batch, context in points:
        if (batch, context) not in REST:
            yield from (Unit(way, shape, batch, context) for way, shape in FIXED)


def open_engine(unit: Unit, subject: Subject, backend: str, limit: int) -> tuple[Engine, list[RankedAcceptance]]:
    """Return the engine, and the objects that force its acceptance."""
    cuda, forced = subject.model.device.type == "cuda", []
    drafts = None if unit.speculate == "none" or subject.head is None else Eagle(subject.head, *unit.shape)
    if drafts is not None and unit.speculate == "adaptive":
        # A row budget up to the batch size has room for the root rows only, not for drafts.
        fitting = (b for b in row_budgets(unit.batch, unit.shape[2]) if b > unit.batch)
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
    """Yield the rows of one engine, one for each acceptance profile. Warm-up rounds come before each row."""
    warm, topk = WARM.get(unit.speculate, 6), unit.shape[0]
    longest = unit.shape[1] + 1 if unit.speculate != "none" else 1
    # Tokens per request. Small batches decode more tokens, because their speed varies more.
    wanted = args.tokens + 4 * args.tokens // unit.batch
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
    """Cancel the engine's requests, and add new ones with a full context."""
    for request in list(engine._scheduler.running):
        engine.cancel(request.id)
    while engine._pending:
        engine.step()
    seat(engine, unit.batch, unit.context)
    drafting = engine._drafting
    if isinstance(drafting, AdaptiveHeadDrafter):  # a prefill would reset this state, but `seat` runs none
        rows = torch.tensor([request.row for request in engine._scheduler.running], device=engine.model.device)
        drafting._backlog.forget(rows)
        drafting._calibration.forget(rows)


def _decode(engine: Engine, tokens: int) -> tuple[int, float]:
    """Decode until at least `tokens` are accepted; return the accepted tokens and the seconds."""
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
    """Return an adaptive engine's cost table, in ms at the window's lengths."""
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
    """Measure until the time is over, and write the file after every row."""
    args = _arguments()
    start, cuda = time.perf_counter(), args.device.startswith("cuda")
    args.commit, args.device_name = args.commit or origin.commit(), origin.device_name(args.device)
    args.run = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    result = json.loads(args.json.read_text()) if args.json.exists() else {"schema": 2, "rows": []}
    result["forced_shares"] = {"good": "eagle-confidence.json", "bad": BAD_SHARE}
    # Rows with a profile belong to this benchmark. Rows of `end_to_end` in the same file stay as they are.
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
        except Exception:  # one failing engine must not stop the other engines
            traceback.print_exc()
        release()
    print(f"{len(rows)} rows, {left} engines left out, {time.perf_counter() - start:.0f} s, cuda {cuda}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "end-to-end-h200.json", help="file for the rows")
    parser.add_argument("--resume", action="store_true", help="keep this benchmark's rows in the file")
    parser.add_argument("--minutes", type=float, default=8, help="open no engine after this time")
    parser.add_argument("--cover", action="store_true", help="only contexts of 1k, with every batch")
    parser.add_argument(
        "--tokens", type=int, default=72, help="tokens of each request in a window; five times as many at batch 1"
    )
    parser.add_argument("--backend", default="cuda_triton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="use a tiny Llama shape, to test the benchmark itself")
    parser.add_argument("--commit", help="commit to record; by default DRAFTMARK_COMMIT or git's HEAD")
    return parser.parse_args()


if __name__ == "__main__":
    main()
