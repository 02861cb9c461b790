"""Mutants of when something is known: in plan or on the device, at capture or at replay, at the first call or later."""

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
    """The metadata is written by plan(), from what the device holds then."""
    write, plan = backend.write_metadata, backend.plan

    def both(batch: ForwardBatch) -> None:
        plan(batch)
        write(batch)

    backend.plan, backend.write_metadata = both, lambda batch: None


def _lengths_in_plan(backend: Any) -> None:
    """Lengths are copied to a tensor of the backend's by plan(), and write_metadata takes them from there."""
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
    """write_metadata is skipped while `key` stays."""

    def patch(backend: Any) -> None:
        last: list[Any] = [None]

        def call(original: Any, batch: ForwardBatch) -> None:
            if last[0] != key(batch):
                last[0] = key(batch)
                original(batch)

        around(backend, "write_metadata", call)

    return patch


def _padding_once(backend: Any) -> None:
    """Slots of padded rows are set up when a size is seen first."""
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
    """Slots of padded rows become 0, by the host's count of live requests."""

    def call(batch: ForwardBatch) -> None:
        if batch.num_reqs < batch.padded_reqs:
            backend.arena["slot_mapping"][sum(batch.q_lens[: batch.num_reqs]) : batch.num_rows] = 0

    after(backend, "write_metadata", call)


def _first_table(backend: Any) -> None:
    """The page table of the first batch of a size is taken for all later ones."""
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
    """attend() works in a tensor that it makes when it first meets a shape."""
    backend.scratch = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        work = backend.scratch.setdefault(tuple(out.shape), torch.empty_like(out))
        original(q, cache, batch, work)
        out.copy_(work)

    around(backend, "attend", call)


def _grown_scratch(backend: Any) -> None:
    """The same, one tensor that grows."""
    backend.work = None

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if backend.work is None or len(backend.work) < len(out):
            backend.work = torch.empty_like(out)
        original(q, cache, batch, backend.work[: len(out)])
        out.copy_(backend.work[: len(out)])

    around(backend, "attend", call)


def _planned_batch(backend: Any) -> None:
    """write_metadata describes the batch that plan() saw last."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "write_metadata", lambda original, batch: original(backend.planned))


def _written_batch(backend: Any) -> None:
    """attend() serves the step of the batch that was planned last."""
    after(backend, "plan", lambda batch: setattr(backend, "planned", batch))
    around(backend, "attend", lambda original, q, cache, batch, out: original(q, cache, backend.planned, out))


def _global_plan(backend: Any) -> None:
    """What plan() decided lies in a global of the module."""

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
    """The slot mapping is made anew whenever a batch is larger than all before."""
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
    """Rows beyond those of the first batch of a mode are not attended."""
    first: dict[Any, int] = {}

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        rows = first.setdefault((batch.mode, batch.padded_reqs), sum(batch.q_lens[: max(1, batch.num_reqs)]))
        original(q, cache, batch, out)
        if batch.uniform is not None:
            out[rows:] = 0

    around(backend, "attend", call)


MUTANTS = (
    Mutant("W63", "metadata written in plan", "sglang#27193", patch=_in_plan),
    Mutant("W64", "lengths taken from the device in plan", "sglang#21987", patch=_lengths_in_plan),
    Mutant("W65", "metadata kept while the host's lengths stay", "rtp-llm#1084",
           patch=_unless_same(lambda x: (x.mode, x.step, x.q_lens, x.host.upper_bound()))),
    Mutant("W66", "metadata kept while the number of live requests stays", "TRT-LLM#17110",
           patch=_unless_same(lambda x: (x.mode, x.step, x.num_reqs, x.padded_reqs))),
    Mutant("W67", "padding prepared when a size is seen first", "sglang#24743", patch=_padding_once),
    Mutant("W68", "padded slots zeroed by the capture's num_reqs", "TRT-LLM#17110", patch=_zeroes_padding),
    Mutant("W69", "the first batch's page table kept", "sglang#26655", patch=_first_table),
    Mutant("W70", "the first batch's lengths kept", "sglang#26655", patch=_first_lengths),
    Mutant("W71", "scratch allocated when a shape is met first", "sglang#27664", patch=_lazy_scratch),
    Mutant("W72", "scratch that grows", "rtp-llm#1259", patch=_grown_scratch),
    Mutant("W73", "metadata of the batch that was planned last", "sglang#32467", patch=_planned_batch),
    Mutant("W74", "attention of the batch that was planned last", "sglang#32467", patch=_written_batch),
    Mutant("W75", "the plan in a global", "vllm#48261", patch=_global_plan),
    Mutant("W76", "a bound taken to include the tail", "sglang#26753", patch=_host(_no_tail)),
    Mutant("W77", "a bound taken to be exclusive", "sglang#26753", patch=_host(_page_less)),
    Mutant("W78", "unknown lengths taken for 0", "sglang#26738", patch=_host(_zero_unknown)),
    Mutant("W79", "the first request's bound for all", "sglang#26738", patch=_host(_first_bound)),
    Mutant("W80", "the mean bound for all", "sglang#32467", patch=_host(_mean_bound)),
    Mutant("W81", "bounds cut at the context, though the device is ahead", "sglang#30217", patch=_host(_context_bound)),
    Mutant("W82", "host read in EXTEND's write_metadata", "sglang#29413",
           patch=_reads_in("write_metadata", Mode.EXTEND, 0, lambda x: x.prefix_lens.max().item())),
    Mutant("W83", "host read in EXTEND's attend", "vllm#51171",
           patch=_reads_in("attend", Mode.EXTEND, 2, lambda x: x.q_indptr.tolist())),
    Mutant("W84", "host read in write_kv", "sglang#3987",
           patch=_reads_in("write_kv", Mode.DECODE, 3, lambda x: x.prefix_lens.sum().item())),
    Mutant("W85", "selects live requests by a device mask in plan", "sglang#29415",
           patch=_reads_in("plan", Mode.EXTEND, 0, lambda x: x.prefix_lens[x.prefix_lens > 0])),
    Mutant("W85b", "selects live requests by a device mask in write_metadata", "sglang#29415",
           patch=_reads_in("write_metadata", Mode.EXTEND, 0, lambda x: x.q_indptr.nonzero())),
    Mutant("W86", "slot mapping re-allocated for a larger batch", "sglang#27664", patch=_regrown),
    Mutant("W87", "metadata not written at capture", "sglang#26521", patch=_not_in_graph),
    Mutant("W88", "rows beyond the first batch's live ones not attended", "TRT-LLM#17110", patch=_warm_shape),
)  # fmt: skip
