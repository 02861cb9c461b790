"""pytest form of the suite: each item of a backend is a test of a vendor's own suite.

    from draftmark_contract.contract_tests import ContractTests

    class TestMyBackend(ContractTests):
        subject = "my_npu"                # or a backend of an engine: "vllm:my_package.attention.MyBackend"
        tier = "host"

Items run in a worker process, as with the commands. A failed item fails its test. An item that cannot run, or that the
backend refuses, is skipped with its reason. A declared or upcoming failure is an expected failure. The summary has the
verdict in one line. A session that ran only some items has no verdict and ends with exit code 2, unless `allow_part` is
set. This also holds with pytest-xdist if no process runs all items.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import pytest

from draftmark.errors import DraftmarkError

from .check import Tier
from .runner.judging import Suite, judge
from .runner.limits import LIMIT_S
from .runner.outcome import Outcome, Result
from .runner.pool import Pool
from .runner.selection import select
from .runner.stopped import WITHOUT_VERDICT, RunStopped
from .runner.subject import Listed, Opening
from .runner.verdict import Verdict

NOTHING_RAN = "{} has no verdict, because none of the items could run here"
SUMMARY = "draftmark-contract"
"""Name of the pytest plugin that prints the verdicts."""


class ContractTests:
    """Tests of one backend. A subclass sets the class attributes.

    Attributes:
        subject: name of a plugin's backend, or ``"engine:target"``.
        tier: highest tier to run, of a plugin: sizing, host or device.
        device: torch device; None for the backend's own.
        k: expression over item ids; "" for all.
        sample: maximum number of items per check; 0 for all.
        limit: seconds for one item.
        allow_part: let a session that runs only some items end with exit code 0; it still gives no verdict.
    """

    subject: ClassVar[str]
    tier: ClassVar[str] = "host"
    device: ClassVar[str | None] = None
    k: ClassVar[str] = ""
    sample: ClassVar[int] = 0
    limit: ClassVar[float] = LIMIT_S
    allow_part: ClassVar[bool] = False
    _session: ClassVar[Session | None] = None
    _has_a_part: ClassVar[bool] = False

    @classmethod
    def session(cls) -> Session:
        """Return the session of this class, which opens the backend at the first call."""
        if "_session" not in cls.__dict__ or cls._session is None:
            cls._session = Session(cls)
        return cls._session

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Create one test for each item."""
        type(self)._has_a_part = hasattr(metafunc.config, "workerinput")
        try:
            items = self.session().selected()
        except (DraftmarkError, RunStopped) as error:
            pytest.fail(f"{self.subject} has no verdict, because {error}", pytrace=False)
        _Verdicts.of(metafunc.config).add(type(self))
        metafunc.parametrize("item", items, ids=items)

    def test_contract(self, item: str) -> None:
        """The backend follows the rule that this item tests."""
        try:
            result = self.session().result(item)
        except RunStopped as stopped:
            pytest.exit(f"{self.subject} has no verdict, because {stopped}", returncode=WITHOUT_VERDICT)
        if result.outcome is Outcome.FAILED:
            pytest.fail(result.message, pytrace=False)
        if result.outcome in (Outcome.DECLARED, Outcome.UPCOMING):
            pytest.xfail(f"{result.outcome.value}: {result.message}")
        if result.outcome is not Outcome.PASSED:
            pytest.skip(f"{result.outcome.value}: {result.message}")

    @classmethod
    def teardown_class(cls) -> None:
        """End the worker process. The last test gets an error if no item could run.

        A process of pytest-xdist has only a part of the items, so there it gets none.
        """
        session = cls.session()
        session.end()
        if not any(one.ran for one in session.results) and not cls._has_a_part:
            pytest.fail(NOTHING_RAN.format(cls.subject), pytrace=False)


