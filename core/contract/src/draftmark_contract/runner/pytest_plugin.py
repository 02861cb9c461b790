"""pytest plugin of the suite: adds the options, loads the backend, and writes the verdict at the end.

pytest loads this module in every environment with draftmark installed. The module therefore imports neither torch nor a
backend before an item of the suite is collected. All options begin with ``--attn-``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .session import ContractSession

_SESSION = pytest.StashKey["ContractSession"]()


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
    # `draftmark contract` passes the next three options to its child process.
    group.addoption("--attn-ended", metavar="FILE", help=argparse.SUPPRESS)
    group.addoption("--attn-parsed", metavar="FILE", help=argparse.SUPPRESS)
    group.addoption("--attn-parent", metavar="PID", type=int, help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    """Set the seed in the environment for the checks, and end with the parent process. Each worker does both."""
    parent = config.getoption("attn_parent")
    if parent is not None:
        from .parent import end_with_parent

        end_with_parent(None if hasattr(config, "workerinput") else parent)
    if config.getoption("attn_seed") is not None:
        from ..cases.histories import SEED

        os.environ[SEED] = str(config.getoption("attn_seed"))


def contract_session(config: pytest.Config) -> ContractSession:
    """Return the contract session of this process. The first item of the suite creates it."""
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
    """Register the collector of results in the process that writes the verdict (with xdist, the controller)."""
    if session.config.getoption("attn_backend") and not hasattr(session.config, "workerinput"):
        from .collector import Collector

        collector = Collector(session.config, contract_session(session.config))
        session.config.pluginmanager.register(collector, "draftmark-collector")


def _path(config: pytest.Config, option: str) -> Path | None:
    value = config.getoption(option)
    return Path(value).absolute() if value else None
