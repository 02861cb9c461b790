"""Adaptive drafting beside plain decoding and fixed drafts: the 8B shape, by batch, context and acceptance.

    python -m benchmarks.decode.end_to_end.adaptive --minutes 5 --resume     # rows of results/end-to-end-h200.json
    python -m benchmarks.plots.speed_up                                      # the drawing of it

Acceptance is forced (`forced.RankedAcceptance`): "good" is what SmolLM2's head has on held-out prompts, "bad" keeps
each first draft with 0.2. One engine serves both, "good" before "bad", so an adaptive engine has to find out that
drafts ceased to pay. What is most worth having comes first; `--minutes` ends a run between two engines, `--resume`
goes on with what the file lacks. A row is written as soon as it is measured.
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
from draftmark.runtime import TreeOps
from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind
from draftmark_speculative.adaptive.budgets import row_budgets

from .forced import RankedAcceptance
from .measure import _run, release
from .models import LLAMA, Subject, llama, seat

Shares = tuple[tuple[float, ...], ...]

CHAIN, TREE = (1, 4, 5), (4, 4, 16)
GOOD: dict[int, Shares] = {
    1: ((0.595,), (0.624,), (0.704,), (0.749,)),
    4: ((0.595, 0.1, 0.045, 0.026), (0.624, 0.06, 0.03, 0.013), (0.66, 0.02, 0.008), (0.72, 0.02, 0.005)),
}
"""By topk: the chain's profile, and the tree's, both of `results/eagle-held-out.json`; how the tree's divides over
siblings is chosen: the first child as in the chain as far as the sum allows, the rest falling by about half."""
BAD: Shares = ((0.2,),) * 4
PROFILES = ("good", "bad")

WAYS = (("none", (1, 1, 1)), ("adaptive", TREE), ("chain", CHAIN), ("tree", TREE), ("adaptive", CHAIN))
COVER = [(64, 1024), (1, 1024), (256, 1024), (16, 1024), (4, 1024), (128, 1024)]
REST = [(64, 8192), (1, 8192), (16, 32768), (1, 32768), (16, 8192), (4, 8192), (4, 32768)]
"""Beyond these KV does not fit: a token of the 8B shape and its head takes 132 KiB, 128 x 8k would take 138 GiB."""
TINY = [(1, 64), (3, 64)]
WARM = {"adaptive": 40}
"""Rounds before the first window; others need 6. An adaptive engine learns what drafts are worth in them."""


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
    """Every engine, point by point, so that the rows that are compared are measured side by side."""
    for batch, context in points:
        yield from (Unit(way, shape, batch, context) for way, shape in WAYS)


def open_engine(unit: Unit, subject: Subject, backend: str, limit: int) -> tuple[Engine, list[RankedAcceptance]]:
    """The engine, and what forces its acceptance."""
    cuda, forced = subject.model.device.type == "cuda", []
    drafts = None if unit.speculate == "none" else Eagle(subject.head, *unit.shape)
    if drafts is not None and unit.speculate == "adaptive":
        fitting = (b for b in row_budgets(unit.batch, unit.shape[2]) if b > unit.batch)  # smaller ones hold no batch
        drafts = Adaptive(drafts, tuple(fitting))

    def wrap(ops: TreeOps) -> TreeOps:
        forced.append(RankedAcceptance(ops, GOOD[unit.shape[0]], 0, subject.model.device))
        return forced[0]

    config = EngineConfig(
        backend=backend, speculate=drafts, page_size=64, max_num_reqs=unit.batch, max_context_len=limit,
        max_extend_tokens=8192, graph=cuda, capture_batch_sizes=(unit.batch,), host_lengths=HostKind.UPPER_BOUND,
        overlap=True,
    )  # fmt: skip
    return Engine(subject.model, config, wrap_tree_ops=None if drafts is None else wrap), forced


def measure(unit: Unit, subject: Subject, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The unit's rows: `rounds` rounds at a constant batch for each profile, behind some that are not counted."""
    warm = WARM.get(unit.speculate, 6)
    longest = unit.shape[1] + 1 if unit.speculate != "none" else 1
    limit = -(-(unit.context + (8 + (warm + args.rounds) * len(unit.profiles)) * longest) // 64) * 64
    start = time.perf_counter()
    engine, forced = open_engine(unit, subject, args.backend, limit)
    seat(engine, unit.batch, unit.context)
    opened = time.perf_counter() - start
    for profile in unit.profiles:
        for one in forced:
            one.force(BAD if profile == "bad" else GOOD[unit.shape[0]])
        _run(engine, warm)
        before = copy.copy(engine.statistics)
        tokens, seconds = _run(engine, args.rounds)
        yield {
            **unit.key(args.backend, profile), **_counted(before, engine.statistics),
            "tokens_per_s": round(tokens / seconds, 1), "round_ms": round(seconds / args.rounds * 1e3, 3),
            "graph_mib": round(engine.graph_bytes / 2**20, 1), "open_s": round(opened, 1),
            "seconds": round(time.perf_counter() - start, 1), **_table(engine), "commit": args.commit, "run": args.run,
            "torch": torch.__version__,
            "device": args.device_name, "note": "",
        }  # fmt: skip


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
    return {"costs_ms": {
        name: {str(size): round(cost.at(kv) * 1e3, 3) for size, cost in sorted(getattr(table, name).items())}
        for name in ("plain", "verify", "drafting")
    }}  # fmt: skip


def main() -> None:
    """Measure until the time is up; write the file after every row."""
    args = _arguments()
    start, cuda = time.perf_counter(), args.device.startswith("cuda")
    args.commit, args.device_name = args.commit or origin.commit(), origin.device_name(args.device)
    args.run = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    result = json.loads(args.json.read_text()) if args.json.exists() else {"schema": 2, "rows": []}
    result["forced_shares"] = {"good": {str(k): v for k, v in GOOD.items()}, "bad": BAD}
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
                args.json.write_text(json.dumps(result, indent=1) + "\n")
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
    parser.add_argument("--rounds", type=int, default=72, help="counted for each row")
    parser.add_argument("--backend", default="cuda_triton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny Llama shape, to try the benchmark itself")
    parser.add_argument("--commit", help="what to write where git knows nothing; else DRAFTMARK_COMMIT")
    return parser.parse_args()


if __name__ == "__main__":
    main()
