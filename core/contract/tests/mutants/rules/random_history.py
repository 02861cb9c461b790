"""Mutants that the checks of `random_history` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache, Tree, is_recording

from ..designs.layouts import NO_SUCH_PART, ONLY_TRITON
from ..designs.tutorial import Backend
from ..designs.tutorial_plans import plugin
from ..mutant import ONLY, Mutant, around, on_batch


def _plans_by_size(backend: Any) -> None:
    """Cache plans by (requests, rows, tail, budget). A ragged batch of R · D rows then finds the plan of VERIFY."""
    verify, plans = backend._decode_verify, {}

    def plan_of(original: Any, batch: ForwardBatch) -> Any:
        ragged = batch.mode is Mode.RAGGED_VERIFY
        most = backend.geometry.extent(batch.mode).q_len if ragged else batch.q_lens[0]
        size = batch.padded_reqs, most, most if ragged else batch.tail_lens[0], batch.num_rows
        if size not in plans:
            plans[size] = original(batch)
        return plans[size]

    around(verify, "_plan_of", plan_of)
    on_batch(_pages_in_use, "write_metadata", "attend")(backend)


def _pages_in_use(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Name the null page after the last page of each request, so that a wrong plan stays inside the pool."""
    if batch.mode is not Mode.RAGGED_VERIFY:
        return batch
    ends = batch.prefix_lens + batch.q_indptr.diff()
    column = torch.arange(batch.page_table.shape[1], dtype=torch.int32, device=batch.device)
    used = column * backend.geometry.attention.page_size < ends[:, None]
    return replace(batch, page_table=torch.where(used, batch.page_table, 0))


def _live_rows(backend: Any) -> None:
    """Zero output rows from the live rows of the last ragged batch on, in draft blocks too."""
    live = torch.full((), 2**31 - 1, dtype=torch.int32)

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        if batch.mode is Mode.RAGGED_VERIFY:
            live.copy_(batch.q_indptr[-1])
        if batch.mode is Mode.DRAFT_BLOCK:
            row = torch.arange(batch.num_rows, device=out.device)[:, None, None]
            out.copy_(torch.where(row < live, out, 0))

    around(backend, "attend", attend)


def _causal_bits_once(backend: Any) -> None:
    """Keep the tail's bits and depths while the sizes of causal tails are unchanged; a tree replaces what is kept."""
    kept: dict[str, Any] = {}

    def tail(original: Any, batch: ForwardBatch) -> Any:
        size = batch.q_lens[0], batch.tail_lens[0], batch.padded_reqs
        causal = not isinstance(batch.tail, Tree)
        if not causal or is_recording() or kept.get("size") != size:
            kept["tail"] = original(batch)
        if causal and not is_recording():
            kept["size"] = size
        return kept["tail"]

    around(backend, "_tail", tail)


def _slots_by_address(backend: Any) -> None:
    """Copy the engine's slots only when they come from another address than in the last forward."""
    last = [0, 0]

    def write(original: Any, batch: ForwardBatch) -> None:
        if batch.slots is None or is_recording():
            original(batch)
            return
        here, before = [batch.slots.data_ptr(), batch.num_rows], backend._slots[: batch.num_rows].clone()
        original(batch)
        if here == last:
            backend._slots[: batch.num_rows].copy_(before)
        last[:] = here

    around(backend, "write_metadata", write)


ONLY_CSR = "only csr keeps this state between forwards"
ONLY_REFERENCE = "csr serves core modes and forms only"


def _strides_of_first_layer(backend: Any) -> None:
    """Read every layer of a geometry with the strides of the first layer that was attended."""
    strides: list[tuple[int, ...]] = []

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        if not strides:
            strides.extend((cache.k.stride(), cache.v.stride()))
        pools = [
            one.as_strided(one.shape, stride) if _reaches(one, stride) else one
            for one, stride in zip((cache.k, cache.v), strides, strict=True)
        ]
        original(q, replace(cache, k=pools[0], v=pools[1]), batch, out)

    around(backend, "attend", attend)


def _reaches(one: torch.Tensor, stride: tuple[int, ...]) -> bool:
    last = one.storage_offset() + sum((size - 1) * step for size, step in zip(one.shape, stride, strict=True))
    return (last + 1) * one.element_size() <= one.untyped_storage().nbytes()


