"""Tests of many model families: outputs equal vLLM's own attention, or the model is refused before it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from draftmark_vllm.versions import VLLM
from engines.vllm.tests.engine_run import RunRequest, RunResult
from engines.vllm.tests.families import REFUSED, SERVED
from engines.vllm.tests.sweep import NEW_TOKENS, SUFFIX, assert_alike, each

pytestmark = pytest.mark.usefixtures("stand_ins")

QUICK = {"gemma-3", "gemma-3n", "gpt-oss", "llama-4", "bloom", "hrm-text"}
"""Families with rare features: windows in 5 of 6 layers, shared KV, sinks, chunks; ALiBi, MLA, prefix-LM masks."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for the tiny models that the tests write."""
    return tmp_path_factory.mktemp("families")


def run_family(name: str, folder: Path, backend: str | None, arguments: dict[str, object]) -> RunResult:
    """Run a family's tiny model on `backend` and return its texts and log-probabilities."""
    model, needed = SERVED[name].write(folder, name), SERVED[name].arguments
    return RunRequest(model, backend, new_tokens=NEW_TOKENS, logprobs=True, arguments={**arguments, **needed}).run()


@each(SERVED, QUICK)
def test_family_results_equal_vllms_own(folder: Path, name: str) -> None:
    """In float32, a family's texts and log-probabilities equal vLLM's own attention, with drafts of varying length."""
    since = SERVED[name].since
    if since and VLLM.installed_before(since):
        pytest.skip(f"vLLM before {since} does not run this on a CPU itself")
    result = run_family(name, folder, "reference", {"block_size": 16, "speculative_config": SUFFIX})
    wanted = run_family(name, folder, None, {"block_size": 32})
    assert_alike(result, wanted)
    assert (result.drafted > 0) is ("speculative_config" not in SERVED[name].arguments)


@each(REFUSED, QUICK)
def test_a_family_is_refused_in_one_sentence(folder: Path, name: str) -> None:
    """A family that draftmark cannot serve is refused in one sentence. Its model has only a configuration."""
    family, sentence = REFUSED[name]
    arguments = {"block_size": 16, "max_num_batched_tokens": 256}
    with pytest.raises(RuntimeError) as caught:
        RunRequest(family.write(folder, name), "reference", arguments=arguments).run()
    assert sentence in str(caught.value), str(caught.value)
