"""Attention of cuda_triton beside every peer that can be run here, on one GPU, in one process.

    python benchmarks/attention.py --json benchmarks/results/attention-h200.json [--case NAME …] [--backend NAME …]

Every answer is checked against float64 before it is timed. A time is the median of CUDA-graph replays, after a
tenth of a second of them; calls rotate through KV sets larger than L2 together. Schedules and plans are made before
the timed calls, for peers too; `metadata-256` times ours. TB/s counts K and V once.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attention_stubs as stubs
import torch
from attention_cases import (
    CASES,
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    Case,
    Inputs,
    build,
    clear_unused,
    error,
    microseconds,
    reference,
)
from attention_peers import Peer, backends
from attention_stubs import Absent

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.devices import profile
from draftmark.lengths import Exact

TOLERANCE = 1e-2


def batch_of(inputs: Inputs) -> tuple[Geometry, ForwardBatch]:
    """The case as draftmark sees it."""
    case, requests = inputs.case, len(inputs.case.lens)
    mode, step, draft = _mode(case)
    limits = Limits(requests, max(case.lens) + case.tail_len, max(2048, requests * case.q_len if case.ragged else 0))
    geometry = Geometry.create(AttentionShape(HEADS, KV_HEADS, DIM, PAGE), limits, draft, profile("cuda"), (mode,))
    tail = Tree(inputs.mask, inputs.depth) if case.tree else Causal()
    positions = torch.zeros(requests * case.q_len, dtype=torch.int64, device="cuda")
    batch = ForwardBatch(
        mode, step, inputs.prefix_lens, inputs.q_indptr, inputs.page_table, tail, positions, Exact(case.lens),
        requests, (case.q_len,) * requests, (case.tail_len,) * requests,
    )  # fmt: skip
    return geometry, batch


def _mode(case: Case) -> tuple[Mode, int, DraftShape]:
    if case.ragged:
        return Mode.EXTEND, 0, DraftShape()
    if not case.tree:
        return Mode.DECODE, 0, DraftShape()
    if case.q_len == case.tail_len:
        return Mode.VERIFY, 0, DraftShape(topk=8, num_steps=5, num_draft_tokens=case.q_len)
    step = case.tail_len // case.q_len - 1
    return Mode.DRAFT, step, DraftShape(topk=case.q_len, num_steps=step + 2, num_draft_tokens=case.tail_len)


def cuda_triton(inputs: Inputs) -> Peer:
    """Ours, through the hooks."""
    geometry, batch = batch_of(inputs)
    backend = load("cuda_triton").open(geometry, "cuda")
    backend.plan(batch)
    backend.write_metadata(batch)
    outs = [torch.full_like(inputs.q, float("nan")) for _ in inputs.caches]
    layers = [KVCache(*pair) for pair in inputs.caches]
    calls = [
        lambda kv=kv, out=out: backend.attend(inputs.q, kv, batch, out) for kv, out in zip(layers, outs, strict=True)
    ]
    return Peer(calls, outs)


def measure(case: Case, names: set[str] | None) -> list[dict]:
    """One row per backend of one case."""
    inputs = build(case)
    asked: dict[str, Callable[[Inputs], Peer]] = {"cuda_triton": cuda_triton, **backends(case.name)}
    expected: dict[str, torch.Tensor] = {}
    rows = []
    for name, make in asked.items():
        if names and name not in names:
            continue
        if name != "cuda_triton":
            clear_unused(inputs)
        try:
            peer = make(inputs)
            peer.calls[0]()
            torch.cuda.synchronize()
            if peer.tail not in expected:
                clean = tuple(cache.nan_to_num(0.0) for cache in inputs.caches[0])
                expected[peer.tail] = reference(inputs, clean, peer.tail)
            worst = error(peer.outs[0], expected[peer.tail])
            if not worst < TOLERANCE:
                rows.append(_row(case, name, None, worst, peer.tail, "wrong answer, not timed"))
            else:
                rows.append(_row(case, name, microseconds(peer.calls), worst, peer.tail, peer.note))
        except Absent as absent:
            rows.append(_row(case, name, None, None, "", str(absent)))
        except Exception as failure:  # a peer's own; ours must not fail
            if name == "cuda_triton":
                raise
            told = " ".join(str(failure).split())[:300]
            rows.append(_row(case, name, None, None, "", f"failed: {type(failure).__name__}: {told}"))
        peer = None
        print(_line(rows[-1]), flush=True)
    return rows


def _row(case: Case, name: str, us: float | None, worst: float | None, tail: str, note: str) -> dict:
    rate = case.kv_bytes / us / 1e6 if us else None
    return {
        "case": case.name, "backend": name, "us": us, "tb_per_s": rate, "max_err": worst,
        "checked": worst is not None and worst < TOLERANCE, "tail": tail, "note": note,
    }  # fmt: skip


def _line(row: dict) -> str:
    if row["us"] is None:
        return f"{row['case']:18} {row['backend']:16} absent: {row['note']}"
    return (
        f"{row['case']:18} {row['backend']:16} {row['us']:8.1f} us {row['tb_per_s']:5.2f} TB/s "
        f"error {row['max_err']:.1e}  tail {row['tail']}"
    )


def metadata_rows() -> list[dict]:
    """write_metadata of 256 requests: GPU time in a graph, host time of an eager call."""
    rows = []
    for name, mode, draft in (
        ("metadata-256-decode", Mode.DECODE, DraftShape()),
        ("metadata-256-verify64", Mode.VERIFY, DraftShape(8, 5, 64)),
    ):
        limits = Limits(256, 131072)
        geometry = Geometry.create(AttentionShape(HEADS, KV_HEADS, DIM, PAGE), limits, draft, profile("cuda"), (mode,))
        extent = geometry.extent(mode)
        count = 256 * extent.q_len
        lens = torch.randint(0, 131072, (256,), dtype=torch.int32)
        batch = ForwardBatch(
            mode, 0, lens.cuda(), torch.arange(257, dtype=torch.int32, device="cuda") * extent.q_len,
            torch.randint(1, 9999, (256, geometry.max_pages_per_req), dtype=torch.int32, device="cuda"), Causal(),
            torch.zeros(count, dtype=torch.int64, device="cuda"), Exact(tuple(lens.tolist())), 256,
            (extent.q_len,) * 256, (extent.tail_len,) * 256,
        )  # fmt: skip
        backend = load("cuda_triton").open(geometry, "cuda")
        us = microseconds([lambda b=backend, x=batch: b.write_metadata(x)] * 20)
        for _ in range(100):
            backend.write_metadata(batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            backend.write_metadata(batch)
        host = (time.perf_counter() - begin) / 200 * 1e6
        torch.cuda.synchronize()
        rows.append({"case": name, "backend": "cuda_triton", "us": us, "host_us": host, "launches": 1})
        print(f"{name:24} {us:6.1f} us on the GPU, {host:6.1f} us on the host", flush=True)
    return rows


def memory_rows() -> list[dict]:
    """Declared bytes of the graph state at 256 requests, topk 8, context 131072, 5 steps, 64 draft tokens."""
    from draftmark import DRAFT_MODES, TARGET_MODES

    rows = []
    for name, modes in (("graph-state-target", TARGET_MODES), ("graph-state-draft", DRAFT_MODES)):
        limits = Limits(256, 131072, 8192, (256,))
        shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE)
        geometry = Geometry.create(shape, limits, DraftShape(8, 5, 64), profile("cuda"), modes)
        backend = None  # the last one's arena must be gone before this one's is weighed
        before = torch.cuda.memory_allocated()
        backend = load("cuda_triton").open(geometry, "cuda")
        on_device = torch.cuda.memory_allocated() - before
        declared = backend.arena.nbytes
        rows.append({"case": name, "backend": "cuda_triton", "declared_bytes": declared, "device_bytes": on_device})
        print(f"{name:24} {declared / 2**20:.1f} MiB declared, {on_device / 2**20:.1f} MiB on the device", flush=True)
    return rows


def versions() -> dict[str, str]:
    """What was measured, by distribution."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or ""}
    for name in ("torch", "triton", "flashinfer-python", "draftmark"):
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found | stubs.versions()


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*")
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--commit", default="", help="recorded as is; by default asked of git")
    args = parser.parse_args()
    commit = args.commit
    if not commit:
        told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = told.stdout.strip()
    metadata, memory = ([], []) if args.case else (metadata_rows(), memory_rows())
    rows = []
    for case in CASES:
        if not args.case or case.name in args.case:
            rows += measure(case, set(args.backend) if args.backend else None)
            torch.cuda.empty_cache()
    result = {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions(), "rows": rows,
        "metadata": metadata, "graph_state": memory,
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
