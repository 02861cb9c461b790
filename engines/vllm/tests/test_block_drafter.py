"""Tests of a block drafter (DFlash) in a real vLLM on a CPU: its rows see one another, so its steps are not causal.

vLLM stores the target's features as context outside a forward (`do_kv_cache_update`), then runs one DRAFT_BLOCK step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from draftmark_vllm import step
from engines.vllm.tests.engine_models import dflash_head, tiny
from engines.vllm.tests.engine_run import RunRequest, RunResult

DRAFTS = 4


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that runs an engine with the drafter, and returns its result and all drafts.

    vLLM prepares the drafter's inputs with a Triton kernel, which Triton's interpreter runs here.
    """
    from vllm.v1.spec_decode.dflash import DFlashProposer

    propose = DFlashProposer.propose

    def recorded(self, *given, **arguments):
        found = propose(self, *given, **arguments)
        with (tmp_path / "drafts").open("a") as file:
            file.write(json.dumps(found.tolist()) + "\n")
        return found

    monkeypatch.setattr(DFlashProposer, "propose", recorded)

    def run(model: str, head: str, backend: str | None) -> tuple[RunResult, list[list[list[int]]]]:
        (tmp_path / "drafts").write_text("")
        config = {"method": "dflash", "model": head, "num_speculative_tokens": DRAFTS}
        if backend is not None:
            config["attention_backend"] = "CUSTOM"
        arguments = {"block_size": 32, "speculative_config": config}
        result = RunRequest(model, backend, arguments=arguments, environment={"TRITON_INTERPRET": "1"}).run()
        return result, [json.loads(line) for line in (tmp_path / "drafts").read_text().splitlines()]

    return run


def test_blocks_equal_those_of_vllms_own_attention(tmp_path: Path, drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, each block of drafts equals that of vLLM's own attention, and texts equal those without drafts.

    A control runs the same steps with causal attention: their drafts differ.
    """
    model = tiny(tmp_path)
    head = dflash_head(tmp_path, model)
    theirs, blocks = drafts(model, head, None)
    found, own = drafts(model, head, "reference")
    assert found.tokens == theirs.tokens == RunRequest(model, arguments={"block_size": 32}).run().tokens
    assert own == blocks and sum(map(len, own)) > 100
    assert found.accepted == theirs.accepted
    monkeypatch.setattr(step, "BLOCK", step.CAUSAL)
    _, causal = drafts(model, head, "reference")
    assert causal != blocks
