"""Mutants of timing: data read in plan instead of on the device, at capture instead of at replay, or only once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch
from draftmark.graphs import is_recording
from draftmark.lengths import Unknown, UpperBound

from .mutant import Mutant, after, around, new_slots

_GLOBAL: dict[str, Any] = {}


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


def _unless_same(key: Callable[[ForwardBatch], Any]) -> Callable[[Any], None]:
    """Return a patch that skips write_metadata while `key` is unchanged."""

    def patch(backend: Any) -> None:
        last: list[Any] = [None]

        def call(original: Any, batch: ForwardBatch) -> None:
            if last[0] != key(batch):
                last[0] = key(batch)
                original(batch)

        around(backend, "write_metadata", call)

    return patch


def _padding_once(backend: Any) -> None:
    """Write the slots of padded rows only for the first batch of each size."""
    seen: set[Any] = set()

    def call(original: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"]
        kept = slots.clone()
        original(batch)
        key = (batch.mode, batch.step, batch.padded_reqs, batch.num_reqs)
        if key in seen and batch.uniform is not None:
            first = batch.num_reqs * batch.q_lens[0]
            slots[first : batch.num_rows] = kept[first : batch.num_rows]
        seen.add(key)

    around(backend, "write_metadata", call)


def _zeroes_padding(backend: Any) -> None:
    """Set the slots of padded rows to 0, located by the host's number of live requests."""

    def call(batch: ForwardBatch) -> None:
        if batch.num_reqs < batch.padded_reqs:
            backend.arena["slot_mapping"][sum(batch.q_lens[: batch.num_reqs]) : batch.num_rows] = 0

    after(backend, "write_metadata", call)


def _first_table(backend: Any) -> None:
    """Use the page table of the first batch of a size for all later batches of that size."""
    backend.tables = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        original(replace(batch, page_table=backend.tables.setdefault(batch.padded_reqs, batch.page_table)))

    around(backend, "write_metadata", call)


def _first_lengths(backend: Any) -> None:
    backend.first = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        kept = backend.first.setdefault((batch.mode, batch.padded_reqs), batch.prefix_lens)
        original(replace(batch, prefix_lens=kept))

    around(backend, "write_metadata", call)


def _lazy_scratch(backend: Any) -> None:
    """Attend into a scratch tensor that is allocated when an output shape occurs for the first time."""
    backend.scratch = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        work = backend.scratch.setdefault(tuple(out.shape), torch.empty_like(out))
        original(q, cache, batch, work)
        out.copy_(work)

    around(backend, "attend", call)


def _grown_scratch(backend: Any) -> None:
    """Attend into one scratch tensor, and reallocate it when a batch has a larger output."""
    backend.work = None

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if backend.work is None or len(backend.work) < len(out):
            backend.work = torch.empty_like(out)
        original(q, cache, batch, backend.work[: len(out)])
        out.copy_(backend.work[: len(out)])

    around(backend, "attend", call)


def _planned_batch(backend: Any) -> None:
    """Write the metadata of the last batch given to plan(), even if write_metadata receives another batch."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "write_metadata", lambda original, batch: original(backend.planned))


def _written_batch(backend: Any) -> None:
    """Attend with the last batch given to plan(), even if attend receives another batch."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "attend", lambda original, q, cache, batch, out: original(q, cache, backend.planned, out))


def _global_plan(backend: Any) -> None:
    """Keep the plan in a module-level variable that all backends share."""

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        backend._widths = _GLOBAL["widths"]
        original(q, cache, batch, out)

    after(backend, "plan", lambda batch: _GLOBAL.update(widths=backend._widths))
    around(backend, "attend", call)


def _host(change: Callable[[Any, ForwardBatch], ForwardBatch]) -> Callable[[Any], None]:
    return lambda backend: around(backend, "plan", lambda original, batch: original(change(backend, batch)))


