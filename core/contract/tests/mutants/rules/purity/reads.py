"""Mutants that checks of `purity` kill: reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import AttentionShape, Mode
from draftmark.runtime import Exact, ForwardBatch, Tree

from ...designs.changes import bits, on_queries, on_tail, words
from ...designs.layouts import of_tutorial
from ...designs.plain_attention import Parts, attending
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import Mutant, after, around, on_batch


class ScaledInPlace(TutorialParts):
    """Multiplies the scale into q.float(), which is the caller's own tensor if q is float32."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("qhd,nhd->hqn", q.mul_(self.scale), k)


def _distance_in_16_bits(seen: torch.Tensor, prefix: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Keep the distance of a key in 16 bits: from 32,768 tokens on it is negative, so it is inside every window."""
    if shape.window_left < 0:
        return seen
    key = torch.arange(seen.shape[2])
    row = torch.where(seen, key, 0).amax(-1, keepdim=True)
    distance = row - key
    return seen | ((distance > 0) & (distance.to(torch.int16) < 0))


def _bound_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth + (batch.tail.depth > 0).int())


def _unused_alone(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Let tree rows at depth 1 see only themselves, except the first two of these rows."""
    if batch.mode is not Mode.VERIFY or not isinstance(batch.tail, Tree):
        return batch
    seen, each = bits(batch.tail.mask), batch.q_lens[0]
    slot = torch.arange(batch.num_rows) % each
    own = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) == slot[:, None, None]
    alone = (batch.tail.depth.reshape(-1) == 1) & (slot > 2)
    return replace(batch, tail=Tree(words(torch.where(alone[:, None, None], own, seen)), batch.tail.depth))


def _flat_depth(batch: ForwardBatch) -> Tree:
    """Give all nodes of the draft tree the root's position, so a window never ends inside the tree."""
    return Tree(batch.tail.mask, torch.zeros_like(batch.tail.depth))


def _first_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth[:1].expand_as(batch.tail.depth).contiguous())


def _drops_row(backend: Any) -> None:
    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        last = backend.arena["slot_mapping"][batch.num_rows - 1].view(1)
        before = [pool.flatten(0, 1).index_select(0, last) for pool in (cache.k, cache.v)]
        original(k, v, cache, batch)
        if batch.num_reqs == batch.padded_reqs:
            for pool, old in zip((cache.k, cache.v), before, strict=True):
                pool.flatten(0, 1).index_copy_(0, last, old)

    around(backend, "write_kv", call)


