"""pytest form of the suite: each item of a backend is a test of a vendor's own suite.

    from draftmark_contract.contract_tests import ContractTests

    class TestMyBackend(ContractTests):
        subject = "my_npu"                # or a backend of an engine: "vllm:my_package.attention.MyBackend"
        tier = "host"

Items run in a worker process, as with the commands. A failed item fails its test. An item that cannot run, or that the
backend refuses, is skipped with its reason. A declared or upcoming failure is an expected failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from draftmark.errors import DraftmarkError

from .check import Tier
from .runner.limits import LIMIT_S
from .runner.outcome import Counts, Outcome, Result
from .runner.pool import Pool
from .runner.selection import select
from .runner.stopped import WITHOUT_VERDICT, RunStopped
from .runner.subject import Listed, Opening

NOTHING_RAN = "{} has no verdict, because none of the items could run here"


class ContractTests:
    """Tests of one backend. A subclass sets the class attributes.

    Attributes:
        subject: name of a plugin's backend, or ``"engine:target"``.
        tier: highest tier to run, of a plugin: sizing, host or device.
        device: torch device; None for the backend's own.
        k: expression over item ids; "" for all.
        sample: maximum number of items per check; 0 for all.
        limit: seconds for one item.
    """

    subject: ClassVar[str]
    tier: ClassVar[str] = "host"
    device: ClassVar[str | None] = None
    k: ClassVar[str] = ""
    sample: ClassVar[int] = 0
    limit: ClassVar[float] = LIMIT_S
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
    """

    def __init__(self, tests: type[ContractTests]) -> None:
        self._tests = tests
        self._pool = Pool(_opening(tests), tests.limit)
        self._items: dict[str, Listed] = {}
        self.results: list[Result] = []

    def selected(self) -> list[str]:
        """Return the ids of the selected items; the first call opens the backend.

        Raises:
            DraftmarkError: it cannot be opened.
        """
        if not self._items:
            self._pool.open()
            self._pool.ask_for_items()
            tiers = Tier(self._tests.tier).includes if ":" not in self._tests.subject else tuple(Tier)
            self._items = {one.id: one for one in self._pool.items()[0] if one.tier in tiers}
        return select(list(self._items), (), self._tests.k, self._tests.sample)

    def result(self, item: str) -> Result:
        """Run one item.

        Raises:
            RunStopped: the run cannot go on, for a reason that is not the backend's.
        """
        result = next(self._pool.run([self._items[item]]))
        self.results.append(result)
        return result

    def counts(self, selected: Sequence[str]) -> Counts:
        """Return the counts of outcomes."""
        return Counts.of(self.results, len(selected))

    def end(self) -> None:
        """End the worker process."""
        self._pool.end()


def _opening(tests: type[ContractTests]) -> Opening:
    if ":" not in tests.subject:
        from .runner.plugin import opening

        return opening(tests.subject, tests.tier, tests.device, (), tests.limit)
    from .judge.engines import find
    from .judge.layer import opening as opening_of_layer

    engine, info = find(tests.subject)
    return opening_of_layer(engine, info.name, tests.device or info.devices[0], tests.limit)
