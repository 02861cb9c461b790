"""Judges the mutants of one target, continues an interrupted run, and keeps the journal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from . import baseline, pool, suite
from .journal import Journal, identity
from .judge import Ended, Status, judge
from .mutation import Mutation
from .order import affordable, order, sampled
from .targets import Target

Report = Callable[[Ended], None]
OF_REVIEWED = 1
"""Cases of each check that run on a mutant with a review that accepts its survival. No item is expected to kill it."""


@dataclass(frozen=True)
class Plan:
    """Parameters of a run.

    Attributes:
        chosen: the mutants to judge.
        again: also judge mutants with a final result in the journal.
        sample: largest number of cases of each check, for all mutants; 0 for every item.
        reviewed: ids of mutants with a review that accepts their survival; they run `OF_REVIEWED` cases of each check.
        seconds: with `sample`, largest CPU time of a survivor's items in seconds; 0 for no limit.
        suite: ids of the items to use; empty for every item of the sizing and host tiers.
        workers: number of processes.
    """

    chosen: Sequence[Mutation]
    again: bool = False
    sample: int = 0
    seconds: float = 0.0
    reviewed: Collection[str] = ()
    suite: Sequence[str] = ()
    workers: int = 2

    def most(self, mutation: Mutation) -> int:
        """Return the number of cases of each check that run on a mutant; 0 for all."""
        return self.sample or (OF_REVIEWED if mutation.id in self.reviewed else 0)

    def decided(self, mutation: Mutation, before: Ended | None) -> bool:
        """Return True if a mutant needs no run: its result is final, or this run would add no cases to it."""
        if before is None or self.again:
            return False
        return before.final or 0 < self.most(mutation) <= before.sample


def run(target: Target, plan: Plan, journal: Journal, report: Report) -> None:
    """Judge the plan's mutants that have no result in the journal yet.

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
        report(ended)


def _work(target: Target, mutation: Mutation, items: Sequence[str], known: baseline.Baseline) -> pool.Work:
    def work(send: pool.Send) -> None:
        ended = judge(target, mutation, items, known, lambda item: send({"started": item}))
        send({"ended": ended.as_json()})

    return work


def _ended(mutation: str, rows: list[dict[str, object]], code: int) -> Ended:
    """Return the result that a process sent, or a result made from its exit code."""
    if rows and "ended" in rows[-1]:
        return Ended.from_json(rows[-1]["ended"])  # type: ignore[arg-type]
    items = [str(row["started"]) for row in rows if "started" in row]
    if not items:
        return Ended(mutation, Status.STILLBORN, message=f"the process ended with code {code} while it loaded")
    return Ended(mutation, Status.HUNG, items[-1], f"the process ended with code {code}", met=len(items))


def _baseline(target: Target, journal: Journal, items: Iterable[str]) -> baseline.Baseline:
    if not journal.baseline.is_file():

        def work(send: pool.Send) -> None:
            baseline.measure(target, journal.baseline, items, lambda item: send({"started": item}))

        for _, rows, code in pool.run(iter([("baseline", work)]), 1):
            if code:
                where = rows[-1]["started"] if rows else "load"
                ended = "see above" if code > 0 else f"a signal ended its process ({-code}; 9: no output, or memory)"
                raise RuntimeError(f"the suite fails on the unchanged copy of {target.package}: {where}, {ended}")
    return baseline.read(journal.baseline)