def _groups_as_eight(low: int, high: int) -> Parts:
    def heads(shape: Any) -> Tensor:
        group = 8 if low <= shape.group_size <= high else shape.group_size
        return (torch.arange(shape.num_qo_heads) // group).clamp(max=shape.num_kv_heads - 1)

    return Parts(heads=heads)


def _device_width(backend: Any) -> None:
    """Read the exact lengths from the device in plan(), instead of using the host's lengths."""

    def call(original: Any, batch: ForwardBatch) -> None:
        lens = tuple(batch.prefix_lens[: batch.num_reqs].tolist())
        original(replace(batch, host=Exact(lens)))

    around(backend, "plan", call)


def _baked(backend: Any) -> None:
    """Copy the lengths to Python numbers in plan, and use these constants in write_metadata, also when captured."""

    def plan(original: Any, batch: ForwardBatch) -> None:
        backend.numbers = [int(n) for n in batch.prefix_lens]
        original(batch)

    def write(original: Any, batch: ForwardBatch) -> None:
        lens = torch.zeros_like(batch.prefix_lens)
        for n, number in enumerate(backend.numbers[: batch.padded_reqs]):
            lens[n] = number
        original(replace(batch, prefix_lens=lens))

    around(backend, "plan", plan)
    around(backend, "write_metadata", write)


def _half_pages(backend: Any) -> None:
    """Gather only half of the pages of each request, rounded up."""

    def narrow() -> None:
        backend._widths = tuple(max(1, -(-width // 2)) if width > 2 else width for width in backend._widths)

    after(backend, "plan", lambda batch: narrow())


def _reads(method: str) -> Callable[[Any], None]:
    def patch(backend: Any) -> None:
        at = {"write_metadata": 0, "write_kv": 3, "attend": 2}[method]
        after(backend, method, lambda *args: args[at].prefix_lens.max().item())

    return patch


def _clamps_table(backend: Any) -> None:
    def call(original: Any, batch: ForwardBatch) -> None:
        columns = torch.arange(batch.page_table.shape[1])
        used = -(-(batch.prefix_lens + max(batch.tail_lens)) // backend.geometry.attention.page_size)
        batch.page_table.masked_fill_(columns >= used[:, None], 0)
        original(batch)

    around(backend, "write_metadata", call)


def _in_plan(backend: Any) -> None:
    """Write the metadata in plan(), from the device's data at that time."""
    write, plan = backend.write_metadata, backend.plan

    def both(batch: ForwardBatch) -> None:
        plan(batch)
        write(batch)

    backend.plan, backend.write_metadata = both, lambda batch: None


def _lengths_in_plan(backend: Any) -> None:
    """Copy lengths to a backend tensor in plan(), and use the copy in write_metadata."""
    kept = torch.zeros(1024, dtype=torch.int32)

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        kept[: batch.padded_reqs].copy_(batch.prefix_lens)

    def write(original: Any, batch: ForwardBatch) -> None:
        original(replace(batch, prefix_lens=kept[: batch.padded_reqs]))

    backend.kept_lens = kept
    around(backend, "plan", plan)
    around(backend, "write_metadata", write)


def _reads_in(method: str, mode: Mode, at: int, read: Callable[[ForwardBatch], Any]) -> Callable[[Any], None]:
    def call(*args: Any) -> None:
        if args[at].mode is mode:
            read(args[at])

    return lambda backend: after(backend, method, call)


MUTANTS = (
    Mutant("M15", "Captures a width from the lengths at capture", "vllm#20301", patch=_device_width),
    Mutant("M21", "Ends the page loop too early", "sglang#11985", patch=_half_pages),
    Mutant("M24", "Reads device memory on the host in write_metadata", "sglang#29413", patch=_reads("write_metadata")),
    Mutant("M24b", "Reads device memory on the host in attend", "sglang#3987", patch=_reads("attend")),
    Mutant("OF5", "Keeps distances of keys in 16 bits", "flashinfer#3136",
           patch=attending(Parts(seen=_distance_in_16_bits)), layouts=("csr",), absent="tried in csr"),
    Mutant("R04", "Maps query heads as if groups of 5 to 7 had 8 heads",
           "flashinfer#4316", patch=attending(_groups_as_eight(5, 7))),
    Mutant("R05", "Maps query heads as if groups of 16 or more had 8 heads", "flashinfer#3563, vllm#40792",
           patch=attending(_groups_as_eight(16, 999))),
    of_tutorial(
        "S21",
        "Scales q in place when q is float32",
        "aliasing of .float(); a second read of q (second attend, warm-up run, log) sees scaled queries",
        opens(ScaledInPlace),
    ),
    Mutant("V31", "Captures lengths as Python numbers", "xLLM#1466", patch=_baked),
    Mutant("V32", "Zeroes unused columns of the batch's page table in place", "vllm#53821", patch=_clamps_table),
    Mutant(
        "V33",
        "Scales the caller's queries in place",
        "ROCm/ATOM#2267",
        patch=lambda b: after(b, "attend", lambda q, cache, batch, out: q.mul_(2)),
    ),
    Mutant("V42", "Does not store the KV of the last row", "sglang#25529", patch=_drops_row),
    Mutant("V49", "Rounds queries to bfloat16", "vllm#34043", patch=on_queries(lambda b, q: q.bfloat16().to(q.dtype))),
    Mutant(
        "V55",
        "Needs exact lengths without declaring it",
        "sglang#30217",
        patch=lambda b: around(
            b,
            "plan",
            lambda original, batch: original(
                replace(batch, host=Exact(tuple(max(0, n - 40) for n in batch.host.upper_bound())))
            ),
        ),
    ),
    Mutant("W63", "Writes the metadata in plan", "sglang#27193", patch=_in_plan),
    Mutant("W64", "Reads device lengths in plan and uses them later", "sglang#21987", patch=_lengths_in_plan),
    Mutant("W82", "Reads device memory on the host in EXTEND's write_metadata", "sglang#29413",
           patch=_reads_in("write_metadata", Mode.EXTEND, 0, lambda x: x.prefix_lens.max().item())),
    Mutant("W83", "Reads device memory on the host in EXTEND's attend", "vllm#51171",
           patch=_reads_in("attend", Mode.EXTEND, 2, lambda x: x.q_indptr.tolist())),
    Mutant("W84", "Reads device memory on the host in write_kv", "sglang#3987",
           patch=_reads_in("write_kv", Mode.DECODE, 3, lambda x: x.prefix_lens.sum().item())),
    Mutant("W85", "Selects live requests by a device mask in plan", "sglang#29415",
           patch=_reads_in("plan", Mode.EXTEND, 0, lambda x: x.prefix_lens[x.prefix_lens > 0])),
    Mutant("W85b", "Selects live requests by a device mask in write_metadata", "sglang#29415",
           patch=_reads_in("write_metadata", Mode.EXTEND, 0, lambda x: x.q_indptr.nonzero())),
    Mutant("X06", "Makes the window one token too short for slots after the root",
           "tokenspeed#613", patch=on_tail(_bound_depth)),
    Mutant("X10", "Lets unused rows see only themselves", "sglang#32920", patch=on_batch(_unused_alone)),
    Mutant("Z07", "Never ends a window inside a tree", "tokenspeed#613", patch=on_tail(_flat_depth)),
    Mutant("Z08", "Gives every request the depths of the first one", "vllm-ascend#8508", patch=on_tail(_first_depth)),
)  # fmt: skip
KILLER = {
    "OF5": "purity.steps_read_no_device_memory",
    **dict.fromkeys(("R04", "R05"), "production.every_head_shape_is_right"),
    "S21": "purity.each_call_writes_its_own",
}
