"""pytest options that judge a backend of an engine without a line of code.

    pytest -p draftmark_contract.judge.pytest_target --judge-target vllm:my_package.attention.MyBackend -k graphs

A `conftest.py` at the root can load it: ``pytest_plugins = ["draftmark_contract.judge.pytest_target"]``. The tests are
those of `contract_tests.ContractTests`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..contract_tests import ContractTests


class TestTarget(ContractTests):
    """Tests of the backend that ``--judge-target`` names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--judge-…``."""
    group = parser.getgroup("draftmark judge", "judge an attention backend of vLLM or SGLang")
    group.addoption("--judge-target", metavar="ENGINE:TARGET", help="backend to judge, e.g. vllm:package.module.Class")
    group.addoption("--judge-device", metavar="DEVICE", help="torch device (default: the backend's first device)")
    group.addoption("--judge-sample", metavar="N", type=int, default=0, help="run at most N items of each rule")
    part = "let a session that runs only some items end with exit code 0; it still gives no verdict"
    group.addoption("--judge-allow-part", action="store_true", help=part)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the target's items after the session's own tests, before ``-k`` selects."""
    from draftmark.errors import DraftmarkError

    from .engines import find

    if not (named := config.getoption("judge_target")):
        return
    TestTarget.subject, TestTarget.device = named, config.getoption("judge_device")
    TestTarget.sample, TestTarget.allow_part = config.getoption("judge_sample"), config.getoption("judge_allow_part")
    try:
        find(named)
        TestTarget.session().selected()
    except DraftmarkError as error:
        raise pytest.UsageError(f"{named} has no verdict, because {error}") from error
    items += session.genitems(pytest.Module.from_parent(session, path=Path(__file__)))
