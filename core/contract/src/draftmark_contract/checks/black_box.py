"""Checks of a backend in a process of its own, in memory of any bytes, and with calls from any thread."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from ..behaviour import Fixture, behaviour
from ..cases.black_box import SINCE, Groups, groups
from ..cases.forwards import ForwardCase
from ..check import ContractViolation, Refused
from ..sizing.elsewhere import installed

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.harness import Harness


@behaviour(Fixture.SUBJECT, cases=groups, since=SINCE, bugs=("sglang#10278",))
def gives_the_same_results(subject: BackendUnderTest, value: Groups) -> None:
    """In a process without the suite a backend is right, with the same bits in any fresh memory and on any thread.

    An engine makes one call at a time, each on any thread, with that thread's device and stream set. So a backend keeps
    nothing in thread-local storage or context variables. The arena has no guard words. Fresh memory has one byte
    throughout in one run and another byte in the next. Loading and running leave the process as it was.
    """
    from ..black_box.process import given_of, run_black_box

    if not installed(subject.backend.name, subject.backend.plugin):
        return  # Another process cannot load a backend object that a test registered.
    worlds = [[_loaded(harness, one, n) for n, one in enumerate(some)] for harness, some in _served(subject, value)]
    given = [(one[0][0].geometry, [given_of(b, h.tensors, f.num_rows) for h, f, b, _ in one]) for one in worlds]
    lives, changes = run_black_box(subject, given)
    if changes:
        name = next(iter(changes))
        raise ContractViolation(
            f"a process that loads and runs the backend has changed {', '.join(list(changes)[:4])}",
            got=f"{name} (before, after) = {changes[name][:300]}",
            expected="the process as it was before the backend was loaded",
            formula="draftmark.backend.AttentionBackend: a call changes only its outputs",
            remedy="set nothing for the whole process, also not in an import",
        )
    subject.attended = subject.attended or subject.kernels
    for where, results in lives:
        for world, result, first in zip(worlds, results, lives[0][1], strict=True):
            for loaded, one, before in zip(world, result, first, strict=True):
                _assert_results(*loaded, where, one, before)


def _served(subject: BackendUnderTest, value: Groups) -> list[tuple[Harness, list[ForwardCase]]]:
    """Return the forwards of every geometry that the backend serves, each with a harness that has opened it.

    Raises:
        Refused: the backend serves none of them.
    """
    from ..harness.harness import Harness

    found = []
    for forwards in value:
        try:
            harness = Harness(subject, forwards[0].geometry, max(one.num_pages for one in forwards))
        except Refused as refusal:
            refused = refusal
            continue
        found.append((harness, [harness.place(one) for one in forwards]))
    if not found:
        raise refused
    return found


def _loaded(harness: Harness, forward: ForwardCase, seed: int) -> tuple[Harness, ForwardCase, Any, Any]:
    """Return a harness with tensors of its own for a forward, the forward, its batch and its expected result."""
    from copy import copy

    harness = copy(harness)
    harness.tensors = harness.more_tensors()
    return harness, forward, harness.load(forward, seed=seed), harness.expected(forward)


def _assert_results(
    harness: Harness, forward: ForwardCase, batch: Any, expected: Any, where: str, result: Any, first: Any
) -> None:
    harness.subject.current = forward
    harness.assert_metadata(forward, batch, result["arena"])
    if not harness.kernels:
        return
    for name in ("k", "v"):
        getattr(harness.tensors.cache, name).copy_(result[name])
    harness.assert_cache(forward, expected)
    harness.assert_output(forward, expected, f"the output {where}", result["out"])
    _same_bits(harness, forward, where, result, first)


def _same_bits(harness: Harness, forward: ForwardCase, where: str, result: Any, first: Any) -> None:
    rows = forward.live_rows
    want = harness.bits(first["out"][:rows])
    for name, what in (("out", "a forward"), ("replayed", "a replay")):
        if name in result and not bool((harness.bits(result[name][:rows]) == want).all()):
            raise ContractViolation(
                f"{what} gives other bits {where}",
                batch=forward,
                got="other bits than in memory of another byte, on the main thread, eagerly",
                expected="the same bits",
                formula="docs/contract.md, what may differ between two runs",
                bug="sglang#10278",
                remedy="write every byte that is read, and keep nothing in threading.local or a ContextVar",
            )


@behaviour(Fixture.SUBJECT, cases=groups, since=SINCE, bugs=("sglang#10278", "flashinfer#5176"))
def needs_no_fresh_memory(subject: BackendUnderTest, value: Groups) -> None:
    """Without guard words results are right whatever the buffers hold when the backend opens.

    They hold one byte throughout, one small number throughout, random bytes, or what an earlier backend left there.
    """
    from ..harness.old_memory import FILLS, Left

    served, left, turn = _served(subject, value), Left(), 0
    fills = (*FILLS, ("what an earlier backend left", left.fill))
    for number, (harness, forwards) in enumerate(served):
        for what, fill in fills[number :: len(served)]:
            harness.reopen(fill)
            for _ in range(min(2, len(forwards))):
                forward = forwards[turn % len(forwards)]
                turn += 1
                batch = harness.load(forward, seed=turn)
                harness.assert_forward(forward, batch, f"with buffers of {what} and no guard words the output")
            left.keep(harness.arena)


@behaviour(Fixture.SUBJECT, cases=groups, since=SINCE)
def takes_calls_from_any_thread(subject: BackendUnderTest, value: Groups) -> None:
    """A backend is right when each call of a forward, a capture and a replay comes from one of three threads, as drawn.

    Two of the threads live as long as the backend, so that each of them may find what it kept of an earlier forward.
    """
    from ..harness.threads import Threads

    for number, (harness, forwards) in enumerate(_served(subject, value)):
        with Threads(harness, random.Random(f"threads {number}")) as threads:
            threads.open()
            for seed, forward in enumerate((*forwards, *forwards[::-1])):
                threads.assert_forward(forward, seed)
            for forward in forwards:
                threads.assert_replay(forward)