def _widths_of_the_store(backend: Any) -> None:
    """Take the widths of the last plan over in write_kv, so a layer that only attends uses older widths."""
    planned: list[tuple[int, ...]] = [()]
    original = backend.plan

    def plan(batch: ForwardBatch) -> None:
        before = backend._widths
        original(batch)
        planned[0] = backend._widths
        # Without an older plan of these requests there are no other widths to use.
        if len(before) == len(planned[0]):
            backend._widths = before

    def write_kv(store: Any, k: Any, v: Any, cache: KVCache, batch: ForwardBatch) -> None:
        backend._widths = planned[0]
        store(k, v, cache, batch)

    backend.plan = plan
    around(backend, "write_kv", write_kv)


def _stored_before(backend: Any) -> None:
    """Skip the store if no row of the last forward had a slot."""
    before = torch.ones((), dtype=torch.bool)

    def write_kv(store: Any, k: Any, v: Any, cache: KVCache, batch: ForwardBatch) -> None:
        if batch.slots is None:
            store(k, v, cache, batch)
            return
        own = backend._slots[: batch.num_rows].clone()
        backend._slots[: batch.num_rows].copy_(torch.where(before, own, -1))
        store(k, v, cache, batch)
        backend._slots[: batch.num_rows].copy_(own)
        before.copy_((own >= 0).any())

    around(backend, "write_kv", write_kv)


def _first_strides(backend: Any) -> None:
    """View every cache with the strides of the first cache."""
    strides: list[tuple[int, ...]] = []

    def of_first(cache: KVCache) -> KVCache:
        strides[:] = strides or [tuple(cache.k.stride())]
        k, v = (pages.as_strided(pages.shape, strides[0]) for pages in (cache.k, cache.v))
        return replace(cache, k=k, v=v)

    around(backend, "write_kv", lambda store, k, v, cache, batch: store(k, v, of_first(cache), batch))
    around(backend, "attend", lambda attend, q, cache, batch, out: attend(q, of_first(cache), batch, out))


class LengthsOfTheStore(Backend):
    """Attends with the prefix lengths that write_kv read."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self._read = torch.zeros(geometry.max_reqs, dtype=torch.int32, device=arena["slots"].device)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        self._read[: batch.padded_reqs].copy_(batch.prefix_lens)
        super().write_kv(k, v, cache, batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, replace(batch, prefix_lens=self._read[: batch.padded_reqs]), out)


MUTANTS = (
    Mutant(
        "H01",
        "Takes the plan over in write_kv, so a layer that shares KV attends with the plan before",
        "KV-sharing layers (Gemma 3n) call attend alone",
        patch=_widths_of_the_store,
    ),
    Mutant(
        "H02",
        "Skips the store of a forward if no row of the forward before had a slot",
        "a flag that is read before it is written; engines pass slot -1 for rows of another rank or of a dummy run",
        patch=_stored_before,
        layouts=("reference",),
        absent=NO_SUCH_PART,
    ),
    Mutant(
        "H03",
        "Views every KV cache with the strides of the first one",
        "strides as constants of a kernel that is compiled once; layers of one model in two layouts",
        patch=_first_strides,
        layouts=("reference",),
        absent=NO_SUCH_PART,
    ),
    Mutant(
        "H04",
        "Attends with the prefix lengths that the last write_kv read",
        "KV-sharing layers (Gemma 3n) call attend alone",
        plugin=plugin(LengthsOfTheStore),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant("OA1", "Finds the plan of VERIFY for a ragged batch of equal size", "a cache keyed on too little",
           patch=_plans_by_size, layouts=("cuda_triton",), absent=ONLY_TRITON),
    Mutant("OA2", "Zeroes rows of a draft block by the live rows of the last ragged batch", "a static that survives",
           patch=_live_rows, layouts=("reference",), absent=ONLY_REFERENCE),
    Mutant("OA3", "Keeps a causal tail's bits by size, and lets a tree replace them", "a cache keyed on too little",
           patch=_causal_bits_once, layouts=("csr",), absent=ONLY_CSR),
    Mutant("OA4", "Copies engine slots only when their address changes", "a cache keyed on an address",
           patch=_slots_by_address, layouts=("reference",), absent=ONLY_REFERENCE),
    Mutant("OG3", "Reads all layers with the strides of the first", "a draft layer packed in another way",
           patch=_strides_of_first_layer, layouts=("reference",), absent="csr takes no strided KV"),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "H01",
        "H02",
        "H03",
        "H04",
        "OA1",
        "OA2",
        "OA3",
        "OA4",
        "OG3",
    ),
    "random_history.equals_the_oracle",
)
