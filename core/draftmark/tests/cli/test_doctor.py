"""The command `draftmark doctor`: a broken plugin is one row of the table and does not stop the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark import registry

Run = Callable[..., Any]

BROKEN = {
    "raises": ("raise ImportError('libvendor.so is missing')", "libvendor.so is missing"),
    "exits": ("import sys; sys.exit('no licence')", "raised SystemExit: no licence"),
    "dies": ("import os, sys; print('fatal', file=sys.stderr, flush=True); os._exit(3)", "exit code 3, last line"),
    "leaves": ("import os; os._exit(0)", "exit code 0"),
    "crashes": ("import os; os.abort()", "SIGABRT"),
    "hangs": ("import threading; threading.Event().wait()", "took longer than"),
}


def test_reference_is_ready(draftmark: Run) -> None:
    """The reference backend opens a sample geometry, and the report contains its versions."""
    done = draftmark("doctor", "reference", "--json")
    (row,) = done.json["backends"]
    assert (done.code, row["verdict"], row["reasons"], row["device"]) == (0, "ready", [], "cpu")
    # The version in the metadata of PyPI's build has no CUDA suffix, unlike torch.__version__.
    assert row["torch"].partition("+")[0] == done.json["torch"].partition("+")[0] != ""


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_a_row_with_its_cause(draftmark: Run, distribution: Callable[..., Path], kind: str) -> None:
    """A plugin that fails during import, in any way, becomes a row with its cause; the exit code is 1."""
    source, cause = BROKEN[kind]
    distribution(kind, source=source)
    done = draftmark("doctor", kind, "--timeout", 3 if kind == "hangs" else 60)
    assert done.code == 1
    assert f"{kind} broken: " in done.out
    assert cause in done.out


def test_the_other_backends_are_tested_too(
    draftmark: Run, distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of another backend the reference is still ready; the exit code is 1."""
    distribution("crashes", source=BROKEN["crashes"][0])
    two = [row for row in registry.available() if row.name in ("crashes", "reference")]  # one slow process per backend
    monkeypatch.setattr(registry, "available", lambda: two)
    done = draftmark("doctor", "--json")
    verdicts = {row["backend"]: row["verdict"] for row in done.json["backends"]}
    assert (verdicts["crashes"], verdicts["reference"], done.code) == ("broken", "ready", 1)


def test_an_absent_runtime_has_its_remedy(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A backend with a vendor package that is not installed is absent, not broken."""
    distribution("vendor", host_kernels=False, runtime=("vendor_that_is_not_there",))
    done = draftmark("doctor", "vendor", "--json")
    (row,) = done.json["backends"]
    assert (done.code, row["verdict"], row["runtime"]) == (1, "absent", {"vendor_that_is_not_there": None})
    assert "install vendor_that_is_not_there" in row["reasons"][0]


def test_a_broken_torch_is_named(run_python: Run, broken_torch: Path) -> None:
    """When `import torch` raises, each row has the error and the remedy; the command does not import torch."""
    done = run_python("from draftmark.cli import main; raise SystemExit(main(['doctor', 'reference']))", broken_torch)
    assert (done.returncode, done.err) == (1, "")
    assert "torch cannot be imported (RuntimeError: libascend_hal.so" in done.out
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.out


def test_an_unknown_backend_is_a_row(draftmark: Run) -> None:
    """An unregistered name becomes a row with a remedy."""
    done = draftmark("doctor", "atlantis")
    assert done.code == 1
    assert "pip install its package, e.g. draftmark-atlantis" in done.out


def test_an_empty_name_is_a_wrong_argument(draftmark: Run) -> None:
    """An empty name is an error and does not mean all backends."""
    done = draftmark("doctor", "")
    assert done.code == 2 and done.err.startswith("draftmark doctor: NAME is empty; ")


def test_the_timeout_must_be_positive(draftmark: Run) -> None:
    """A timeout of 0 is a wrong argument."""
    done = draftmark("doctor", "--timeout", 0)
    assert (done.code, done.err) == (2, "draftmark doctor: --timeout is 0, but it must be > 0; give seconds\n")
