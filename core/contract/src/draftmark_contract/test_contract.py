"""Runs every check on every case as pytest items: ``pytest --pyargs draftmark_contract --attn-backend=NAME``."""

from __future__ import annotations

import json

import pytest

from draftmark_contract.runner.collector import PROPERTY, STOPPED
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.runner.pytest_plugin import contract_session
from draftmark_contract.runner.stopped import RunStopped


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one pytest item for each check and case of the selected tiers."""
    items = contract_session(metafunc.config).collected
    metafunc.parametrize("attn_item", items, ids=items)


def test_contract(attn_item: str, request: pytest.FixtureRequest) -> None:
    """The backend follows the rule that this item tests."""
    session = contract_session(request.config)
    try:
        result = session.run(attn_item)
    except RunStopped as stopped:
        request.node.user_properties.append((STOPPED, str(stopped)))
        # This ends the pytest-xdist worker; the collector ends the whole run.
        request.session.shouldstop = str(stopped)
        pytest.skip(str(stopped))
    request.node.user_properties.append((PROPERTY, json.dumps(result.as_json())))
    if result.outcome is Outcome.FAILED:
        pytest.fail(session.failure_text(result), pytrace=False)
    if result.outcome is Outcome.UNJUDGED:
        pytest.skip(f"not judged: {result.message}")
    if result.outcome in (Outcome.DECLARED, Outcome.UPCOMING):
        pytest.xfail(f"{result.outcome.value}: {result.message}")
