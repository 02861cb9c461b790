"""Tests of `benchmarks.sglang.state_check`: right layers pass in every mode, and a wrong slot is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hybrids import stand_in_for_a_gpu, tiny_qwen3_next
from scheduler import generate, in_a_fork

from benchmarks.sglang.state_check import LARGE, StateCheck

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20]
TREE = dict(
    speculative_algorithm="EAGLE",
    speculative_eagle_topk=4,
    speculative_num_steps=3,
    speculative_num_draft_tokens=10,
)


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Path:
    """Folder of a tiny Qwen3-Next with an MTP layer."""
    return in_a_fork(tiny_qwen3_next, folder / "checked")


def _checked(fault: Any = None, **arguments: Any) -> dict[tuple[str, str], float]:
    """Decode with the check, and return the largest error of each mode and stage."""
    stand_in_for_a_gpu()
    check = StateCheck()
    if fault is not None:
        fault()
    check.install()
    named = dict(attention_backend="draftmark", disable_radix_cache=True, page_size=16)
    generate(PROMPTS, 8, **named, **arguments, environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"})
    found: dict[tuple[str, str], float] = {}
    for row in check.rows():
        key = row["mode"], row["stage"]
        found[key] = max(found.get(key, 0.0), row["error"])
    return found


def _keep_first_row() -> None:
    """Let a commit keep only the root."""
    from draftmark_sglang.state_layers import StateLayers

    commit = StateLayers.commit
    StateLayers.commit = lambda states, lens, *rest: commit(states, lens.clamp(max=1), *rest)  # type: ignore[method-assign]


@pytest.mark.parametrize(("mode", "drafts"), [("DECODE", {}), ("VERIFY", TREE)], ids=["plain", "tree"])
def test_right_layers_pass(qwen: Path, mode: str, drafts: dict[str, Any]) -> None:
    """Prompts, decodes, verifications of trees and commits agree with float64 in every stage."""
    found = in_a_fork(_checked, model_path=str(qwen), **drafts)
    stages = {"lengths", "kept", "inputs", "output"} | ({"state"} if mode == "DECODE" else {"commit"})
    assert {stage for one, stage in found if one == mode} == stages
    assert ("EXTEND", "state") in found
    assert max(found.values()) < 1e-4, found


def test_a_commit_of_too_few_rows_is_found(qwen: Path) -> None:
    """A slot that misses accepted rows differs from float64 after the commit."""
    found = in_a_fork(_checked, _keep_first_row, model_path=str(qwen), **TREE)
    assert found["VERIFY", "commit"] > LARGE
    assert found["VERIFY", "output"] < 1e-4, "layers are right over the wrong slot"
