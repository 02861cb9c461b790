"""Benchmark of one layer's attention on an Ascend NPU in µs, eager and in a replayed graph. Needs hardware.

    python plugins/ascend_npu/benchmarks/attention.py --json attention-npu.json

It has never measured anything, because no NPU was available.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.geometry import TARGET_MODES
from draftmark_ascend_npu.device import require_hardware

CASES = {
    "decode-64x8192": (Mode.DECODE, 64, 8192, DraftShape()),
    "decode-8x32768": (Mode.DECODE, 8, 32768, DraftShape()),
    "verify16-64x8192": (Mode.VERIFY, 64, 8192, DraftShape(4, 1, 16)),
    "verify16-8x32768": (Mode.VERIFY, 8, 32768, DraftShape(4, 1, 16)),
}
"""Name: mode, requests, committed tokens of each request, draft shape."""
REPEATS = 100


def measure(mode: Mode, reqs: int, length: int, draft: DraftShape) -> dict[str, float]:
    """Return median microseconds of `attend`, and of a replay of `write_metadata` and `attend`."""
    import torch

    from draftmark.batch import BatchBuffers
    from draftmark.cache import KVCache
    from draftmark.graphs import GraphKey, Program
    from draftmark.lengths import Exact
    from draftmark.registry import load
    from draftmark.tree import write_tail

    shape = AttentionShape(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=128)
    limits = Limits(reqs, length + 128, capture_batch_sizes=(reqs,))
    geometry = Geometry.create(shape, limits, draft, modes=TARGET_MODES)
    plugin = load("ascend_npu")
    backend = plugin.open(geometry, "npu", guard=False)
    buffers = BatchBuffers(geometry, "npu")
    columns = geometry.max_pages_per_req
    buffers.prefix_lens.fill_(length)
    buffers.page_table.copy_(torch.arange(reqs * columns, dtype=torch.int32).view(reqs, columns))
    tree = mode is Mode.VERIFY
    batch = buffers.uniform(mode, 0, reqs, reqs, Exact((length,) * reqs), tree=tree)
    parents = (torch.arange(draft.num_draft_tokens, device="npu") - 1) // 2
    write_tail(batch, geometry, parents.expand(reqs, -1).clone() if tree else None)
    pages = torch.randn(2, reqs * columns, 128, 8, 128, dtype=torch.bfloat16, device="npu")
    cache = KVCache(pages[0], pages[1])
    q = torch.randn(batch.num_rows, 32, 128, dtype=torch.bfloat16, device="npu")
    out = torch.empty_like(q)

    def step() -> None:
        backend.write_metadata(batch)
        backend.attend(q, cache, batch, out)

    backend.plan(batch)
    step()
    graphs = plugin.graph_state(geometry, torch.device("npu"))
    key = GraphKey(Program.VERIFY if tree else Program.DECODE, reqs)
    graphs.capture(key, step)
    return {
        "eager_us": timed(lambda: backend.attend(q, cache, batch, out)),
        "replay_us": timed(lambda: graphs.replay(key)),
    }


def timed(call) -> float:  # type: ignore[no-untyped-def]
    """Return the median time of `REPEATS` calls in µs, each measured between two device events."""
    import torch

    found = []
    for _ in range(10):
        call()
    for _ in range(REPEATS):
        begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.npu.synchronize()
        found.append(begin.elapsed_time(end) * 1000)
    return statistics.median(found)


def main() -> int:
    """Measure every case, and write the results and the device's name to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    try:
        device = require_hardware("a benchmark")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    results = {name: measure(*case) for name, case in CASES.items()}
    for name, row in results.items():
        print(f"{name:<18} eager {row['eager_us']:>8.1f} µs   replay {row['replay_us']:>8.1f} µs")
    if args.json:
        args.json.write_text(json.dumps({"device": device, "results": results}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
