"""Mutants of write_kv and attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import ForwardBatch
from draftmark.graphs import is_recording

from .mutant import Mutant, after, around, shaped


def _sees_q(change: Callable[[Any, torch.Tensor], torch.Tensor], back: Any = None) -> Callable[[Any], None]:
    """Return a patch that changes the queries of attend and, if `back` is given, reorders its output."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Any, cache: Any, batch: Any, out: Any) -> None:
            original(change(backend, q), cache, batch, out)
            if back is not None:
                out.copy_(back(backend, out))

        around(backend, "attend", call)

    return patch


def _heads(backend: Any) -> torch.Tensor:
    a = backend.geometry.attention
    return torch.arange(a.num_qo_heads).view(-1, a.num_kv_heads).t().reshape(-1)


def _swaps_kv(backend: Any) -> None:
    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        original(*((v, k) if batch.mode is Mode.EXTEND else (k, v)), cache, batch)

    around(backend, "write_kv", call)


def _drops_row(backend: Any) -> None:
    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        last = backend.arena["slot_mapping"][batch.num_rows - 1].view(1)
        before = [pool.flatten(0, 1).index_select(0, last) for pool in (cache.k, cache.v)]
        original(k, v, cache, batch)
        if batch.num_reqs == batch.padded_reqs:
            for pool, old in zip((cache.k, cache.v), before, strict=True):
                pool.flatten(0, 1).index_copy_(0, last, old)

    around(backend, "write_kv", call)


def _skips_in_graph(backend: Any) -> None:
    around(backend, "write_kv", lambda original, *args: None if is_recording() else original(*args))


def _live_out(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        whole = torch.zeros_like(out)
        original(q, cache, batch, whole)
        live = sum(batch.q_lens[: batch.num_reqs])
        out[:live] = whole[:live]

    around(backend, "attend", call)


def _accumulates(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: Any, out: torch.Tensor) -> None:
        part = torch.zeros_like(out)
        original(q, cache, batch, part)
        out.mul_(0).add_(part)

    around(backend, "attend", call)


def _nan_times_zero(backend: Any) -> None:
    """Add the last page's V times zero to the output, so NaN in unused slots reaches it."""

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        size = backend.geometry.attention.page_size
        last = backend.arena["slot_mapping"][: batch.num_rows] // size
        out.add_(cache.v[last].sum((1, 2))[:, None].to(out.dtype) * 0)

    around(backend, "attend", call)


def _consumes(backend: Any) -> None:
    """Set the slot mapping to 0 after attend, so the next layer finds no metadata."""
    after(backend, "attend", lambda q, cache, batch, out: backend.arena["slot_mapping"][: batch.num_rows].fill_(0))


def _int32_offsets(backend: Any) -> None:
    """Compute flat element offsets in int32: slots with offsets of 2**31 or more become other slots."""

    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        width, right = cache.k.shape[2] * cache.k.shape[3], slots.clone()
        slots.copy_((slots * width).to(torch.int32).clamp(min=0) // width)
        original(k, v, cache, batch)
        slots.copy_(right)

    around(backend, "write_kv", call)


def _pads_out(backend: Any) -> None:
    """Zero the output of padded rows, located by the host's number of live requests."""

    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        out[sum(batch.q_lens[: batch.num_reqs]) :] = 0

    after(backend, "attend", call)


def _stores_live(backend: Any) -> None:
    """Store only live rows; the host's number of live requests decides which ones."""

    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows].clone()
        live = sum(batch.q_lens[: batch.num_reqs])
        backend.arena["slot_mapping"][live : batch.num_rows] = 0
        original(k, v, cache, batch)
        backend.arena["slot_mapping"][: batch.num_rows] = slots

    around(backend, "write_kv", call)


def _one_head(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: Any, out: Any) -> None:
        first = (pool[:, :, :1].expand_as(pool).contiguous() for pool in (cache.k, cache.v))
        original(q, type(cache)(*first), batch, out)

    around(backend, "attend", call)


def _nan_padding(backend: Any) -> None:
    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        out[sum(batch.q_lens[: batch.num_reqs]) :] = float("nan")

    after(backend, "attend", call)


MUTANTS = (
    Mutant(
        "V33",
        "Scales the caller's queries in place",
        "ROCm/ATOM#2267",
        patch=lambda b: after(b, "attend", lambda q, cache, batch, out: q.mul_(2)),
    ),
    Mutant("V35", "Leaves the output of padded rows unwritten", "vllm#56922", patch=_live_out),
    Mutant("V36", "Adds to the output buffer instead of writing it", "vllm-plugin-FL#429", patch=_accumulates),
    Mutant("V38", "Multiplies NaN of unused V slots by zero", "vllm#43961", patch=_nan_times_zero),
    Mutant("V39", "Overwrites the metadata in the first layer's attend", "flashinfer#3582", patch=_consumes),
    Mutant("V40", "Does not store KV at capture", "ROCm/ATOM#2267", patch=_skips_in_graph),
    Mutant("V41", "Swaps K and V in EXTEND", "sglang#31367", patch=_swaps_kv),
    Mutant("V42", "Does not store the KV of the last row", "sglang#25529", patch=_drops_row),
    Mutant(
        "V44",
        "Maps query heads to KV heads with groups and heads exchanged",
        "sglang#32062",
        patch=_sees_q(lambda b, q: q[:, _heads(b)], lambda b, out: out[:, _heads(b).argsort()]),
    ),
    Mutant("V45", "Does not apply the softmax scale", "ROCm/ATOM#1591", patch=shaped(softmax_scale=1.0)),
    Mutant(
        "V46",
        "Uses the softmax scale of head_dim instead of the geometry's scale",
        "ROCm/ATOM#1591",
        patch=shaped(softmax_scale=lambda a: a.head_dim**-0.5),
    ),
    Mutant(
        "V47",
        "Applies the soft cap before the softmax scale",
        "ROCm/ATOM#1591",
        patch=shaped(logits_soft_cap=lambda a: a.logits_soft_cap * a.softmax_scale),
    ),
    Mutant("V48", "Ignores the soft cap", "ROCm/ATOM#1591", patch=shaped(logits_soft_cap=0.0)),
    Mutant("V49", "Rounds queries to bfloat16", "vllm#34043", patch=_sees_q(lambda b, q: q.bfloat16().to(q.dtype))),
    Mutant(
        "V50",
        "Rounds queries to 8-bit floats",
        "vllm#34043",
        patch=_sees_q(lambda b, q: q.to(torch.float8_e4m3fn).to(q.dtype)),
    ),
    Mutant(
        "V56",
        "Reads the rows in reverse order",
        "TRT-LLM#13081",
        patch=_sees_q(lambda b, q: q.flip(0), lambda b, out: out),
    ),
    Mutant("V62", "Computes element offsets in 32 bits when it stores KV", "flashinfer#3136", patch=_int32_offsets),
    Mutant("V57", "Zeroes padded outputs by the num_reqs of the capture", "TRT-LLM#17110", patch=_pads_out),
    Mutant("V67", "Lets all query heads read the first KV head", "sglang#32062", patch=_one_head),
    Mutant("V71", "Writes NaN to the output of padded rows", "vllm#37442", patch=_nan_padding),
    Mutant("V72", "Stores live rows by the num_reqs of the capture", "TRT-LLM#17110", patch=_stores_live),
)
