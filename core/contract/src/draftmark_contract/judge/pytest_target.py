"""pytest form of `draftmark judge`: each item of a backend is a test of a vendor's own suite.

    pytest -p draftmark_contract.judge.pytest_target --judge-target vllm:my_package.attention.MyBackend -k graphs

A `conftest.py` at the root can load it: ``pytest_plugins = ["draftmark_contract.judge.pytest_target"]``. The items
run in another process, as with the command. A wrong item fails. An item that cannot run, or that the engine refuses,
is skipped with its reason. A session in which no item could run fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .item import Outcome, Result
from .verdict import Verdict

_COLLECTOR = pytest.StashKey["JudgeCollector"]()
WITHOUT_VERDICT = "judge: no item could run, so the backend has no verdict"


class WrongItem(Exception):
    """A wrong item; the text is the judge's whole message."""


class JudgeItem(pytest.Item):
    """One item of the judge. The first item that runs starts the judge for all selected items."""

    parent: JudgeCollector

    def runtest(self) -> None:
        """Report the item's outcome."""
        result = self.parent.result_of(self)
        if result.outcome is Outcome.WRONG:
            raise WrongItem(result.message)
        if result.outcome is not Outcome.RIGHT:
            pytest.skip(f"{result.outcome.value}: {result.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the judge's message instead of a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, WrongItem) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return no line, because an item has no source line in the vendor's files."""
        return self.path, None, self.nodeid


class JudgeCollector(pytest.Collector):
    """Items of one target on one device."""

    def __init__(self, engine: Any, target: str, device: str, sample: int, **more: Any) -> None:
        super().__init__(**more)
        self._given = engine, target, device
        self._sample = sample
        self.verdict: Verdict | None = None

    def collect(self) -> Iterable[JudgeItem]:
        """List the target's items in a process of their own.

        Raises:
            pytest.UsageError: the target cannot be opened.
        """
        from .run import listed
        from .worker import RunRequest

        rows, error = listed(*self._given)
        if error:
            raise pytest.UsageError(f"{self.name} could not be judged: {error}")
        ids = [row["id"] for row in rows]
        for item in RunRequest("", "", "", "", "", sample=self._sample).chosen(ids):
            yield JudgeItem.from_parent(self, name=item)

    def result_of(self, item: JudgeItem) -> Result:
        """Return the result of an item; the first call runs all selected items of the session."""
        if self.verdict is None:
            from .run import judge

            chosen = [one.name for one in self.session.items if isinstance(one, JudgeItem)]
            first = self.config.getoption("maxfail") == 1
            self.verdict = judge(*self._given, items=chosen, stop_at_first=first)
        if self.verdict.stopped or self.verdict.error:
            pytest.exit(f"{self.name} has no verdict: {self.verdict.stopped or self.verdict.error}", returncode=2)
        return next(one for one in self.verdict.results if one.item == item.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--judge-…``."""
    group = parser.getgroup("draftmark judge", "judge an attention backend of vLLM or SGLang")
    group.addoption("--judge-target", metavar="ENGINE:TARGET", help="backend to judge, e.g. vllm:package.module.Class")
    group.addoption("--judge-device", metavar="DEVICE", help="torch device (default: the backend's first device)")
    group.addoption("--judge-sample", metavar="N", type=int, default=0, help="run at most N items of each rule")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the target's items after the session's own tests, before ``-k`` selects."""
    named = config.getoption("judge_target")
    if not named:
        return
    from draftmark.cli.errors import ArgumentError
    from draftmark.errors import DraftmarkError

    from .engines import find

    if hasattr(config, "workerinput") or config.getoption("numprocesses", None):
        raise pytest.UsageError("--judge-target runs its items in one process of its own; run pytest with -n 0")
    try:
        engine, info = find(named)
    except (ArgumentError, DraftmarkError) as error:
        raise pytest.UsageError(str(error)) from error
    device = config.getoption("judge_device") or info.devices[0]
    collector = JudgeCollector.from_parent(
        session,
        name=named,
        nodeid=named,
        engine=engine,
        target=info.name,
        device=device,
        sample=config.getoption("judge_sample"),
    )
    config.stash[_COLLECTOR] = collector
    items += collector.collect()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session in which items were selected but none could run."""
    verdict = _verdict(session.config)
    if verdict is not None and not verdict.ran and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts of outcomes, which are never added up."""
    verdict = _verdict(config)
    if verdict is None:
        return
    counts = ", ".join(f"{verdict.count(one)} {one.value}" for one in Outcome)
    terminalreporter.write_line(f"judge: {verdict.target}: {counts}")
    if not verdict.ran:
        terminalreporter.write_line(WITHOUT_VERDICT)


def _verdict(config: pytest.Config) -> Verdict | None:
    collector = config.stash.get(_COLLECTOR, None)
    return collector.verdict if collector is not None else None
