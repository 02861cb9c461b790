"""Mutants of plan, capture and ownership: what is known, kept, shared, read and captured."""

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
    """kv length from the host's bound."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        lens = torch.zeros_like(batch.prefix_lens)
        for n, bound in enumerate(batch.host.upper_bound()):
            lens[n] = bound
        return replace(batch, prefix_lens=lens)

    on_batch(see, "write_metadata")(backend)


def _needs_exact(backend: Any) -> None:
    def call(original: Any, batch: ForwardBatch) -> None:
        batch.host.lens  # noqa: B018 - Unknown has none
        original(batch)

    around(backend, "plan", call)


def _first_size(backend: Any) -> None:
    """Whatever batch size was seen first in a mode is what every later batch gets."""
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
    """The plan is cached by batch size, whatever the mode."""
    kept: dict[int, Any] = {}

    def call(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        backend._widths = kept.setdefault(batch.padded_reqs, backend._widths)

    around(backend, "plan", call)


def _device_width(backend: Any) -> None:
    """The width comes from the lengths that the device has now."""

    def call(original: Any, batch: ForwardBatch) -> None:
        lens = tuple(batch.prefix_lens[: batch.num_reqs].tolist())
        original(replace(batch, host=Exact(lens)))

    around(backend, "plan", call)


def _baked(backend: Any) -> None:
    """Lengths as Python numbers, taken when the plan was made."""

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
    """plan() makes the slot mapping anew."""

    def call(original: Any, batch: ForwardBatch) -> None:
        new_slots(backend)
        original(batch)

    around(backend, "plan", call)


def _keeps(backend: Any) -> None:
    backend.log = []
    after(backend, "attend", lambda q, cache, batch, out: backend.log.append(out.clone()))


def _shared(geometry: Any, backend: Any) -> Any:
    """All geometries use the slot mapping of the first (largest kept)."""
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
    """The page loop counts tokens as if they were pages."""

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
    Mutant("M07", "host bound taken for the length", "sglang#26753", patch=_bound_as_exact),
    Mutant("M08", "raises unless host lengths are known", "sglang#26738", patch=_needs_exact),
    Mutant("M10", "the first batch size's slice is kept", "sglang#26655", patch=_first_size),
    Mutant("M14", "plan made once per batch shape", "sglang#26019", patch=_plan_once),
    Mutant("M14b", "plan cached by batch size, whatever the mode", "sglang#32062", patch=_plan_by_size),
    Mutant("M15", "captured width from the lengths at capture", "vllm#20301", patch=_device_width),
    Mutant(
        "M18",
        "declares padded length 1, writes 0",
        "vllm#38436",
        {"layouts": lambda g, found: {mode: replace(one, pad_fill=1) for mode, one in found.items()}},
    ),
    Mutant("M20", "plan makes a new buffer", "sglang#27664", patch=_new_buffer),
    Mutant("M21", "page loop stops early", "sglang#11985", patch=_half_pages),
    Mutant("M23", "a wrapper forwards everything but plan", "sglang#30846", patch=_no_plan),
    Mutant("M24", "host read in write_metadata", "sglang#29413", patch=_reads("write_metadata")),
    Mutant("M24b", "host read in attend", "sglang#3987", patch=_reads("attend")),
    Mutant("M26", "target and draft share a buffer", "vllm#48261", {"open_backend": _shared}),
    Mutant("M31", "the largest key is never captured", "sglang#40396", {"graph_state": _drop_odd_key}),
    Mutant(
        "M31b",
        "one graph state for everybody",
        "vllm-ascend#3892",
        {"graph_state": lambda g, state: _STATES.setdefault("one", state)},
    ),
    Mutant("M33", "capture zeroes q_indptr in place", "vllm#53821", patch=_zero_indptr),
    Mutant("V31", "lengths baked as Python numbers", "xLLM#1466", patch=_baked),
    Mutant("V32", "batch's page table cleaned in place", "vllm#53821", patch=_clamps_table),
    Mutant("V34", "keeps a new tensor every step", "TRT-LLM#16290", patch=_keeps),
    Mutant("V51", "open_backend refuses what supports serves", "sglang#15664", {"open_backend": _refuses_late}),
    Mutant(
        "V55",
        "exact lengths needed but not declared",
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
