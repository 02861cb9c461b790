"""Checks of a backend in a process of its own, where nothing of the suite is imported and no memory is guarded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..check import Case, ContractViolation
from ..sizing.elsewhere import installed
from .process import one_of_each_mode

if TYPE_CHECKING:
    from ..harness.harness import Harness

SINCE = (1, 5)
NAMES = ("small", "all-modes")


def _forwards() -> list[Case]:
    return [shape.case(one_of_each_mode(shape.geometry)) for shape in shapes("all-modes") if shape.name in NAMES]


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE, bugs=("sglang#10278",))
def gives_the_same_results(harness: Harness, forwards: list[ForwardCase]) -> None:
    """In a process without the suite a backend is right, with the same bits in any fresh memory and on any thread.

    An engine makes one call at a time, and may make every call on another thread: open, plan, write_metadata,
    write_kv, attend, capture and replay. It sets that thread's device and stream. So a backend keeps nothing in
    thread-local storage or context variables, and needs no main thread. The arena has no guard words. All fresh memory
    has one byte in one run and another byte in the next. Loading and running leave the process as it was.
    """
    from ..black_box.process import given_of, run_black_box

    subject = harness.subject
    if not installed(subject.backend.name, subject.backend.plugin):
        return  # Another process cannot load a backend object that a test registered.
    tensors, batches, expected = [], [], []
    for number, forward in enumerate(forwards):
        harness.tensors = harness.more_tensors()
        batches.append(harness.load(forward, seed=number))
        tensors.append(harness.tensors)
        expected.append(harness.expected(forward))
    given = [given_of(*one) for one in zip(batches, tensors, [len(one.rows) for one in forwards], strict=True)]
    lives, changes = run_black_box(subject, harness.geometry, given)
    if changes:
        name = next(iter(changes))
        raise ContractViolation(
            f"a process that loads and runs the backend has changed {', '.join(list(changes)[:4])}",
            got=f"{name} (before, after) = {changes[name][:300]}",
            expected="the process as it was before the backend was loaded",
            formula="draftmark.backend.AttentionBackend: a call changes only its outputs",
            remedy="set nothing for the whole process, also not in an import",
        )
    subject.attended = subject.attended or harness.kernels
    for where, results in lives:
        for number, (forward, result) in enumerate(zip(forwards, results, strict=True)):
            subject.current, harness.tensors = forward, tensors[number]
            harness.assert_metadata(forward, batches[number], result["arena"])
            if not harness.kernels:
                continue
            for name in ("k", "v"):
                getattr(harness.tensors.cache, name).copy_(result[name])
            harness.assert_cache(forward, expected[number])
            harness.assert_output(forward, expected[number], f"the output {where}", result["out"])
            _same_bits(harness, forward, where, result, lives[0][1][number])


def _same_bits(
    harness: Harness, forward: ForwardCase, where: str, result: dict[str, object], first: dict[str, object]
) -> None:
    rows = forward.live_rows
    want = harness.bits(first["out"][:rows])  # type: ignore[index]
    for name, what in (("out", "a forward"), ("replayed", "a replay")):
        if name in result and not bool((harness.bits(result[name][:rows]) == want).all()):  # type: ignore[index]
            raise ContractViolation(
                f"{what} gives other bits {where}",
                batch=forward,
                got="other bits than in memory of another byte, on the main thread, eagerly",
                expected="the same bits",
                formula="docs/contract.md, what may differ between two runs",
                bug="sglang#10278",
                remedy="write every byte that is read, and keep nothing in threading.local or a ContextVar",
            )
