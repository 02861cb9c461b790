"""pytest plugin of the suite: options, the loaded backend, and the verdict at the end.

pytest loads it in every environment with draftmark installed. It therefore imports neither torch nor a backend before
an item of the suite is collected. Its options begin with ``--attn-``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .session import ContractSession
    from .verdict import Verdict

PROPERTY = "draftmark"
ITEMS_PER_DOT = 40
_SESSION = pytest.StashKey["ContractSession"]()
_RESULTS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--attn-…``."""
    group = parser.getgroup("draftmark", "draftmark contract (pytest --pyargs draftmark_contract)")
    group.addoption("--attn-backend", metavar="NAME", help="backend to judge; `draftmark list` shows all")
    group.addoption(
        "--attn-tier",
        metavar="TIER",
        choices=("sizing", "host", "device"),
        default="host",
        help="highest tier to run: sizing, host (default) or device",
    )
    group.addoption("--attn-device", metavar="DEVICE", help="torch device of the device tier, e.g. cuda:1")
    group.addoption(
        "--attn-sample", metavar="N", type=int, default=0, help="run at most N cases of each check, evenly spread"
    )
    group.addoption(
        "--attn-item", metavar="ID", action="append", default=[], help="run only this item; may be repeated"
    )
    group.addoption("--attn-seed", metavar="N", type=int, help="seed of the random histories (default: 0)")
    group.addoption("--attn-json", metavar="FILE", help="write the verdict with every item as JSON")
    group.addoption("--attn-record", metavar="FILE", help="write the short record, as repositories keep it")
    group.addoption("--attn-html", metavar="FILE", help="write the report as one HTML page")
    group.addoption(
        "--attn-allow-known", action="store_true", help="exit with 0 if all failures are declared in contract.toml"
    )
    group.addoption(
        "--attn-journal", metavar="FILE", help="record each item as it starts and ends; skip finished items"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create an empty list of results, and pass the seed to the checks by environment, also in each worker."""
    config.stash[_RESULTS] = {}
    if config.getoption("attn_seed") is not None:
        from ..cases.histories import SEED

        os.environ[SEED] = str(config.getoption("attn_seed"))


def contract_session(config: pytest.Config) -> ContractSession:
    """Return this process's contract session; the first item of the suite creates it."""
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
            config.getoption("attn_item"),
        )
    return config.stash[_SESSION]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the suite's module even if the project's `python_files` does not match it."""
    if file_path != Path(__file__).parents[1] / "test_contract.py":
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
    """Collects one record per item and writes the verdict."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.records: dict[str, dict[str, Any]] = config.stash[_RESULTS]
        self.verdict: Verdict | None = None
        self.on_one_screen = bool(config.getoption("attn_backend")) and config.getoption("tbstyle") == "no"
        self.failed = False

    def pytest_report_teststatus(self) -> tuple[str, str, str] | None:
        """Print nothing per item if the suite itself shows the failures."""
        return ("contract", "", "") if self.on_one_screen else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of an item; create one for an item that ended its process."""
        for name, value in report.user_properties:
            if name == PROPERTY:
                row = json.loads(str(value))
                self.records[row["item"]] = row
        # The path before the item id depends on pytest's root; `conclude` drops items of other files with this name.
        path, _, item = report.nodeid.partition("::test_contract[")
        if report.failed and item and path.endswith("test_contract.py"):
            self.records.setdefault(item[:-1], {"item": item[:-1], "died": str(report.longrepr)})
        self.failed = self.failed or report.failed
        if self.on_one_screen and report.when == "call" and len(self.records) % ITEMS_PER_DOT == 0:
            self._dot()

    def _dot(self) -> None:
        """Print one progress character per `ITEMS_PER_DOT` items."""
        terminal: Any = self.config.pluginmanager.getplugin("terminalreporter")
        terminal.write("F" if self.failed else ".", flush=True)
        self.failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compute the verdict, write the requested files, and set the exit code."""
        if not self.records or not self.config.getoption("attn_backend"):
            return
        from .outputs import write_outputs
        from .session import conclude

        self.verdict = verdict = conclude(contract_session(self.config), self.records)
        write_outputs(verdict, *(self.config.getoption(f"attn_{kind}") for kind in ("json", "record", "html")))
        code = verdict.exit_code(self.config.getoption("attn_allow_known"))
        if code and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdict, and the failures if pytest does not print them."""
        if self.verdict is None:
            return
        from .failures import failure_lines, verdict_lines

        terminalreporter.section("draftmark contract")
        if self.on_one_screen:
            for line in failure_lines(self.verdict):
                terminalreporter.write_line(line)
        first, *rest = verdict_lines(self.verdict)
        terminalreporter.write_line(first, green=self.verdict.conforms, red=bool(self.verdict.failures))
        for line in rest:
            terminalreporter.write_line(line)


def _path(config: pytest.Config, option: str) -> Path | None:
    value = config.getoption(option)
    return Path(value).absolute() if value else None
