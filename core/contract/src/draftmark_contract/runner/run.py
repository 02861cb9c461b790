"""Runs the items of one subject: opens it, selects items, keeps the journal, and returns the verdict."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmark.errors import DraftmarkError
from draftmark_tools.cli.errors import ArgumentError

from ..check import Tier
from .journal import Journal
from .judging import Suite, judge
from .limits import LIMIT_S
from .outcome import Outcome, Result
from .pool import Pool
from .progress import Progress
from .selection import expression, select
from .source import CLEAN, source_of
from .stopped import INTERRUPTED, RunStopped
from .subject import Listed, Opening
from .verdict import Verdict


@dataclass(frozen=True)
class RunOptions:
    """Holds the options of one run.

    Attributes:
        tiers: tiers to run; () for all that the subject has. Ignored with `items`.
        items: ids of the items to run; () for all.
        k: expression over item ids, see `selection.expression`; "" for all.
        sample: maximum number of items per check, evenly spread; 0 for all.
        workers: largest number of worker processes at a time.
        limit: seconds for one item. An item that takes longer fails if this is at least `LIMIT_S`; otherwise it is
            unjudged, and there is no verdict.
        journal: file that keeps each item's result; None to keep none.
        stop_at_first: end the run at the first failed item.
    """

    tiers: tuple[Tier, ...] = ()
    items: tuple[str, ...] = ()
    k: str = ""
    sample: int = 0
    workers: int = 1
    limit: float = LIMIT_S
    journal: Path | None = None
    stop_at_first: bool = False


def run(name: str, opening: Opening, options: RunOptions, command: str) -> Verdict:
    """Judge one subject. An item that ends its process counts as failed, and the other items still run.

    Args:
        name: name of the subject, for a verdict on one that does not open.
        command: first words of the command line, for progress.

    Raises:
        ArgumentError: the options select no item, or the journal belongs to another run.
    """
    expression(options.k)
    one = _Run(name, opening, options, Progress(command))
    with _sigterm_as_ctrl_c():
        try:
            one.to_the_end()
        except ArgumentError:
            raise
        except (RunStopped, DraftmarkError) as error:
            one.error = str(error)
        except KeyboardInterrupt:
            one.error = INTERRUPTED
        finally:
            one.progress.stop()
    return one.verdict()


def listed(name: str, opening: Opening, options: RunOptions) -> list[Listed]:
    """Return the items that a run with these options runs. The subject is opened in a process of its own.

    Raises:
        ArgumentError: the options select no item.
        DraftmarkError: the subject cannot be opened.
    """
    expression(options.k)
    with Pool(opening, options.limit) as pool:
        pool.open()
        pool.ask_for_items()
        return _chosen(name, options, *pool.items())


def _chosen(name: str, options: RunOptions, items: Sequence[Listed], left_out: dict[str, str]) -> list[Listed]:
    """Return the selected items. `left_out` has the rules without an item, with the reasons."""
    for one in options.items:
        if reason := left_out.get(one.partition("[")[0]):
            raise ArgumentError(f"--item {one!r} does not exist for {name}: {reason}; choose another item")
    tiers = () if options.items else options.tiers
    within = {one.id: one for one in items if not tiers or one.tier in tiers}
    return [within[one] for one in select(list(within), options.items, options.k, options.sample)]


@dataclass
class _Run:
    """State of a run.

    Attributes:
        error: reason why the run gives no verdict, as a clause; "" if there is none.
        results: results of the selected items by id, also those of earlier runs with the same journal.
    """

    name: str
    opening: Opening
    options: RunOptions
    progress: Progress
    error: str = ""
    results: dict[str, Result] = field(default_factory=dict)
    runs: Sequence[dict[str, Any]] = ()
    suite: Suite | None = None

    def to_the_end(self) -> None:
        """Open the subject and run the selected items."""
        options = self.options
        with ExitStack() as stack:
            journal = Journal(options.journal) if options.journal else None
            if journal:
                stack.enter_context(journal.locked())
            pool = stack.enter_context(Pool(self.opening, options.limit, options.workers))
            opened = pool.open()
            pool.ask_for_items()
            # The parsing of the code takes as long as the listing of the items, in the other process.
            identity = {part.name: part.digest() for part in opened.parts}
            source = source_of(opened.parts)
            items, left_out = pool.items()
            self.suite = Suite(opened, items, left_out, identity, source)
            chosen = _chosen(self.name, options, items, left_out)
            here = {**opened.machine, "source": source}
            if journal:
                journal.begin({"backend": opened.name, "identity": {**identity, **opened.facts}}, here)
                ended = journal.ended()
                self.results = {one.id: ended[one.id] for one in chosen if one.id in ended}
            try:
                self._run(pool, chosen, journal)
                self.error = pool.too_short(self.results.values())
            finally:
                self.runs = journal.runs() if journal else [{**opened.machine, "items": len(self.results)}]
                self.suite = self._with_source(self.suite, journal)

    def verdict(self) -> Verdict:
        """Return the verdict on the results so far."""
        suite = self.suite or Suite.unopened(self.name)
        return judge(suite, list(self.results.values()), self.error, self.runs)

    def _run(self, pool: Pool, chosen: Sequence[Listed], journal: Journal | None) -> None:
        tiers, total, stage = {one.id: one.tier for one in chosen}, len(chosen), "start"

        def started(item: str) -> None:
            nonlocal stage
            stage = f"{tiers[item]} tier, {item.partition('[')[0]}" if item else stage
            self.progress.show(len(self.results), total, stage)

        for result in pool.run([one for one in chosen if one.id not in self.results], started):
            # A later run of the journal, with a larger limit, runs a late item again.
            if journal and result.item not in pool.late:
                journal.note(result.as_json())
            self.results[result.item] = result
            if self.options.stop_at_first and result.outcome is Outcome.FAILED:
                return

    def _with_source(self, suite: Suite, journal: Journal | None) -> Suite:
        """Return the suite with the source of the code, preferably one that a run of the journal proved to be clean."""
        now = {part.name: part.digest() for part in suite.opened.parts}
        if now != suite.identity:
            return suite.of_source({**suite.source, "tree": "changed during the run"})
        proved = journal.source() if journal and suite.source["tree"] != CLEAN else None
        return suite.of_source(proved or suite.source)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the processes end too and the command prints that there is no verdict."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # Only the main thread may set a signal handler.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