class Session:
    """Runs the items of one class in a worker process.

    Attributes:
        results: results so far.
        error: reason why the run could not go on, as a clause; "" if there is none.
    """

    def __init__(self, tests: type[ContractTests]) -> None:
        self._tests = tests
        self._pool = Pool(_opening(tests), tests.limit)
        self._items: dict[str, Listed] = {}
        self._suite = Suite.unopened(tests.subject)
        self.results: list[Result] = []
        self.error = ""

    def selected(self) -> list[str]:
        """Return the ids of the selected items; the first call opens the backend.

        Raises:
            DraftmarkError: it cannot be opened.
        """
        if not self._items:
            opened = self._pool.open()
            self._pool.ask_for_items()
            items, left_out = self._pool.items()
            self._suite = Suite(opened, items, left_out)
            tiers = Tier(self._tests.tier).includes if ":" not in self._tests.subject else tuple(Tier)
            self._items = {one.id: one for one in items if one.tier in tiers}
        return select(list(self._items), (), self._tests.k, self._tests.sample)

    def result(self, item: str) -> Result:
        """Run one item.

        Raises:
            RunStopped: the run cannot go on, for a reason that is not the backend's.
        """
        try:
            result = next(self._pool.run([self._items[item]]))
        except RunStopped as stopped:
            self.error = str(stopped)
            raise
        self.results.append(result)
        return result

    def verdict(self) -> Verdict:
        """Return the verdict on the results so far."""
        error = self.error or self._pool.too_short(self.results)
        return judge(self._suite, list({one.item: one for one in self.results}.values()), error)

    def end(self) -> None:
        """End the worker process."""
        self._pool.end()


class _Verdicts:
    """Pytest plugin of a session: prints the verdict of each class, and ends a run of some items with exit code 2."""

    def __init__(self) -> None:
        self._classes: dict[type[ContractTests], None] = {}

    @classmethod
    def of(cls, config: pytest.Config) -> _Verdicts:
        """Return the plugin of this session, which the first call registers."""
        found = config.pluginmanager.get_plugin(SUMMARY)
        if found is None:
            config.pluginmanager.register(found := cls(), SUMMARY)
        return found

    def add(self, tests: type[ContractTests]) -> None:
        """Judge this class at the end of the session."""
        self._classes[tests] = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None]:
        """End the session with the exit code of the worst verdict, if every test passed.

        A process of pytest-xdist has no terminal. The main process ends with the sentence that `shouldstop` has, and
        with exit code 2, after all tests.
        """
        if exitstatus == pytest.ExitCode.OK:
            codes = {verdict.exit_code(True, tests.allow_part): (tests, verdict) for tests, verdict in self._verdicts()}
            session.exitstatus = worst = max(codes, default=0)
            if worst == WITHOUT_VERDICT and hasattr(session.config, "workerinput"):
                session.shouldstop = _sentence(session, *codes[worst])
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdicts, each in one line."""
        for _, verdict in self._verdicts():
            terminalreporter.write_line(verdict.line)

    def _verdicts(self) -> list[tuple[type[ContractTests], Verdict]]:
        """Return the verdict of each class with an item that ran."""
        ran = [one for one in self._classes if one.session().results or one.session().error]
        return [(one, one.session().verdict()) for one in ran]


def _sentence(session: pytest.Session, tests: type[ContractTests], verdict: Verdict) -> str:
    """Return the reason why a process of pytest-xdist gives no verdict."""
    selected = sum(getattr(item, "cls", None) is tests for item in session.items)
    if verdict.error or len(verdict.results) == selected:
        return verdict.line
    processes = session.config.workerinput["workercount"]  # type: ignore[attr-defined]
    return (
        f"{tests.subject} has no verdict, because its items ran in {processes} processes of pytest-xdist; "
        "run its tests with -n 0"
    )


def _opening(tests: type[ContractTests]) -> Opening:
    if ":" not in tests.subject:
        from .runner.plugin import opening

        return opening(tests.subject, tests.tier, tests.device, (), tests.limit)
    from .judge.engines import find
    from .judge.layer import opening as opening_of_layer

    engine, info = find(tests.subject)
    return opening_of_layer(engine, info.name, tests.device or info.devices[0], tests.limit)
