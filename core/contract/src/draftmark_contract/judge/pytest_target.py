"""pytest options that judge a backend of an engine without a line of code.

    pytest -p draftmark_contract.judge.pytest_target --judge-target vllm:my_package.attention.MyBackend -k graphs

A `conftest.py` at the root can load it: ``pytest_plugins = ["draftmark_contract.judge.pytest_target"]``. The tests are
those of `contract_tests.ContractTests`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..contract_tests import NOTHING_RAN, ContractTests


class TestTarget(ContractTests):
    """Tests of the backend that ``--judge-target`` names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--judge-…``."""
    group = parser.getgroup("draftmark judge", "judge an attention backend of vLLM or SGLang")
    group.addoption("--judge-target", metavar="ENGINE:TARGET", help="backend to judge, e.g. vllm:package.module.Class")
    group.addoption("--judge-device", metavar="DEVICE", help="torch device (default: the backend's first device)")
    group.addoption("--judge-sample", metavar="N", type=int, default=0, help="run at most N items of each rule")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the target's items after the session's own tests, before ``-k`` selects."""
    from draftmark.errors import DraftmarkError

    from .engines import find

    if not (named := config.getoption("judge_target")):
        return
    TestTarget.subject, TestTarget.device = named, config.getoption("judge_device")
    TestTarget.sample = config.getoption("judge_sample")
    try:
        find(named)
        TestTarget.session().selected()
    except DraftmarkError as error:
        raise pytest.UsageError(f"{named} has no verdict, because {error}") from error
    items += session.genitems(pytest.Module.from_parent(session, path=Path(__file__)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts of outcomes, which are never added up."""
    session = TestTarget._session
    if session is not None:
        terminalreporter.write_line(f"judge: {TestTarget.subject}: {session.counts(session.selected())}")
        if not any(one.ran for one in session.results):
            terminalreporter.write_line(NOTHING_RAN.format(TestTarget.subject))
