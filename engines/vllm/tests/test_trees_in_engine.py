"""Tests of draft trees in a real vLLM on a CPU: texts equal texts without drafts, and more drafts are accepted.

Needs an environment of its own (`make engines`); skipped where vLLM is not installed.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from draftmark_engines import EngineError
from draftmark_vllm.trees.runner import with_trees
from engines.vllm.tests.engine_models import tiny
from engines.vllm.tests.engine_run import RunRequest, RunResult

WORKER = "draftmark_vllm.trees.cpu_worker.CpuTreeWorker"
LOOK_UP = {"method": "custom_class", "model": "draftmark_vllm.trees.look_up.LookUpTrees", "num_speculative_tokens": 7}
ORACLE = LOOK_UP | {"model": "engines.vllm.tests.oracle.SecondBranch"}


def test_gpu_worker_does_not_import_the_cpu_worker() -> None:
    """The GPU worker does not import vLLM's CPU worker, which puts placeholders into `torch.cuda`."""
    look = "import sys, draftmark_vllm.trees.worker; sys.exit('vllm.v1.worker.cpu_worker' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)


def trees(model: str, drafts: dict[str, Any] | None, page_size: int = 16, **more: Any) -> RunResult:
    """Run an engine with the worker for draft trees, and return its result."""
    arguments = {"block_size": page_size, "worker_cls": WORKER, "speculative_config": drafts}
    return RunRequest(model, "reference", arguments=arguments | more.pop("arguments", {}), **more).run()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny random model, and return its folder."""
    return tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def plain(model: str) -> RunResult:
    """Run vLLM's own attention and sampler without drafts, and return the result."""
    return RunRequest(model, arguments={"block_size": 32}).run()


def test_texts_with_ngram_trees_equal_plain_texts(model: str, plain: RunResult) -> None:
    """Greedy texts with n-gram trees equal texts without drafts. Steps mix trees, chunked prompts and decodes."""
    result = trees(model, LOOK_UP)
    assert result.tokens == plain.tokens
    assert result.accepted > 0


@pytest.mark.parametrize("page_size", [64, pytest.param(16, marks=pytest.mark.slow)])
def test_second_branch_is_accepted_and_its_kv_moves(model: str, plain: RunResult, page_size: int) -> None:
    """If each tree has a wrong first branch and a right second branch, most right drafts are accepted.

    Later tokens attend to the moved KV, so they show that it was moved correctly.
    """
    result = trees(model, ORACLE, page_size, environment={"DRAFTMARK_ORACLE": repr(plain.tokens)})
    assert result.tokens == plain.tokens
    assert result.accepted > 2 * result.rounds > 0, result


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8, "top_p": 0.9}, pytest.param({"temperature": 1.0, "top_k": 9}, marks=pytest.mark.slow)],
    ids=["top_p", "top_k"],
)
def test_sampled_texts_with_and_without_trees_are_equal(model: str, sampling: dict[str, Any]) -> None:
    """Sampled texts with and without trees are equal: a sample depends only on the request's seed and the position."""
    # Prompts are not chunked: vLLM resets a seeded generator after each chunk, which torch on a CPU cannot do.
    more = {"sampling": {**sampling, "seed": 5}, "arguments": {"max_num_batched_tokens": 512}}
    without = trees(model, None, **more)
    result = trees(model, ORACLE, environment={"DRAFTMARK_ORACLE": repr(without.tokens)}, **more)
    assert result.tokens == without.tokens
    assert result.accepted > 2 * result.rounds > 0, result


def test_requests_with_logprobs_use_vllms_sampler(model: str) -> None:
    """Requests for log-probabilities get no trees but vLLM's sampler, and their texts equal texts without trees."""
    result = trees(model, LOOK_UP, logprobs=True)
    assert result.tokens == RunRequest(model, logprobs=True, arguments={"block_size": 32}).run().tokens
    assert all(len(one) == len(tokens) for one, tokens in zip(result.ahead, result.tokens, strict=True))


@pytest.mark.smollm2
def test_combs_accept_more_than_chains(trained: tuple[str, str]) -> None:
    """With three draft steps of an EAGLE-3 head, a comb with two drafts per step accepts more tokens than a chain."""
    from transformers import AutoTokenizer

    model, head = trained
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["Copy: one two three four five six. Copy: one two three", "def fibonacci(n):\n    ", "Once upon a time"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    usual = {"block_size": 16, "async_scheduling": False}
    chain = RunRequest(model, "reference", prompts, arguments={**usual, "speculative_config": drafts}).run()
    wider = {**drafts, "num_speculative_tokens": 6}
    result = trees(model, wider, prompts=prompts, arguments={"async_scheduling": False})
    wanted = RunRequest(model, prompts=prompts, arguments={"block_size": 32}).run()
    assert result.tokens == wanted.tokens == chain.tokens
    assert result.accepted / result.rounds > chain.accepted / chain.rounds > 0


def test_drafts_by_other_methods_are_refused(model: str) -> None:
    """Draft methods that cannot draft trees are refused in one sentence before weights are loaded."""
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    with pytest.raises(RuntimeError, match="trees of drafts by draft_model are not served; use the method eagle3"):
        trees(model, drafts)


@pytest.mark.parametrize(
    ("runner", "sentence"),
    [
        ({}, "trees need vLLM's runner V1"),
        ({"use_async_scheduling": True}, "trees need the accepted drafts on the host before the next step"),
        ({"use_async_scheduling": False, "uses_mrope": True}, "the model has M-RoPE positions"),
    ],
)
def test_unsupported_runners_are_refused(runner: dict[str, bool], sentence: str) -> None:
    """vLLM's runner V2 and other unsupported runners are refused in one sentence. Runner V1 on a CPU is supported."""
    methods = {"_prepare_inputs": None, "propose_draft_token_ids": None} if runner else {}
    with pytest.raises(EngineError, match=sentence):
        with_trees(SimpleNamespace(**methods, **runner))
