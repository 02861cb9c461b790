"""Long soak test of the decoding loop: random engines with random requests; texts are compared and leaks detected.

    python -m benchmarks.decode.soak --minutes 30 --json benchmarks/results/soak-cpu.json
    python -m benchmarks.decode.soak --minutes 5 --device cuda --backend cuda_triton

A life is one engine with random settings: drafts (none, n-gram, EAGLE chain or tree, adaptive), page size, host
lengths, overlap, pool size, prefix cache, greedy or sampled. Graphs and guard mode are on. Random requests join and
leave: by length, by a stop token, at the context limit, or by cancellation. After each life a plain engine without
graphs decodes the same requests with equal ids, and every token is compared. The exit code is 1 after a wrong token, a
guard hit, a page, a state slot or an engine that is not freed, or growing device memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark import AttentionShape, Geometry
from draftmark_speculative import (
    Adaptive,
    CostTable,
    Eagle,
    Engine,
    EngineConfig,
    FinishReason,
    HostKind,
    Ngram,
    Sampling,
)
from draftmark_speculative.adaptive import Cost
from draftmark_speculative.eagle.tiny import tiny_pair

CONTEXT, VOCAB = 64, 64
REQUESTS = (20, 60)
"""Smallest and largest number of requests in one life."""


@dataclass
class Wish:
    """Parameters of one request: prompt, largest number of new tokens, stop tokens."""

    prompt: list[int]
    count: int
    stop: tuple[int, ...]


def settings(draw: random.Random, backend: str, head: Any) -> EngineConfig:
    """Draw one engine's configuration."""
    kind = draw.choice(["plain", "ngram", "chain", "tree", "tree"])
    speculate = {
        "plain": None,
        "ngram": Ngram(draw.choice([1, 2, 3]), draw.randint(2, 9), 3, 1),
        "chain": Eagle(head, 1, draw.randint(1, 5), draw.randint(2, 7)),
        "tree": Eagle(head, draw.randint(2, 8), draw.randint(1, 4), draw.randint(2, 34)),
    }[kind]
    if speculate is not None and draw.random() < 0.4:
        # The assumed cost of a draft row is zero, low or too high. So the adaptive scheduler drafts always, sometimes,
        # or only in probes.
        row = draw.choice([0.0, 0.03, 1.0])
        costs = CostTable({1: Cost(1.0)}, {1: Cost(1.0), 1001: Cost(1.0 + 1000 * row)})
        speculate = Adaptive(speculate, (), costs, draw.choice([0.01, 0.3]))
    overlap = kind != "ngram" and draw.random() < 0.6
    page_size, reqs = draw.choice([1, 4, 16]), draw.randint(1, 6)
    config = EngineConfig(
        backend=backend, speculate=speculate, page_size=page_size, max_num_reqs=reqs, max_context_len=CONTEXT,
        max_extend_tokens=draw.randint(8, 64), graph=True, overlap=overlap, guard=True,
        host_lengths=draw.choice(list(HostKind)[1:] if overlap else list(HostKind)),
        capture_batch_sizes=draw.choice([(), (reqs,), (reqs + 2, 1)]),
        sampling=Sampling(draw.choice([0.0, 0.0, 0.8]), draw.choice([1.0, 0.9]), draw.randrange(1000)),
    )  # fmt: skip
    if draw.random() < 0.5:
        # The pool holds little more than one request of the largest length, so requests wait and are preempted.
        geometry = Geometry.create(AttentionShape(1, 1, 1, page_size), config.limits, config.draft_shape)
        longest = geometry.max_pages_per_req
        nulls = geometry.null_pages(unique_slots=True)
        config = replace(config, num_pages=nulls + longest + draw.randint(0, longest))
    if draw.random() < 0.4:
        least = -(-2 * config.draft_shape.num_draft_tokens // page_size)
        config = replace(config, prefix_cache=True, state_interval=page_size * draw.randint(least, 2 * least))
    return config


def wishes(draw: random.Random) -> list[Wish]:
    """Draw the random requests of one engine; many of them reach the context limit."""
    found = []
    for _ in range(draw.randint(*REQUESTS)):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, draw.randint(1, 20), draw.randint(1, 60)]))]
        found.append(Wish(prompt, draw.choice([1, draw.randint(1, 30), 1000]), (draw.randrange(VOCAB),)))
    return found


def live(engine: Engine, wanted: list[Wish], draw: random.Random, count: Counter[str]) -> set[int]:
    """Run one engine until every request has ended, and return the ids of cancelled requests."""
    joined, cancelled = 0, set[int]()
    running: set[int] = set()
    received: dict[int, tuple[int, ...]] = {}
    while joined < len(wanted) or engine.busy:
        while joined < len(wanted) and draw.random() < 0.3:
            wish = wanted[joined]
            running.add(engine.submit(wish.prompt, wish.count, wish.stop))
            joined += 1
        for progress in engine.step():
            if progress.request_id in cancelled or not progress.tokens:
                raise AssertionError(f"request {progress.request_id} got {progress.tokens} after it was cancelled")
            received[progress.request_id] = received.get(progress.request_id, ()) + progress.tokens
            if progress.finish is not None:
                running.discard(progress.request_id)
                count[f"ended by {progress.finish}"] += 1
        check_pages(engine)
        if running and draw.random() < 0.01:
            one = draw.choice(sorted(running))
            running.discard(one)
            cancelled.add(one)
            engine.cancel(one)
            count[f"ended by {FinishReason.CANCELLED}"] += 1
            check_pages(engine)
    engine.step()
    cache, states = engine._scheduler._cache, engine._layers.states
    unused, checkpoints = (0, 0) if cache is None else (cache.unused_pages, cache.checkpoints)
    if engine.pages.in_use != unused:
        raise AssertionError(f"{engine.pages.in_use} pages are in use, but the prefix cache has {unused}")
    if states is not None:
        pool = states.groups[0].pool
        if states.slots.free != pool.num_slots - pool.null_slots - checkpoints:
            raise AssertionError(f"{states.slots.free} state slots are free, and the cache has {checkpoints}")
        states.check_guards()
    for group in engine._layers.groups:
        group.arena.check()
    if lost := [one for one in received if engine.output(one) != received[one]]:
        raise AssertionError(f"requests {lost} received tokens that differ from their output")
    return cancelled


