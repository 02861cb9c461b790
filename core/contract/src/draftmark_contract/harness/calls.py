"""The calls that an engine makes to one backend, one after another: hooks, open, steps, capture and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from draftmark.geometry import Mode

from ..backend_under_test import BackendUnderTest
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from .harness import Harness

Call = tuple[str, object, Callable[[], object]]
"""Name, batch for messages, and the call. The suite has prepared everything before it yields the call."""


def calls_of(subject: BackendUnderTest, forwards: Sequence[ForwardCase]) -> Iterator[Call]:
    """Yield all calls of an engine for these forwards of one geometry. Run each call before taking the next one."""
    geometry, backend = subject.fit(forwards[0].geometry), subject.backend
    for hook in (backend.supports, backend.requirements, backend.buffers, subject.layouts):
        yield hook.__name__, geometry, partial(hook, geometry)
    opened: list[Harness] = []
    pages = max(forward.num_pages for forward in forwards)
    yield "open_backend", geometry, lambda: opened.append(Harness(subject, geometry, pages))
    for forward in forwards:
        yield from _of_one(opened[0], opened[0].place(forward))


def _of_one(harness: Harness, forward: ForwardCase) -> Iterator[Call]:
    """Yield the calls of one eager forward, and of one capture and replay if its mode has a graph of one step."""
    batch, backend = harness.load(forward), harness.backend
    q, k, v, out = harness.tensors.rows(forward)
    yield "plan", forward, lambda: backend.plan(batch)
    yield "write_metadata", forward, lambda: backend.write_metadata(batch)
    if harness.kernels:
        harness.subject.attended = True
        if forward.is_stored:
            yield "write_kv", forward, lambda: backend.write_kv(k, v, harness.tensors.cache, batch)
        yield "attend", forward, lambda: backend.attend(q, harness.tensors.cache, batch, out)
    if forward.mode in (Mode.EXTEND, Mode.DRAFT):
        return

    def step() -> None:
        backend.write_metadata(batch)
        if harness.kernels:
            harness.layer(forward, batch)

    state, key = harness.subject.graph_state(harness.geometry), key_of(forward)
    yield "capture", forward, lambda: state.capture(key, step)
    yield "plan before a replay", forward, lambda: backend.plan(batch)
    yield "replay", forward, lambda: state.replay(key)
