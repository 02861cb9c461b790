"""Opens the fixture (the prepared arguments) of a behaviour check; see `Fixture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from draftmark.geometry import Geometry, StateGeometry
from draftmark.graphs import Program

from ..backend_under_test import BackendUnderTest
from ..cases.forward_sets import all_forwards
from ..cases.forwards import TRAPS, ForwardCase
from ..cases.graph_rounds import captured, programs_of, replays
from ..cases.late_rounds import in_flight
from ..cases.state_rounds import Round
from ..fixture import Fixture
from ..oracle.formulas import max_pages, max_requests
from .graph_harness import GraphHarness
from .harness import Harness
from .late_harness import LateHarness
from .layer_harness import LayerHarness
from .opening import open_graphs, open_harness
from .sparse import sparse_memory, sparse_pool
from .state_harness import StateHarness
from .tree_harness import TreeHarness

Opened = tuple[Any, Any]


def run_with_fixture(fixture: Fixture, run: Callable[..., None], subject: BackendUnderTest, value: Any) -> None:
    """Open the fixture for this case value, and call the check's body with it."""
    with _one_thread(subject.device), FIXTURES[fixture](subject, value) as opened:
        run(*opened)


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Use one thread on a CPU. The tensors are tiny, and a sum's bits would depend on the number of threads."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _subject(subject: BackendUnderTest, value: Any) -> AbstractContextManager[Opened]:
    return nullcontext((subject, value))


def _forward(subject: BackendUnderTest, forward: ForwardCase) -> AbstractContextManager[Opened]:
    harness = open_harness(subject, forward.geometry, forward.num_pages)
    return nullcontext((harness, harness.place(forward)))


def _metadata(subject: BackendUnderTest, forward: ForwardCase) -> AbstractContextManager[Opened]:
    harness = Harness(subject, forward.geometry, 1)
    return nullcontext((harness, harness.place(forward)))


def _forwards(subject: BackendUnderTest, forwards: Sequence[ForwardCase]) -> AbstractContextManager[Opened]:
    harness = open_harness(subject, forwards[0].geometry, max(forward.num_pages for forward in forwards))
    return nullcontext((harness, [harness.place(forward) for forward in forwards]))


def _rounds(subject: BackendUnderTest, rounds: Sequence[Round]) -> AbstractContextManager[Opened]:
    return nullcontext((open_harness(subject, rounds[0].geometry, max(one.num_pages for one in rounds)), rounds))


def _state(subject: BackendUnderTest, geometry: StateGeometry) -> AbstractContextManager[Opened]:
    return nullcontext((StateHarness(subject, geometry, 2 + TRAPS), geometry))


def _geometry(subject: BackendUnderTest, geometry: Geometry) -> AbstractContextManager[Opened]:
    return nullcontext((Harness(subject, geometry, pool_pages(geometry)), geometry))


def _pair(subject: BackendUnderTest, pair: tuple[Geometry, Geometry]) -> AbstractContextManager[Opened]:
    first, second = (Harness(subject, geometry, pool_pages(geometry)) for geometry in pair)
    return nullcontext((first, second))


@contextmanager
def _far_slots(subject: BackendUnderTest, forward: ForwardCase) -> Iterator[Opened]:
    harness = StateHarness(subject, forward.geometry, 2)  # type: ignore[arg-type]
    compared = sorted({slot for one in forward.requests if one.live for slot in (one.pages[0], one.save)} - {0})
    shapes = [(one.shape[0], forward.num_pages, *one.shape[2:]) for one in harness.tensors.memory]
    dtypes = [one.dtype for one in harness.tensors.memory]
    with ExitStack() as kept:
        memory = [
            kept.enter_context(sparse_memory(shape, dtype, subject.device))
            if 0 not in shape
            else torch.zeros(shape, dtype=dtype, device=subject.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        harness.tensors.use(memory[0], memory[1], compared)
        yield harness, forward


@contextmanager
def _far(subject: BackendUnderTest, forward: ForwardCase) -> Iterator[Opened]:
    if isinstance(forward.geometry, StateGeometry):
        with _far_slots(subject, forward) as opened:
            yield opened
        return
    placed = Harness(subject, forward.geometry, 1).place(forward)
    with sparse_pool(placed, subject.device) as pool:
        yield Harness(subject, forward.geometry, forward.num_pages, pool), placed


def _graphs(subject: BackendUnderTest, geometry: Geometry) -> AbstractContextManager[Opened]:
    rounds = [forward for program in programs_of(geometry) for _, forward in replays(geometry, program)]
    if geometry.limits.capture_batch_sizes:
        largest = geometry.limits.capture_batch_sizes[-1]
        rounds += [captured(geometry, program, largest) for program in programs_of(geometry)]
    pages = max(pool_pages(geometry), *(forward.num_pages for forward in rounds))
    return nullcontext((open_graphs(open_harness(subject, geometry, pages)), geometry))


def _program(subject: BackendUnderTest, value: tuple[Geometry, Program]) -> AbstractContextManager[Opened]:
    geometry, program = value
    with _graphs(subject, geometry) as (graphs, _):
        return nullcontext((graphs, program))


def _late(subject: BackendUnderTest, geometry: Geometry) -> AbstractContextManager[Opened]:
    harness = Harness(subject, geometry, in_flight(geometry)[-1].num_pages)
    return nullcontext((LateHarness(GraphHarness(harness)), geometry))


def _layers(
    subject: BackendUnderTest, value: tuple[Sequence[Geometry], Sequence[ForwardCase]]
) -> AbstractContextManager[Opened]:
    shapes, forwards = value
    draw = [(forward.mode, forward.name) for forward in forwards]
    layers = LayerHarness(subject, shapes, max(forward.num_pages for forward in forwards), draw)
    return nullcontext((layers, [layers.place(forward) for forward in forwards]))


def _trees(subject: BackendUnderTest, geometry: Geometry) -> AbstractContextManager[Opened]:
    return nullcontext((TreeHarness(subject, geometry), geometry))


@contextmanager
def _far_trees(subject: BackendUnderTest, geometry: Geometry) -> Iterator[Opened]:
    a = geometry.attention
    page = (a.page_size, a.num_kv_heads, a.head_dim)
    first = 2**31 // (page[0] * page[1] * page[2])
    shape = (2, 1, first + max_requests(geometry) * max_pages(geometry), *page)
    with sparse_memory(shape, getattr(torch, a.kv_dtype), subject.device) as memory:
        yield TreeHarness(subject, geometry, first, memory), geometry


def pool_pages(geometry: Geometry) -> int:
    """Return a number of pool pages that is enough for every forward of a geometry."""
    return max(forward.num_pages for forward in all_forwards(geometry))


FIXTURES: dict[Fixture, Callable[[BackendUnderTest, Any], AbstractContextManager[Opened]]] = {
    Fixture.SUBJECT: _subject,
    Fixture.FORWARD: _forward,
    Fixture.METADATA: _metadata,
    Fixture.FORWARDS: _forwards,
    Fixture.ROUNDS: _rounds,
    Fixture.STATE: _state,
    Fixture.GEOMETRY: _geometry,
    Fixture.PAIR: _pair,
    Fixture.LARGE_POOL: _far,
    Fixture.GRAPHS: _graphs,
    Fixture.PROGRAM: _program,
    Fixture.LATE_DEVICE: _late,
    Fixture.LAYERS: _layers,
    Fixture.TREES: _trees,
    Fixture.LARGE_POOL_TREES: _far_trees,
}
"""Function that opens each fixture: takes the subject and the case value, returns a context with both arguments."""
