"""Mutants of plan, capture and ownership: host lengths, cached plans, shared tensors, host reads and missing keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch
from draftmark.errors import BackendRefusal
from draftmark.graphs import is_recording
from draftmark.lengths import Exact

from .mutant import Mutant, after, around, new_slots, on_batch

_COMMON: dict[str, torch.Tensor] = {}

_STATES: dict[str, Any] = {}


def _bound_as_exact(backend: Any) -> None:
    """Use the host's upper bound as the exact prefix length."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        lens = torch.zeros_like(batch.prefix_lens)
        for n, bound in enumerate(batch.host.upper_bound()):
            lens[n] = bound
        return replace(batch, prefix_lens=lens)

    on_batch(see, "write_metadata")(backend)


def _needs_exact(backend: Any) -> None:
    def call(original: Any, batch: ForwardBatch) -> None:
        batch.host.lens  # noqa: B018 - raises for Unknown lengths
        original(batch)

    around(backend, "plan", call)


def _first_size(backend: Any) -> None:
    """Write metadata only for the number of requests of a mode's first batch."""
    seen: dict[Mode, int] = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        size = seen.setdefault(batch.mode, batch.padded_reqs)
        kept = {name: backend.arena[name].clone() for name in backend.arena}
        original(batch)
        if batch.padded_reqs > size:
            rows = sum(batch.q_lens[:size])
            backend.arena["slot_mapping"][rows:] = kept["slot_mapping"][rows:]

    around(backend, "write_metadata", call)


def _plan_once(backend: Any) -> None:
    done: set[Any] = set()

    def call(original: Any, batch: ForwardBatch) -> None:
        key = (batch.mode, batch.step, batch.padded_reqs, batch.q_lens)
        if key not in done:
            done.add(key)
            original(batch)
            backend.__dict__.setdefault("kept", {})[key] = backend._widths
        backend._widths = backend.kept[key]

    around(backend, "plan", call)


def _plan_by_size(backend: Any) -> None:
    """Cache the plan by batch size and ignore the mode."""
    kept: dict[int, Any] = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        backend._widths = kept.setdefault(batch.padded_reqs, backend._widths)

    around(backend, "plan", call)


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


def _new_buffer(backend: Any) -> None:
    """Allocate a new slot mapping in plan."""

    def call(original: Any, batch: ForwardBatch) -> None:
        new_slots(backend)
        original(batch)

    around(backend, "plan", call)


def _keeps(backend: Any) -> None:
    backend.log = []
    after(backend, "attend", lambda q, cache, batch, out: backend.log.append(out.clone()))


def _shared(geometry: Any, backend: Any) -> Any:
    """Use one slot mapping for all geometries."""
    block = backend.arena._blocks["slot_mapping"]
    device = str(block.tensor.device)
    if device not in _COMMON:
        _COMMON[device] = torch.empty(1 << 16, dtype=torch.int64, device=block.tensor.device)
    view = _COMMON[device][: block.tensor.numel()]
    backend.arena._blocks["slot_mapping"] = replace(block, tensor=view)
    if hasattr(backend, "_slots"):
        backend._slots = view
    return backend


def _half_pages(backend: Any) -> None:
    """Gather only half of the pages of each request, rounded up."""

    def narrow() -> None:
        backend._widths = tuple(max(1, -(-width // 2)) if width > 2 else width for width in backend._widths)

    after(backend, "plan", lambda batch: narrow())


def _no_plan(backend: Any) -> None:
    backend.plan = lambda batch: None


def _reads(method: str) -> Callable[[Any], None]:
    def patch(backend: Any) -> None:
        at = {"write_metadata": 0, "write_kv": 3, "attend": 2}[method]
        after(backend, method, lambda *args: args[at].prefix_lens.max().item())

    return patch


def _zero_indptr(backend: Any) -> None:
    after(backend, "attend", lambda q, cache, batch, out: batch.q_indptr.mul_(0 if is_recording() else 1))


def _clamps_table(backend: Any) -> None:
    def call(original: Any, batch: ForwardBatch) -> None:
        columns = torch.arange(batch.page_table.shape[1])
        used = -(-(batch.prefix_lens + max(batch.tail_lens)) // backend.geometry.attention.page_size)
        batch.page_table.masked_fill_(columns >= used[:, None], 0)
        original(batch)

    around(backend, "write_metadata", call)


def _drop_odd_key(geometry: Any, state: Any) -> Any:
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        if key.batch_size == max(geometry.limits.capture_batch_sizes):
            return step()
        return original(key, step)

    state.capture = capture
    return state


def _refuses_late(geometry: Any, backend: Any) -> Any:
    if geometry.attention.window_left >= 0:
        raise BackendRefusal("late", ["windows are not served"])
    return backend


MUTANTS = (
    Mutant("M07", "Uses the host's upper bound as the length", "sglang#26753", patch=_bound_as_exact),
    Mutant("M08", "Raises when host lengths are unknown", "sglang#26738", patch=_needs_exact),
    Mutant("M10", "Keeps the slice of the first batch's size", "sglang#26655", patch=_first_size),
    Mutant("M14", "Runs the plan once per batch shape", "sglang#26019", patch=_plan_once),
    Mutant("M14b", "Caches the plan by batch size and ignores the mode", "sglang#32062", patch=_plan_by_size),
    Mutant("M15", "Captures a width from the lengths at capture", "vllm#20301", patch=_device_width),
    Mutant(
        "M18",
        "Declares padded length 1 and writes 0",
        "vllm#38436",
        {"layouts": lambda g, found: {mode: replace(one, pad_fill=1) for mode, one in found.items()}},
    ),
    Mutant("M20", "Allocates a new buffer in plan", "sglang#27664", patch=_new_buffer),
    Mutant("M21", "Ends the page loop too early", "sglang#11985", patch=_half_pages),
    Mutant("M23", "Forwards every method except plan", "sglang#30846", patch=_no_plan),
    Mutant("M24", "Reads device memory on the host in write_metadata", "sglang#29413", patch=_reads("write_metadata")),
    Mutant("M24b", "Reads device memory on the host in attend", "sglang#3987", patch=_reads("attend")),
    Mutant("M26", "Shares a buffer between target and draft", "vllm#48261", {"open_backend": _shared}),
    Mutant("M31", "Never captures the largest key", "sglang#40396", {"graph_state": _drop_odd_key}),
    Mutant(
        "M31b",
        "Shares one graph state among all geometries",
        "vllm-ascend#3892",
        {"graph_state": lambda g, state: _STATES.setdefault("one", state)},
    ),
    Mutant("M33", "Zeroes q_indptr in place at capture", "vllm#53821", patch=_zero_indptr),
    Mutant("V31", "Captures lengths as Python numbers", "xLLM#1466", patch=_baked),
    Mutant("V32", "Zeroes unused columns of the batch's page table in place", "vllm#53821", patch=_clamps_table),
    Mutant("V34", "Keeps a new tensor in every step", "TRT-LLM#16290", patch=_keeps),
    Mutant("V51", "Refuses in open_backend what supports accepts", "sglang#15664", {"open_backend": _refuses_late}),
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
)
