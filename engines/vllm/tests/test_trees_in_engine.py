"""Trees of drafts in a real vLLM on a CPU: texts equal to those without drafts, and more of each round accepted.

Needs an environment of its own (`make test-vllm`); skipped where vLLM is not installed.
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
from engines.vllm.tests.engine_run import Asked, Said

WORKER = "draftmark_vllm.trees.cpu_worker.CpuTreeWorker"
LOOK_UP = {"method": "custom_class", "model": "draftmark_vllm.trees.look_up.LookUpTrees", "num_speculative_tokens": 7}
ORACLE = LOOK_UP | {"model": "engines.vllm.tests.oracle.SecondBranch"}


def test_the_workers_of_a_gpu_leave_torch_cuda_as_it_is() -> None:
    """vLLM's CPU worker brings placeholders for streams and events of `torch.cuda`, so it must not come along."""
    look = "import sys, draftmark_vllm.trees.worker; sys.exit('vllm.v1.worker.cpu_worker' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)


def trees(model: str, drafts: dict[str, Any] | None, page_size: int = 16, **more: Any) -> Said:
    """What an engine whose worker serves trees says."""
    arguments = {"block_size": page_size, "worker_cls": WORKER, "speculative_config": drafts}
    return Asked(model, "reference", arguments=arguments | more.pop("arguments", {}), **more).run()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random one."""
    return tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def plain(model: str) -> Said:
    """What vLLM's own attention and sampler say without drafts."""
    return Asked(model, arguments={"block_size": 32}).run()


def test_texts_of_looked_up_trees_are_plain_ones(model: str, plain: Said) -> None:
    """Greedy, uneven trees beside prompts and decodes, in chunks."""
    said = trees(model, LOOK_UP)
    assert said.tokens == plain.tokens
    assert said.accepted > 0


@pytest.mark.parametrize("page_size", [64, pytest.param(16, marks=pytest.mark.slow)])
def test_a_second_branch_is_taken_and_its_kv_moves(model: str, plain: Said, page_size: int) -> None:
    """Drafts whose first branch is wrong and whose second is the text: most of it is accepted, and what follows is
    right too, which reads the KV that was moved."""
    said = trees(model, ORACLE, page_size, environment={"DRAFTMARK_ORACLE": repr(plain.tokens)})
    assert said.tokens == plain.tokens
    assert said.accepted > 2 * said.rounds > 0, said


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8, "top_p": 0.9}, pytest.param({"temperature": 1.0, "top_k": 9}, marks=pytest.mark.slow)],
    ids=["top_p", "top_k"],
)
def test_sampled_texts_with_trees_are_those_without(model: str, sampling: dict[str, Any]) -> None:
    """What is sampled at a position hangs on the request's seed and the position, whatever got there."""
    # In one piece: vLLM sets a seeded generator back after each chunk of a prompt, which torch's on a CPU cannot do.
    more = {"sampling": {**sampling, "seed": 5}, "arguments": {"max_num_batched_tokens": 512}}
    without = trees(model, None, **more)
    said = trees(model, ORACLE, environment={"DRAFTMARK_ORACLE": repr(without.tokens)}, **more)
    assert said.tokens == without.tokens
    assert said.accepted > 2 * said.rounds > 0, said


def test_requests_with_logprobs_have_vllms_own_sampler(model: str) -> None:
    """They get their log-probabilities, and the texts are the same."""
    said = trees(model, LOOK_UP, logprobs=True)
    assert said.tokens == Asked(model, logprobs=True, arguments={"block_size": 32}).run().tokens
    assert all(len(one) == len(tokens) for one, tokens in zip(said.ahead, said.tokens, strict=True))


@pytest.mark.smollm2
def test_combs_of_our_trained_head_are_plain_texts_and_longer_than_its_chains(trained: tuple[str, str]) -> None:
    """EAGLE-3 with the head of this repository: three draft steps as a chain, and as a comb of two a step."""
    from transformers import AutoTokenizer

    model, head = trained
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["Copy: one two three four five six. Copy: one two three", "def fibonacci(n):\n    ", "Once upon a time"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    usual = {"block_size": 16, "async_scheduling": False}
    chain = Asked(model, "reference", prompts, arguments={**usual, "speculative_config": drafts}).run()
    wider = {**drafts, "num_speculative_tokens": 6}
    said = trees(model, wider, prompts=prompts, arguments={"async_scheduling": False})
    wanted = Asked(model, prompts=prompts, arguments={"block_size": 32}).run()
    assert said.tokens == wanted.tokens == chain.tokens
    assert said.accepted / said.rounds > chain.accepted / chain.rounds > 0


def test_drafts_by_other_methods_are_refused(model: str) -> None:
    """In one sentence, before weights are loaded."""
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    with pytest.raises(RuntimeError, match="trees of drafts by draft_model are not served; use the method eagle3"):
        trees(model, drafts)


@pytest.mark.parametrize(
    ("runner", "sentence"),
    [
        ({}, "trees need vLLM's runner V1"),
        ({"use_async_scheduling": True}, "trees need to know on the host what was accepted"),
        ({"use_async_scheduling": False, "uses_mrope": True}, "the model has M-RoPE positions"),
    ],
)
def test_runners_that_do_not_go_with_trees_are_refused(runner: dict[str, bool], sentence: str) -> None:
    """What this CPU's vLLM never is, in one sentence."""
    methods = {"_prepare_inputs": None, "propose_draft_token_ids": None} if runner else {}
    with pytest.raises(EngineError, match=sentence):
        with_trees(SimpleNamespace(**methods, **runner))
