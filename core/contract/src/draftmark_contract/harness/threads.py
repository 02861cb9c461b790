"""Makes each call of a backend on a drawn thread, as an engine with worker threads does."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from draftmark.geometry import Mode

from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from .harness import Harness

WORKERS = 2
"""Threads next to the calling one."""
Call = Callable[[], object]


class Threads:
    """Runs forwards of one harness. Each call comes from the calling thread or from one of two workers.

    A worker has the device and stream of the calling thread. One call runs at a time.
    """

    def __init__(self, harness: Harness, dice: random.Random) -> None:
        self._harness, self._dice, self._stack = harness, dice, ExitStack()
        pools = [self._stack.enter_context(ThreadPoolExecutor(1, initializer=_joins())) for _ in range(WORKERS)]
        self._runs: list[Callable[[Call], object]] = [lambda call: call()]
        self._runs += [lambda call, pool=pool: pool.submit(call).result() for pool in pools]  # type: ignore[misc]

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self) -> None:
        """Open the backend again on a worker."""
        self._runs[-1](self._harness.reopen)

    def assert_forward(self, forward: ForwardCase, seed: int) -> None:
        """Run an eager forward and check it."""
        harness = self._harness
        batch, expected = harness.load(forward, seed=seed), harness.expected(forward)
        harness.subject.attended = harness.subject.attended or harness.kernels
        for call in harness.calls(forward, batch).values():
            self._run(call)
        if not harness.kernels:
            harness.layer(forward, batch)
        harness.assert_step(forward, batch, expected, "with calls from several threads the output")

    def assert_replay(self, forward: ForwardCase) -> None:
        """Capture a forward, replay it and check the replay, if its mode has a graph of one step."""
        harness = self._harness
        if forward.mode in (Mode.EXTEND, Mode.DRAFT) or not harness.kernels:
            return
        batch, expected = harness.load(forward), harness.expected(forward)

        def step() -> None:
            harness.backend.write_metadata(batch)
            harness.layer(forward, batch)

        state, key = harness.subject.graph_state(harness.geometry), key_of(forward)
        calls: tuple[Call, ...] = (lambda: harness.backend.plan(batch), step, lambda: state.capture(key, step))
        for call in calls:
            self._run(call)
        harness.tensors.rows(forward)[3].fill_(float("nan"))
        self._run(lambda: harness.backend.plan(batch))
        self._run(lambda: state.replay(key))
        harness.assert_step(forward, batch, expected, "with calls from several threads the replayed output")

    def _run(self, call: Call) -> None:
        self._dice.choice(self._runs)(call)


def _joins() -> Callable[[], None]:
    """Return a function that gives a new thread the device and stream of the thread that calls `_joins`."""
    if not torch.accelerator.is_available():
        return lambda: None
    stream = torch.accelerator.current_stream()
    return lambda: torch.accelerator.set_stream(stream)
