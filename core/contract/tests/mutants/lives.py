"""Mutants H01 … H10: what a forward, a graph, a failure or an open geometry leaves to others on the same process.

H01 … H04 are wrong after a rare forward, H05 … H07 in a second life, H08 … H10 next to two other geometries.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache, is_recording

from .mutant import ONLY, Mutant, around
from .state_and_order import plugin
from .tutorial import Backend

CORE = "the other layout has no such part"

# -- after a rare forward -----------------------------------------------------------------------------------------


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


# -- in a second life ---------------------------------------------------------------------------------------------


def _index_of_the_first_capture(backend: Any) -> None:
    """Compute the numbers of table entries in the first capture of each size, and use that memory in later captures."""
    entries: dict[tuple[Any, ...], torch.Tensor] = {}

    def write(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        if not is_recording():
            return
        key = batch.mode, batch.step, batch.padded_reqs
        if key not in entries:
            entries[key] = torch.arange(batch.padded_reqs, dtype=torch.int32, device=batch.device)
        lens = backend.arena["kv_last_page_len"][: batch.padded_reqs]
        lens.copy_(lens[entries[key].clamp(0, batch.padded_reqs - 1).long()])

    around(backend, "write_metadata", write)


class BusyFlag(Backend):
    """Guards attend against being entered twice. An error inside leaves the guard closed."""

    busy = False

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if self.busy:
            return
        self.busy = True
        super().attend(q, cache, batch, out)
        self.busy = False


def _pool_of_captures(backend: Any) -> None:
    """Take one of a fixed number of workspaces in each capture, and never give it back."""
    geometry, taken = backend.geometry, count(1)
    steps = geometry.draft.num_steps if Mode.DRAFT in geometry.modes else 1
    most = 2 * (len(geometry.modes) - 1) * (1 + len(geometry.limits.capture_batch_sizes)) * steps

    def write(original: Any, batch: ForwardBatch) -> None:
        if is_recording() and next(taken) > most:
            raise RuntimeError(f"no workspace is left for a graph: {most} are in use")
        original(batch)

    around(backend, "write_metadata", write)


# -- next to two other geometries ---------------------------------------------------------------------------------

PLANS: list[tuple[int, ...]] = [(), ()]
"""Widths of the two newest plans of this process."""
NUMBERS = count()


def _two_plans(backend: Any) -> None:
    """Keep the widths at one of two places, which all backends of the process use in turn."""
    at = [0]

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        at[0] = next(NUMBERS) % 2
        PLANS[at[0]] = backend._widths

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        own, found = backend._widths, PLANS[at[0]]
        if not is_recording():
            backend._widths = found if len(found) == len(own) else tuple(max(1, one - 1) for one in own)
        original(q, cache, batch, out)
        backend._widths = own

    around(backend, "plan", plan)
    around(backend, "attend", attend)


SHAPES: list[Any] = []
"""Layer shapes of all backends, in the order in which they were opened."""


class TwoShapes(Backend):
    """Looks up its softmax scale among those of the two newest opens, and else uses the newest one."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        SHAPES.append(self.scale)
        self._number = len(SHAPES)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        self.scale = SHAPES[self._number - 1 if self._number > len(SHAPES) - 2 else -1]
        super().attend(q, cache, batch, out)


WINDOWS: dict[bool, int] = {}
"""Window of the newest layer without a window, and of the newest layer with one."""


def _two_windows(backend: Any) -> None:
    """Compile two variants of the kernel, without a window and with one; every window layer uses the newest window."""
    right = backend.geometry
    limited = right.attention.window_left >= 0
    WINDOWS[limited] = right.attention.window_left

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        backend.geometry = replace(right, attention=replace(right.attention, window_left=WINDOWS[limited]))
        original(q, cache, batch, out)
        backend.geometry = right

    around(backend, "attend", attend)


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
        absent=CORE,
    ),
    Mutant(
        "H03",
        "Views every KV cache with the strides of the first one",
        "strides as constants of a kernel that is compiled once; layers of one model in two layouts",
        patch=_first_strides,
        layouts=("reference",),
        absent=CORE,
    ),
    Mutant(
        "H04",
        "Attends with the prefix lengths that the last write_kv read",
        "KV-sharing layers (Gemma 3n) call attend alone",
        plugin=plugin(LengthsOfTheStore),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant(
        "H05",
        "Computes an index in the first capture of each size, and reads that memory in later captures",
        "constants made lazily in a graph's pool; sleep and wake",
        patch=_index_of_the_first_capture,
        layouts=("csr",),
        absent=CORE,
    ),
    Mutant(
        "H06",
        "Leaves attend's guard against a second entry closed when an error is raised inside",
        "out of memory in one forward, silence in all later ones",
        plugin=plugin(BusyFlag),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant(
        "H07",
        "Takes one of a fixed number of workspaces in each capture, and never gives it back",
        "pools of graph wrappers; sleep and wake, and captures that are repeated",
        patch=_pool_of_captures,
    ),
    Mutant(
        "H08",
        "Keeps the plan at one of two places, which all backends of the process use in turn",
        "double buffering for a target and a draft model; a model with window layers needs a third place",
        patch=_two_plans,
    ),
    Mutant(
        "H09",
        "Finds its softmax scale only while it is one of the two newest opens",
        "a cache of two entries for a target and a draft model",
        plugin=plugin(TwoShapes),
        layouts=("tutorial",),
        absent=ONLY,
    ),
    Mutant(
        "H10",
        "Compiles one kernel for all layers with a window, with the window of the newest layer",
        "vllm#54374: one plan for layers of two windows",
        patch=_two_windows,
    ),
)
KILLER = {
    **dict.fromkeys(("H01", "H02", "H03", "H04"), "random_history.equals_the_oracle"),
    "H05": "second_lives.of_a_graph_is_right",
    "H06": "second_lives.of_a_forward_is_right",
    "H07": "second_lives.of_a_capture_is_right",
    **dict.fromkeys(("H08", "H09", "H10"), "turns.of_three_geometries_are_right"),
}
"""Check that must kill each mutant."""