def check_pages(engine: Engine) -> None:
    """Check that pages have one owner, none leaks, null pages are unused, and table rows name the request's pages."""
    scheduler, state = engine._scheduler, engine._state
    seated = [*scheduler.prefilling, *scheduler.running]
    everyone, cache = [*scheduler.waiting, *seated], scheduler._cache
    if cache is None:
        held, shared = [page for request in everyone for page in request.pages], set[int]()
    else:
        held = [page for request in everyone for page in cache.private_pages(request)]
        shared = {node.page for request in everyone for node in request.shared} | {one.page for one in cache._unused}
    if len(held) != len(set(held)) or len(shared | set(held)) != engine.pages.in_use or shared & {0, *held}:
        raise AssertionError(f"requests hold {sorted(held)} and {shared}, and {engine.pages.in_use} pages are in use")
    wrong = [r.id for r in seated if state.page_table[r.row, : len(r.pages)].tolist() != r.pages]
    null = state.lengths.first_null_row
    if wrong or state.lengths.device[null:].any() or state.page_table[null:].any():
        raise AssertionError(f"page-table rows of requests {wrong}, or of null rows, hold pages of other requests")


def plain_texts(model: Any, config: EngineConfig, wanted: list[Wish]) -> list[tuple[int, ...]]:
    """Return the texts of the requests `wanted`, decoded by one engine without drafts and without graphs."""
    plain = replace(
        config, speculate=None, graph=False, overlap=False, host_lengths=HostKind.EXACT, num_pages=None,
        capture_batch_sizes=(), max_num_reqs=16, prefix_cache=False,
    )  # fmt: skip
    engine = Engine(model, plain)
    ids = [engine.submit(wish.prompt, wish.count, wish.stop) for wish in wanted]
    while engine.busy:
        engine.step()
    return [engine.output(one) for one in ids]


def one_life(seed: int, model: Any, head: Any, backend: str, count: Counter[str]) -> list[dict[str, Any]]:
    """Run one random engine until its requests end, and return the texts that differ from plain decoding."""
    draw = random.Random(seed)
    config, wanted = settings(draw, backend, head), wishes(draw)
    engine = Engine(model, config)
    cancelled = live(engine, wanted, draw, count)
    texts = plain_texts(model, config, wanted)
    wrong = []
    for one, text in enumerate(texts):
        got = engine.output(one)
        if got != (text[: len(got)] if one in cancelled else text):
            wrong.append({"seed": seed, "request": one, "got": got, "plain": text, "config": str(config)})
    name = type(config.speculate).__name__
    count["lives"] += 1
    count[f"lives of {name if config.speculate else 'plain decoding'}{' with overlap' * config.overlap}"] += 1
    count["requests"] += len(wanted)
    count.update({k: v for k, v in asdict(engine.statistics).items()})
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    if gone() is not None:
        raise AssertionError("the engine outlives its last user")
    return wrong


def device_bytes(device: str) -> int:
    """Return the bytes that torch holds on the device, or the process's peak memory on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        # cuBLAS keeps 32 MiB for each of torch's 32 streams that captured once. That is a plateau, not a leak.
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run random engines one after another until the time is over, and return the report."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, head = tiny_pair(vocab_size=VOCAB, device=args.device, family=args.family)
    count: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    held: list[int] = []
    commit = origin.commit()  # read before the run, because HEAD can change during the run
    start = shown = time.monotonic()
    seed = args.seed
    while time.monotonic() - start < 60 * args.minutes:
        wrong += one_life(seed, model, head, args.backend, count)
        held.append(device_bytes(args.device))
        seed += 1
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"{(shown - start) / 60:5.1f} min  {dict(count)}  wrong {len(wrong)}", flush=True)
    return {
        "device": origin.device_name(args.device),
        "backend": args.backend,
        "family": args.family,
        "commit": commit,
        "torch": torch.__version__,
        "first_seed": args.seed,
        "minutes": round((time.monotonic() - start) / 60, 2),
        "counts": dict(sorted(count.items())),
        "wrong": wrong,
        "bytes_after_first_lives": max(held[:5]),
        "bytes_at_end": held[-1],
    }


def main() -> int:
    """Run the soak, write its report, and return 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="reference")
    parser.add_argument(
        "--family", default="llama", help="a tiny model's family, e.g. qwen3_5_text with recurrent state"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first life")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = soak(args)
    print(json.dumps(report, indent=1))
    origin.write(args.json, report)
    leaked = args.device.startswith("cuda") and report["bytes_at_end"] > report["bytes_after_first_lives"]
    return 1 if report["wrong"] or leaked else 0


if __name__ == "__main__":
    sys.exit(main())
