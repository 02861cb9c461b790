"""The pytest side of the suite: options, the loaded backend, and the verdict at the end.

Registered for every pytest run in an environment that has draftmark, so it imports next to nothing: no torch, no
backend, before an item of the suite is collected. Its options begin with ``--attn-``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .session import ContractSession

PROPERTY = "draftmark"
_SESSION = pytest.StashKey["ContractSession"]()
_RESULTS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--attn-backend and what goes with it."""
    group = parser.getgroup("draftmark", "draftmark contract (pytest --pyargs draftmark_contract)")
    group.addoption("--attn-backend", metavar="NAME", help="the backend to judge; `draftmark list` shows them")
    group.addoption(
        "--attn-tier",
        metavar="TIER",
        choices=("sizing", "host", "device"),
        default="host",
        help="run the items up to this tier: sizing, host (default) or device",
    )
    group.addoption("--attn-device", metavar="DEVICE", help="torch device of the device tier, e.g. cuda:1")
    group.addoption(
        "--attn-sample", metavar="N", type=int, default=0, help="at most N cases of each check, evenly spread"
    )
    group.addoption("--attn-json", metavar="FILE", help="write the verdict as JSON")
    group.addoption("--attn-html", metavar="FILE", help="write the report as one HTML page")
    group.addoption(
        "--attn-journal", metavar="FILE", help="note each item as it starts and ends; skip those that ended"
    )


def pytest_configure(config: pytest.Config) -> None:
    """An empty list of results."""
    config.stash[_RESULTS] = {}


def contract_session(config: pytest.Config) -> ContractSession:
    """This process's contract session, made when the first item of the suite asks for it."""
    if _SESSION not in config.stash:
        from .session import ContractSession

        name = config.getoption("attn_backend")
        if not name:
            raise pytest.UsageError(
                "the contract needs a backend: pytest --pyargs draftmark_contract --attn-backend=NAME"
            )
        config.stash[_SESSION] = ContractSession(
            name,
            config.getoption("attn_tier"),
            config.getoption("attn_device"),
            _path(config, "attn_journal"),
            config.getoption("attn_sample"),
        )
    return config.stash[_SESSION]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the suite's module even where the project's own `python_files` would not."""
    if file_path != Path(__file__).with_name("test_contract.py"):
        return None
    patterns = parent.config.getini("python_files")
    if any(file_path.match(pattern) for pattern in patterns) or parent.session.isinitpath(file_path):
        return None
    module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
    return module


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect results in the process that writes the verdict (with xdist, the controller)."""
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Collector(session.config), "draftmark-collector")


class Collector:
    """Gathers one record per item and writes the verdict."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.records: dict[str, dict[str, Any]] = config.stash[_RESULTS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record that the item attached, or make one for an item whose process died."""
        for name, value in report.user_properties:
            if name == PROPERTY:
                row = json.loads(str(value))
                self.records[row["item"]] = row
        # The path before it depends on pytest's root; `conclude` knows the suite's items from others of that name.
        path, _, item = report.nodeid.partition("::test_contract[")
        if report.failed and item and path.endswith("test_contract.py"):
            self.records.setdefault(item[:-1], {"item": item[:-1], "died": str(report.longrepr)})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdict, and write the files that were asked for."""
        if not self.records or not self.config.getoption("attn_backend"):
            return
        from .session import conclude

        verdict = conclude(contract_session(self.config), self.records)
        json_path, html_path = _path(self.config, "attn_json"), _path(self.config, "attn_html")
        if json_path:
            verdict.write(json_path)
        if html_path:
            from .report.html import write_page

            write_page(verdict, html_path)
        terminalreporter.section("draftmark contract")
        terminalreporter.write_line(verdict.line, green=verdict.conforms, red=bool(verdict.failures))


def _path(config: pytest.Config, option: str) -> Path | None:
    value = config.getoption(option)
    return Path(value).absolute() if value else None
