"""Judges the mutants of one target, goes on where a cut run stopped, and keeps the journal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from . import baseline, pool, suite
from .journal import Journal, identity
from .judge import Ended, Status, judge
from .mutation import Mutation
from .order import affordable, order, sampled
from .targets import Target

Tell = Callable[[Ended], None]
OF_REVIEWED = 1
"""Cases of each check that a mutant meets which a review found out of the suite's reach. No item can kill such a one,
and if one does all the same, taking it for a survivor only lowers the score."""


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
        chosen: the mutants to judge.
        again: judge also those that the journal has a final verdict on.
        sample: at most so many cases of each check, for all mutants; 0 for every item.
        reviewed: mutants that a review found to survive rightly; they meet `OF_REVIEWED` cases of each check.
        seconds: with `sample`, a survivor meets items for at most so many seconds of CPU time; 0 for no bound.
        suite: the items that there are; every one of the sizing and host tiers unless told.
        workers: processes.
    """

    chosen: Sequence[Mutation]
    again: bool = False
    sample: int = 0
    seconds: float = 0.0
    reviewed: Collection[str] = ()
    suite: Sequence[str] = ()
    workers: int = 2

    def most(self, mutation: Mutation) -> int:
        """Cases of each check that a mutant meets; 0 for all."""
        return self.sample or (OF_REVIEWED if mutation.id in self.reviewed else 0)

    def decided(self, mutation: Mutation, before: Ended | None) -> bool:
        """Whether the verdict that the journal has will do: it is final, or would come of no more items again."""
        if before is None or self.again:
            return False
        return before.final or 0 < self.most(mutation) <= before.sample


def run(target: Target, plan: Plan, journal: Journal, tell: Tell) -> None:
    """Judge what the plan asks for and the journal has not.

    Raises:
        RuntimeError: the suite fails on the unchanged copy.
    """
    journal.begin(identity(target, plan.suite))
    known = _baseline(target, journal, plan.suite or suite.items())
    kills, killers, before = journal.kills(), journal.killers(), journal.ended()
    shape: dict[str, dict[str, int]] = {}

    def jobs() -> Iterator[tuple[str, pool.Work]]:
        for one in plan.chosen:
            if not plan.decided(one, before.get(one.id)):
                every, most = order(one, known, kills, killers.get(one.id)), plan.most(one)
                shape[one.id] = {"of": len(every), "sample": most}
                met = sampled(every, most) if most else every
                met = affordable(met, known, plan.seconds) if plan.sample and plan.seconds else met
                yield one.id, _work(target, one, met, known)

    for job, rows, code in pool.run(jobs(), plan.workers):
        ended = replace(_ended(job, rows, code), **shape[job])
        if ended.item:
            kills[ended.item] += 1
        journal.note(ended.as_json())
        tell(ended)


def _work(target: Target, mutation: Mutation, items: Sequence[str], known: baseline.Baseline) -> pool.Work:
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


def _baseline(target: Target, journal: Journal, items: Iterable[str]) -> baseline.Baseline:
    if not journal.baseline.is_file():

        def work(say: pool.Say) -> None:
            baseline.measure(target, journal.baseline, items, lambda item: say({"started": item}))

        for _, rows, code in pool.run(iter([("baseline", work)]), 1):
            if code:
                where = rows[-1]["started"] if rows else "load"
                ended = (
                    "see above" if code > 0 else f"a signal ended its process ({-code}; 9: silent too long, or memory)"
                )
                raise RuntimeError(f"the suite fails on the unchanged copy of {target.package}: {where}, {ended}")
    return baseline.read(journal.baseline)
