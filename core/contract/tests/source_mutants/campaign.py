"""Judges the mutants of one target, goes on where a cut run stopped, and keeps the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from . import baseline, pool, suite
from .journal import Journal, identity
from .judge import Ended, Status, judge
from .mutation import Mutation
from .order import order
from .targets import Target

Tell = Callable[[Ended], None]


def run(
    target: Target, chosen: Sequence[Mutation], journal: Journal, workers: int, tell: Tell, again: bool = False
) -> None:
    """Judge those of the chosen mutants that the journal has no verdict on, or with `again` all of them.

    Raises:
        RuntimeError: the suite fails on the unchanged copy.
    """
    journal.begin(identity(target))
    suite.items()  # once, before the forks
    known = _baseline(target, journal)
    kills, decided = journal.kills(), {} if again else journal.ended()

    def jobs() -> Iterator[tuple[str, pool.Work]]:
        for one in chosen:
            if one.id not in decided:
                yield one.id, _work(target, one, known, kills)

    for job, rows, code in pool.run(jobs(), workers):
        ended = _ended(job, rows, code)
        if ended.item:
            kills[ended.item] += 1
        journal.note(ended.as_json())
        tell(ended)


def _work(target: Target, mutation: Mutation, known: baseline.Baseline, kills: Counter[str]) -> pool.Work:
    items = order(mutation, known, kills)

    def work(say: pool.Say) -> None:
        ended = judge(target, mutation, items, known, lambda item: say({"started": item}))
        say({"ended": ended.as_json()})

    return work


def _ended(mutation: str, rows: list[dict[str, object]], code: int) -> Ended:
    """What a process said, or, if it did not come to say it, what became of it."""
    if rows and "ended" in rows[-1]:
        return Ended.from_json(rows[-1]["ended"])  # type: ignore[arg-type]
    items = [str(row["started"]) for row in rows if "started" in row]
    if not items:
        return Ended(mutation, Status.STILLBORN, message=f"the process ended with code {code} while it loaded")
    return Ended(mutation, Status.HUNG, items[-1], f"the process ended with code {code}", met=len(items))


def _baseline(target: Target, journal: Journal) -> baseline.Baseline:
    if not journal.baseline.is_file():

        def work(say: pool.Say) -> None:
            baseline.measure(target, journal.baseline)

        for _, _, code in pool.run(iter([("baseline", work)]), 1):
            if code:
                raise RuntimeError(f"the suite fails on the unchanged copy of {target.package}: see above")
    return baseline.read(journal.baseline)
