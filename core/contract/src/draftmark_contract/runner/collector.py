"""pytest plugin that collects a record per item in the process that writes the verdict (with xdist the controller)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from .outcome import Outcome
from .stopped import INTERRUPTED, WITHOUT_VERDICT, RunStopped, killed_from_outside

if TYPE_CHECKING:
    from .session import ContractSession
    from .verdict import Verdict

PROPERTY, STOPPED = "draftmark", "draftmark-stopped"
"""User properties of a test: its result as JSON; reason why the run cannot go on."""
CRASHED = "???"
"""Phase that pytest-xdist reports for an item that ended its worker."""
ENDS_S = 10.0
"""Seconds to wait for the exit code of a worker that has closed its connection."""


class Collector:
    """Collects one record per item, decides whether the run was complete, and writes the verdict.

    Attributes:
        records: result of each item as JSON; ``{"item": …, "died": text}`` for an item that ended its worker.
        stopped: reason why the run gives no verdict, as a clause; "" if there is no such reason.
        verdict: the verdict; None before the last item.
    """

    def __init__(self, config: pytest.Config, session: ContractSession) -> None:
        self._config, self._session = config, session
        self.records: dict[str, dict[str, Any]] = {}
        self.stopped = ""
        self.verdict: Verdict | None = None
        self._selected = 0
        self._shown = False
        # `draftmark contract` runs pytest with --tb=no, because the suite prints the failures itself.
        self._on_one_screen = config.getoption("tbstyle") == "no"

    def pytest_report_teststatus(self) -> tuple[str, str, str] | None:
        """Print nothing for an item if the suite itself prints the failures."""
        return ("contract", "", "") if self._on_one_screen else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the selected items. With xdist the workers collect them instead; see the next hook."""
        self._select(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Count the items that a worker of xdist has selected. All workers select the same items."""
        if not self._selected:
            self._select(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record the reason if the suite's module cannot be collected."""
        if report.failed and report.nodeid.endswith("test_contract.py"):
            self.stopped = self.stopped or f"the suite's items cannot be collected: {_last_line(report.longrepr)}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the record of an item, and the reason if the run cannot go on."""
        properties = dict(report.user_properties)
        if STOPPED in properties:
            self._stop(str(properties[STOPPED]))
        item = _item(report.nodeid)
        if report.when == "call" and PROPERTY in properties:
            row = json.loads(str(properties[PROPERTY]))
            self.records[row["item"]] = row
        elif item and report.failed and report.when == CRASHED:
            self.records.setdefault(item, {"item": item, "died": str(report.longrepr)})
        elif item and report.failed:
            self.stopped = self.stopped or f"{item} failed outside of its check: {_last_line(report.longrepr)}"
            if self._on_one_screen:
                self._stop(self.stopped)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Stop the run if the operating system, and not the backend, ended a worker of pytest-xdist."""
        if error and (reason := killed_from_outside(_exit_code(node), "")):
            self._stop(reason)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Record an internal error as the reason for no verdict. It is not a failure of the backend."""
        self.stopped = self.stopped or f"the suite raised an internal error: {_last_line(excrepr)}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Compute the verdict. After pytest's summary, write the files and set the exit code."""
        if self.records or self.stopped:
            self._conclude(session)
        yield
        if self.verdict is not None:
            self._end(session, self.verdict)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdict, and also the failures if pytest does not print them."""
        if self.verdict is None:
            return
        from .failures import failure_lines, verdict_lines

        self._shown = True
        terminalreporter.section("draftmark contract")
        if self._on_one_screen:
            for line in failure_lines(self.verdict):
                terminalreporter.write_line(line)
        first, *rest = verdict_lines(self.verdict)
        terminalreporter.write_line(first, green=self.verdict.conforms, red=bool(self.verdict.failures))
        for line in rest:
            terminalreporter.write_line(line)

    def _select(self, nodeids: Iterable[str]) -> None:
        """Record the number of selected items, and of those without a result, for the progress display."""
        items = [item for item in map(_item, nodeids) if item]
        self._selected = len(items)
        if items and self._session.journal:
            left = sum(item not in self._session.ended for item in items)
            try:
                self._session.journal.note({"selected": len(items), "left": left})
            except RunStopped as stopped:
                self._stop(str(stopped))

    def _stop(self, reason: str) -> NoReturn:
        self.stopped = reason
        raise pytest.Session.Interrupted(reason)

    def _conclude(self, session: pytest.Session) -> None:
        from .code_digest import remember
        from .session import conclude

        if parsed := self._config.getoption("attn_parsed"):
            remember(json.loads(Path(parsed).read_text(encoding="utf-8")))
        stopped = self.stopped or self._why_partial(session.exitstatus)
        self.verdict = conclude(self._session, self.records, stopped)
        if self._on_one_screen:  # The verdict prints the reason, so pytest must not print it again.
            terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
            terminal._report_keyboardinterrupt = lambda: None

    def _why_partial(self, status: int) -> str:
        """Return why not every selected item ran, as a clause; "" if all ran or -x ended the run at a failure."""
        failed = any("died" in row or row["outcome"] == Outcome.FAILED for row in self.records.values())
        if self._config.getoption("maxfail") and failed:
            return ""
        if status == pytest.ExitCode.INTERRUPTED:
            return INTERRUPTED
        left = self._selected - len(self.records)
        return f"the run ended before {left:,} of {self._selected:,} selected items ran" if left > 0 else ""

    def _end(self, session: pytest.Session, verdict: Verdict) -> None:
        from .outputs import write_outputs

        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        if not self._shown:  # After an internal error pytest prints no summary, so the verdict is printed here.
            self.pytest_terminal_summary(terminal)
        outputs = (self._config.getoption(f"attn_{kind}") for kind in ("json", "record", "html"))
        problems = write_outputs(verdict, *outputs)
        for problem in problems:
            terminal.write_line(problem)
        code = verdict.exit_code(self._config.getoption("attn_allow_known")) or (WITHOUT_VERDICT if problems else 0)
        if code == WITHOUT_VERDICT or session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = code
        if ended := self._config.getoption("attn_ended"):
            Path(ended).write_text(str(code), encoding="utf-8")


def _item(nodeid: str) -> str:
    """Return the item of a pytest node of the suite, or "". The path in front of it depends on pytest's root folder."""
    path, _, item = nodeid.partition("::test_contract[")
    return item.removesuffix("]") if path.endswith("test_contract.py") else ""


def _last_line(text: object) -> str:
    return str(text).strip().rpartition("\n")[2]


def _exit_code(node: Any) -> int | None:
    """Return the exit code of a worker of pytest-xdist, started by execnet; None if it is unknown."""
    try:
        code: int = node.gateway._io.popen.wait(ENDS_S)
    except (AttributeError, subprocess.TimeoutExpired):
        return None
    return code
