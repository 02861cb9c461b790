"""Tests of MLA models in a real vLLM on a CPU: texts equal vLLM's own MLA attention (CPU_MLA) without drafts.

CPU_MLA is named because vLLM prefers AMX_MLA on CPUs with AMX, and AMX_MLA refuses float32. All runs use the native
form of vLLM's norms (custom_ops none). vLLM 0.32's kernel for CPUs reads the latents, which are a view of a projection,
as if they were contiguous, so its outputs depend on the other rows of a step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from draftmark_vllm.versions import VLLM
from engines.vllm.tests.engine_models import deepseek, tiny
from engines.vllm.tests.engine_run import SLOW_NEW_TOKENS, RunRequest, RunResult

pytestmark = pytest.mark.skipif(VLLM.installed_before("0.29"), reason="vLLM before 0.29 has no MLA prefills on a CPU")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
USUAL: dict[str, Any] = {"max_num_batched_tokens": 512, "compilation_config": {"custom_ops": ["none"]}}
TREES = "draftmark_vllm.trees.cpu_worker.CpuTreeWorker"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for the models that the tests write."""
    return tmp_path_factory.mktemp("latent")


@cache
def plain(model: str) -> RunResult:
    """Run CPU_MLA without drafts, and return its result."""
    return RunRequest(model, arguments={**USUAL, "attention_backend": "CPU_MLA"}).run()


def ours(model: str, page_size: int = 16, backend: str = "reference", **more: Any) -> RunResult:
    """Run vLLM with a draftmark backend, and return its result."""
    return RunRequest(model, backend, arguments={**USUAL, "block_size": page_size, **more}).run()


@pytest.mark.parametrize(
    ("drafts", "page_size"),
    [
        pytest.param(None, 16, id="plain-16"),
        pytest.param(NGRAM, 16, id="ngram-16"),
        pytest.param(NGRAM, 48, id="ngram-48"),
        pytest.param(MTP, 64, id="mtp-64"),
        pytest.param(MTP, 16, id="mtp-16", marks=pytest.mark.slow),
        pytest.param(None, 64, id="plain-64", marks=pytest.mark.slow),
    ],
)
def test_texts_equal_vllms_own(folder: Path, page_size: int, drafts: dict[str, object] | None) -> None:
    """In float32, texts equal those of vLLM's own MLA attention, without drafts and with n-gram or MTP drafts."""
    model = deepseek(folder)
    result = ours(model, page_size, speculative_config=drafts)
    assert result.tokens == plain(model).tokens
    assert (result.accepted > 0) is (drafts is not None), f"{result.accepted} of {result.drafted} drafts"


def test_draft_model_without_latent_attention(folder: Path) -> None:
    """An MLA target and a Llama that drafts for it are both served under CUSTOM, which names a class for each."""
    model, draft = deepseek(folder), tiny(folder)
    drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    result = ours(model, speculative_config=drafts)
    assert result.tokens == plain(model).tokens and result.drafted > 0


@pytest.mark.parametrize("page_size", [16, 48])
def test_trees_over_latent_rows(folder: Path, page_size: int) -> None:
    """If each tree has a wrong first branch and a right second branch, most right drafts are accepted.

    Later tokens attend to the moved rows, so equal texts show that rows were moved and rotated correctly.
    """
    model = deepseek(folder)
    wanted = plain(model).tokens
    drafts = {"method": "custom_class", "model": "engines.vllm.tests.oracle.SecondBranch", "num_speculative_tokens": 7}
    arguments = {**USUAL, "block_size": page_size, "worker_cls": TREES, "speculative_config": drafts}
    environment = {"DRAFTMARK_ORACLE": repr(wanted)}
    result = RunRequest(model, "reference", arguments=arguments, environment=environment).run()
    assert result.tokens == wanted
    assert result.accepted > 2 * result.rounds > 0, result


def test_triton_kernels_on_vllms_rows(folder: Path) -> None:
    """With cuda_triton in Triton's interpreter, and with drafts, texts equal those of vLLM's own MLA attention."""
    model = deepseek(folder)
    request = RunRequest(
        model,
        "cuda_triton",
        new_tokens=SLOW_NEW_TOKENS,
        environment={"TRITON_INTERPRET": "1"},
        arguments={**USUAL, "block_size": 16, "speculative_config": NGRAM},
    )
    assert request.run().tokens == [tokens[:SLOW_NEW_TOKENS] for tokens in plain(model).tokens]


def test_texts_without_the_debug_mode(folder: Path) -> None:
    """Without debug checks, texts equal those of vLLM's own attention. The backend then gets no host lengths."""
    model = deepseek(folder)
    arguments = {**USUAL, "block_size": 16, "speculative_config": NGRAM}
    result = RunRequest(model, "reference", settings={"debug": False}, arguments=arguments).run()
    assert result.tokens == plain(model).tokens and result.drafted > 0


def test_two_ranks_agree(folder: Path) -> None:
    """With two tensor-parallel ranks texts equal one rank's: each rank has half of the heads and all of the rows."""
    model = deepseek(folder)
    request = RunRequest(
        model,
        "reference",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        arguments={**USUAL, "tensor_parallel_size": 2, "speculative_config": NGRAM},
    )
    assert request.run().tokens == plain(model).tokens


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kv_cache_dtype": "fp8"}, "fp8 KV of MLA layers is not served; leave --kv-cache-dtype out"),
        ({"block_size": 24}, "block_size not supported"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder: Path, arguments: dict[str, object], sentence: str) -> None:
    """Options that MLA layers do not support are refused before weights are loaded, in one sentence."""
    with pytest.raises(RuntimeError) as caught:
        ours(deepseek(folder), **arguments)
    assert sentence in str(caught.value), str(caught.value)