def _no_tail(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if not isinstance(batch.host, UpperBound):
        return batch
    short = tuple(max(0, n - t) for n, t in zip(batch.host.lens, batch.tail_lens, strict=False))
    return replace(batch, host=UpperBound(short))


def _page_less(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if not isinstance(batch.host, UpperBound):
        return batch
    return replace(batch, host=UpperBound(tuple(max(0, n - 1) for n in batch.host.lens)))


def _zero_unknown(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, host=Unknown(batch.num_reqs, 0)) if isinstance(batch.host, Unknown) else batch


def _first_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    bounds = batch.host.upper_bound()
    return replace(batch, host=UpperBound(bounds[:1] * len(bounds)))


def _mean_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    bounds = batch.host.upper_bound()
    return replace(batch, host=UpperBound((sum(bounds) // max(1, len(bounds)),) * len(bounds)))


def _context_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    wall = backend.geometry.limits.max_context_len
    return replace(batch, host=UpperBound(tuple(min(n, wall) for n in batch.host.upper_bound())))


def _reads_in(method: str, mode: Mode, at: int, read: Callable[[ForwardBatch], Any]) -> Callable[[Any], None]:
    def call(*args: Any) -> None:
        if args[at].mode is mode:
            read(args[at])

    return lambda backend: after(backend, method, call)


def _regrown(backend: Any) -> None:
    """Allocate a new slot mapping whenever a batch is larger than all earlier ones."""
    most = [0]

    def call(original: Any, batch: ForwardBatch) -> None:
        if batch.num_rows > most[0] and not is_recording():
            most[0] = batch.num_rows
            new_slots(backend)
        original(batch)

    around(backend, "write_metadata", call)


def _not_in_graph(backend: Any) -> None:
    around(backend, "write_metadata", lambda original, batch: None if is_recording() else original(batch))


def _warm_shape(backend: Any) -> None:
    """Zero all output rows beyond the number of live rows that the first batch of this mode and size had."""
    first: dict[Any, int] = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        rows = first.setdefault((batch.mode, batch.padded_reqs), sum(batch.q_lens[: max(1, batch.num_reqs)]))
        original(q, cache, batch, out)
        if batch.uniform is not None:
            out[rows:] = 0

    around(backend, "attend", call)


MUTANTS = (
    Mutant("W63", "Writes the metadata in plan", "sglang#27193", patch=_in_plan),
    Mutant("W64", "Reads device lengths in plan and uses them later", "sglang#21987", patch=_lengths_in_plan),
    Mutant("W65", "Keeps the metadata while the host's lengths are unchanged", "rtp-llm#1084",
           patch=_unless_same(lambda x: (x.mode, x.step, x.q_lens, x.host.upper_bound()))),
    Mutant("W66", "Keeps the metadata while the number of live requests is unchanged", "TRT-LLM#17110",
           patch=_unless_same(lambda x: (x.mode, x.step, x.num_reqs, x.padded_reqs))),
    Mutant("W67", "Writes padding only for the first batch of a size", "sglang#24743", patch=_padding_once),
    Mutant("W68", "Zeroes padded slots by the num_reqs of the capture", "TRT-LLM#17110", patch=_zeroes_padding),
    Mutant("W69", "Keeps the page table of the first batch", "sglang#26655", patch=_first_table),
    Mutant("W70", "Keeps the lengths of the first batch", "sglang#26655", patch=_first_lengths),
    Mutant("W71", "Allocates scratch when a shape occurs for the first time", "sglang#27664", patch=_lazy_scratch),
    Mutant("W72", "Reallocates scratch for larger batches", "rtp-llm#1259", patch=_grown_scratch),
    Mutant("W73", "Writes the metadata of the last planned batch", "sglang#32467", patch=_planned_batch),
    Mutant("W74", "Attends the last planned batch", "sglang#32467", patch=_written_batch),
    Mutant("W75", "Stores the plan in a global", "vllm#48261", patch=_global_plan),
    Mutant("W76", "Treats a host bound as including the tail", "sglang#26753", patch=_host(_no_tail)),
    Mutant("W77", "Treats a host bound as exclusive", "sglang#26753", patch=_host(_page_less)),
    Mutant("W78", "Treats unknown lengths as 0", "sglang#26738", patch=_host(_zero_unknown)),
    Mutant("W79", "Uses the first request's bound for all requests", "sglang#26738", patch=_host(_first_bound)),
    Mutant("W80", "Uses the mean bound for all requests", "sglang#32467", patch=_host(_mean_bound)),
    Mutant("W81", "Clamps bounds to the context limit, though the device may be ahead",
           "sglang#30217", patch=_host(_context_bound)),
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
    Mutant("W86", "Reallocates the slot mapping for a larger batch", "sglang#27664", patch=_regrown),
    Mutant("W87", "Does not write metadata at capture", "sglang#26521", patch=_not_in_graph),
    Mutant("W88", "Does not attend rows after the live rows of the first batch", "TRT-LLM#17110", patch=_warm_shape),
)  # fmt: skip
