"""Tests of vLLM's options with draftmark's backend: outputs equal vLLM's own attention, or the option is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.vllm.tests.engine_run import RunRequest, token_prompts
from engines.vllm.tests.families import SERVED
from engines.vllm.tests.sweep import NEW_TOKENS, SUFFIX, assert_alike, each

pytestmark = pytest.mark.usefixtures("stand_ins")

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
MAX_LEN = 128


def shared_prompts() -> list[list[int]]:
    """Return prompts with a common prefix of several pages; one prompt is only a part of the prefix."""
    rng = random.Random(7)
    shared = [rng.randrange(3, 250) for _ in range(100)]
    return [shared + [rng.randrange(3, 250) for _ in range(n)] for n in (5, 9, 3, 17, 5)] + [shared[:64]]


def prompts_to_the_limit() -> list[list[int]]:
    """Return prompts of different lengths, up to nearly the context limit. Generation ends at the limit."""
    rng = random.Random(7)
    return [3 * [rng.randrange(3, 250)] + [rng.randrange(3, 250) for _ in range(n)] for n in (5, 40, 100, MAX_LEN - 4)]


@dataclass(frozen=True)
class Option:
    """Holds a vLLM option, and the arguments of the two engine runs that test it.

    Attributes:
        arguments: vLLM arguments for the engine with draftmark only. both: vLLM arguments for both engines.
        sampling: sampling parameters of both engines.
        drafts: speculative configuration of the engine with draftmark.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    prompts: Any = token_prompts
    family: str = "llama"
    drafts: dict[str, Any] | None = field(default_factory=lambda: SUFFIX)
    environment: dict[str, str] = field(default_factory=dict)


OPTIONS = {
    **{f"pages of {size}": Option({"block_size": size}) for size in (32, 48, 128)},
    "one request at a time": Option({"max_num_seqs": 1}),
    "the last token of the context": Option(
        both={"max_model_len": MAX_LEN}, sampling={"max_tokens": None}, prompts=prompts_to_the_limit
    ),
    "prefixes cached": Option({"enable_prefix_caching": True}, prompts=shared_prompts),
    "prefixes not cached": Option({"enable_prefix_caching": False}, prompts=shared_prompts),
    "pieces of 16 rows": Option({"max_num_batched_tokens": 16, "max_num_seqs": 2}),
    "asynchronous scheduling": Option({"async_scheduling": True}, drafts=None),
    "no asynchronous scheduling": Option({"async_scheduling": False}),
    "cascade attention": Option({"disable_cascade_attn": False}, prompts=shared_prompts),
    "log-probabilities of prompts": Option(sampling={"prompt_logprobs": 3}),
    "several texts of a prompt": Option(sampling={"n": 4, "temperature": 0.9, "top_k": 1}, drafts=None),
    "penalties": Option(sampling={"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    "biases": Option(sampling={"min_p": 0.1, "logit_bias": {5: 2.0}, "min_tokens": 8}, drafts=None),
    "one KV cache manager": Option({"disable_hybrid_kv_cache_manager": True}, family="gemma-2"),
    "tensor parallelism over one KV head": Option(
        {"tensor_parallel_size": 2}, family="heads-6-1-112", environment=TWO_RANKS
    ),
}
QUICK = {"the last token of the context", "prefixes cached", "pieces of 16 rows", "penalties", "one KV cache manager"}
REFUSED_KV = ("fp8_e5m2", "fp8_inc", "int8_per_token_head", "nvfp4")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for the models that the tests write."""
    return tmp_path_factory.mktemp("options")


@each(OPTIONS, QUICK)
def test_an_option_changes_no_text(folder: Path, name: str) -> None:
    """With each option, texts and log-probabilities equal vLLM's own attention without drafts."""
    option = OPTIONS[name]
    request = RunRequest(
        SERVED[option.family].write(folder, option.family),
        prompts=option.prompts(),
        new_tokens=NEW_TOKENS,
        logprobs=True,
        sampling=option.sampling,
        arguments={"block_size": 32, **option.both},
    )
    ours = {"block_size": 16, "speculative_config": option.drafts, **option.both, **option.arguments}
    wanted = request.run()
    result = replace(request, backend="reference", arguments=ours, environment=option.environment).run()
    assert_alike(result, wanted)
    assert (result.drafted > 0) is (option.drafts is not None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", REFUSED_KV)
def test_other_kinds_of_kv_are_refused(folder: Path, dtype: str) -> None:
    """vLLM's own predicate refuses other KV dtypes before weights are loaded."""
    model = SERVED["llama"].write(folder, "llama")
    with pytest.raises(RuntimeError, match="kv_cache_dtype not supported"):
        RunRequest(model, "reference", arguments={"block_size": 16, "kv_cache_dtype": dtype}).run()
