"""The command `draftmark doctor`: a broken plugin is one row of the table and does not stop the command."""

from __future__ import annotations

import importlib.metadata as md
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


@pytest.mark.long
def test_the_other_backends_are_tested_too(
    draftmark: Run, distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another backend crashes, `doctor` still reports the reference as ready, and exits 1."""
    distribution("crashes", source=BROKEN["crashes"][0])
    # Only two backends are listed, because doctor starts a slow process per backend.
    two = [row for row in registry.available() if row.name in ("crashes", "reference")]
    monkeypatch.setattr(registry, "available", lambda: two)
    done = draftmark("doctor", "--json")
    verdicts = {row["backend"]: row["verdict"] for row in done.json["backends"]}
    assert (verdicts["crashes"], verdicts["reference"], done.code) == ("broken", "ready", 1)


@pytest.mark.long
def test_an_absent_runtime_has_its_remedy(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """`doctor` reports a backend as absent, not broken, when its vendor package is not installed."""
    distribution("vendor", host_kernels=False, runtime=("vendor_that_is_not_there",))
    done = draftmark("doctor", "vendor", "--json")
    (row,) = done.json["backends"]
    assert (done.code, row["verdict"], row["runtime"]) == (1, "absent", {"vendor_that_is_not_there": None})
    assert "install vendor_that_is_not_there" in row["reasons"][0]


def test_a_broken_torch_is_named(run_python: Run, broken_torch: Path) -> None:
    """When `import torch` raises, each row has the error and the remedy; the command does not import torch."""
    code = "from draftmark_tools.cli import main; raise SystemExit(main(['doctor', 'reference']))"
    done = run_python(code, broken_torch)
    assert (done.returncode, done.err) == (1, "")
    assert "torch cannot be imported (RuntimeError: libascend_hal.so" in done.out
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.out


def test_an_unknown_backend_is_a_row(draftmark: Run) -> None:
    """An unregistered name becomes a row with a remedy."""
    done = draftmark("doctor", "atlantis")
    assert done.code == 1
    assert "install the package that provides this one" in done.out and "pip install" not in done.out


def test_an_empty_name_is_a_wrong_argument(draftmark: Run) -> None:
    """An empty name is an error and does not mean all backends."""
    done = draftmark("doctor", "")
    assert done.code == 2 and done.err.startswith("draftmark doctor: NAME is empty; ")


def test_the_timeout_must_be_positive(draftmark: Run) -> None:
    """A timeout of 0 is a wrong argument."""
    done = draftmark("doctor", "--timeout", 0)
    assert (done.code, done.err) == (2, "draftmark doctor: --timeout is 0, but it must be > 0; give seconds\n")


ADAPTER = """class Range:
    engine, distributions, oldest, below = "Ship", ("draftmark-anchor", "ship"), "0.9", "2"
    def reason_against(self, version):
        return None if version == "1.0" else f"Ship {version} is not served"
RANGE = Range()
"""


@pytest.fixture
def only_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """List one backend only, because doctor starts a slow process per backend."""
    one = [row for row in registry.available() if row.name == "reference"]
    monkeypatch.setattr(registry, "available", lambda: one)


@pytest.mark.long
@pytest.mark.usefixtures("only_reference")
def test_adapters_are_rows(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """Each adapter has a row with the engine's release and the tested releases; NAME prints backends only."""
    entries = "[draftmark.engines]\nship = throwaway_draftmark_anchor:RANGE\n"
    distribution("anchor", source=ADAPTER, entries=entries)
    done = draftmark("doctor")
    row = next(line for line in done.out.splitlines() if line.startswith("ship "))
    assert row.split("  ")[0] == "ship" and ">=0.9,<2" in row and "draftmark-anchor 1.0" in row
    assert any(line.startswith("vllm ") for line in done.out.splitlines())
    rows = {one["name"]: one for one in draftmark("doctor", "--json").json["adapters"]}
    assert rows["ship"]["tested"] == ">=0.9,<2" and rows["ship"]["note"] == ""
    assert {"vllm", "sglang"} <= set(rows)
    assert draftmark("doctor", "reference", "--json").json["adapters"] == []


@pytest.mark.long
@pytest.mark.usefixtures("only_reference")
def test_a_broken_adapter_is_a_note(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """An adapter that raises during import gets a note; only the backends determine the exit code."""
    entries = "[draftmark.engines]\nwreck = throwaway_draftmark_wreck:RANGE\n"
    distribution("wreck", source="raise RuntimeError('\\x1b[31mleak\\x07')", entries=entries)
    done = draftmark("doctor")
    assert "wreck: throwaway_draftmark_wreck:RANGE raised RuntimeError: leak; reinstall it" in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("name", "installed", "note"),
    [("draftmark-vllm", {"vllm": "0.20.0"}, "vLLM 0.20.0 is not served"), ("draftmark-vllm", {}, "is not installed")],
)
def test_untested_and_absent_engines_have_a_note(monkeypatch: pytest.MonkeyPatch, name, installed, note) -> None:
    """An engine's release outside the tested range, or an absent engine, is named in the adapter's note."""
    pytest.importorskip("draftmark_vllm.versions")
    from draftmark_tools.cli import adapters

    entry = md.EntryPoint("vllm", "draftmark_vllm.versions:VLLM", adapters.GROUP)

    def version(one: str) -> str:
        if one in installed:
            return installed[one]
        raise md.PackageNotFoundError(one)

    monkeypatch.setattr(adapters.md, "version", version)
    assert note in adapters._row("vllm", entry).note
    absent = adapters._row("vllm", None).note
    assert (f"install {name}" in absent) is bool(installed)
