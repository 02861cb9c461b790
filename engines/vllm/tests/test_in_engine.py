"""Tests of draftmark's backends in a real vLLM on a CPU: generated texts equal vLLM's own attention without drafts.

Needs an environment of its own (`make engines`); skipped where vLLM is not installed. Every engine runs in debug mode:
each batch is validated, and vLLM's KV slots are compared with the slots that draftmark derives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from draftmark import Form
from draftmark_reference import ReferencePlugin
from draftmark_vllm.versions import VLLM
from engines.vllm.tests.engine_models import eagle_head, gemma4_assistant, tiny
from engines.vllm.tests.engine_run import SLOW_NEW_TOKENS, RunRequest, RunResult
from engines.vllm.tests.families import SERVED

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GEMMA = {"sliding_window": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}
NEAR = 0.02
"""Log-probabilities in bfloat16 may differ by this much."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder for the models that the tests write."""
    return tmp_path_factory.mktemp("models")


@cache
def plain(model: str, dtype: str = "float32", logprobs: bool = False) -> RunResult:
    """Run vLLM's own attention without drafts, and return its result."""
    return RunRequest(model, logprobs=logprobs, arguments={"block_size": 32, "dtype": dtype}).run()


def ours(model: str, page_size: int, backend: str = "reference", **more) -> RunResult:
    """Run vLLM with a draftmark backend, and return its result."""
    return RunRequest(model, backend, arguments={"block_size": page_size, **more}).run()


@pytest.mark.parametrize(
    ("drafts", "page_size"),
    [
        pytest.param(None, 64, id="plain-64"),
        pytest.param(NGRAM, 16, id="ngram-16"),
        pytest.param(None, 16, id="plain-16", marks=pytest.mark.slow),
        pytest.param(NGRAM, 64, id="ngram-64", marks=pytest.mark.slow),
    ],
)
def test_texts_equal_vllms_own(folder: Path, page_size: int, drafts: dict[str, object] | None) -> None:
    """In float32, texts equal those of vLLM's own attention if steps mix chunked prompts, decodes and verifies."""
    result = ours(tiny(folder), page_size, speculative_config=drafts)
    assert result.tokens == plain(tiny(folder)).tokens
    assert (result.accepted > 0) is (drafts is not None)


def test_whole_prompts_in_one_step(folder: Path) -> None:
    """Texts equal those of vLLM's own attention if a step contains whole prompts and prefixes are not cached."""
    result = ours(tiny(folder), 16, max_num_batched_tokens=512, enable_prefix_caching=False, speculative_config=NGRAM)
    assert result.tokens == plain(tiny(folder)).tokens


def test_texts_without_the_debug_mode(folder: Path) -> None:
    """Without debug checks, texts equal those of vLLM's own attention. The backend then gets no host lengths."""
    arguments = {"block_size": 16, "max_num_batched_tokens": 64, "speculative_config": NGRAM}
    result = RunRequest(tiny(folder), "reference", settings={"debug": False}, arguments=arguments).run()
    assert result.tokens == plain(tiny(folder)).tokens and result.drafted > 0


@pytest.mark.parametrize(("forms", "drafts"), [((), None), ((Form.ENGINE_SLOTS,), NGRAM)], ids=["none", "slots"])
def test_backend_with_few_engine_forms(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forms: tuple[Form, ...], drafts: dict[str, object] | None
) -> None:
    """Texts equal those of vLLM's own attention if the backend accepts no vLLM input format, or only ENGINE_SLOTS.

    vLLM then keeps K and V separate. The page table has draftmark's width, and without ENGINE_SLOTS the backend derives
    slots.
    """
    monkeypatch.setattr(ReferencePlugin, "info", replace(ReferencePlugin.info, forms=forms))
    result = ours(tiny(folder), 16, speculative_config=drafts)
    assert result.tokens == plain(tiny(folder)).tokens
    assert (result.accepted > 0) is (drafts is not None)


def test_preempted_requests_resume(folder: Path) -> None:
    """If vLLM runs out of pages, preempts requests and prefills them again, texts equal those of its own attention."""
    result = ours(tiny(folder), 16, num_gpu_blocks_override=24, speculative_config=NGRAM)
    assert result.tokens == plain(tiny(folder)).tokens


def test_a_draft_model_decodes_in_our_pages(folder: Path) -> None:
    """A smaller draft model, with another number of KV heads, drafts on draftmark's backend too."""
    draft = tiny(folder, num_hidden_layers=1, num_key_value_heads=1)
    result = ours(
        tiny(folder),
        16,
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 3,
            "attention_backend": "CUSTOM",
        },
    )
    assert result.tokens == plain(tiny(folder)).tokens and result.drafted > 0


def test_draft_model_with_layers_of_two_shapes(folder: Path) -> None:
    """A Gemma 2 drafts for itself: its KV group has layers of two shapes, and vLLM adds draft layers to the builder."""
    model = tiny(folder, "gemma2", **GEMMA)
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    result = ours(model, 16, speculative_config=drafts, disable_hybrid_kv_cache_manager=True)
    assert result.tokens == plain(model).tokens and result.accepted > 0


@pytest.mark.skipif(VLLM.installed_before("0.28"), reason="vLLM before 0.28 does not read this Gemma 4's configuration")
def test_assistant_reads_its_targets_kv(folder: Path) -> None:
    """Gemma 4's draft (MTP) layers read the target's KV: vLLM links them to another layer's KV after their creation."""
    model = SERVED["gemma-4"].write(folder, "gemma-4")
    drafts = {"method": "mtp", "model": gemma4_assistant(folder, model), "num_speculative_tokens": 3}
    result = ours(model, 16, speculative_config=drafts)
    assert result.tokens == plain(model).tokens and result.drafted > 0


@pytest.mark.usefixtures("stand_ins")
def test_suffix_decoding_drafts_vary_in_number(folder: Path) -> None:
    """With vLLM's suffix decoding, requests differ in their number of drafts, and texts equal those without drafts."""
    result = ours(tiny(folder), 16, speculative_config={"method": "suffix", "num_speculative_tokens": 4})
    assert result.tokens == plain(tiny(folder)).tokens and result.accepted > 0
    assert result.drafted < 4 * result.rounds, "each round had the same number of drafts"


def test_an_eagle_head_drafts_in_our_pages(folder: Path) -> None:
    """With a random EAGLE-1 head, texts equal those without drafts, although nearly all drafts are rejected."""
    head = eagle_head(folder, tiny(folder))
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    result = ours(tiny(folder), 16, speculative_config=drafts)
    assert result.tokens == plain(tiny(folder)).tokens and result.drafted > 0


def test_sliding_window(folder: Path) -> None:
    """A Mistral with a sliding window shorter than its texts generates the texts of vLLM's own attention."""
    model = tiny(folder, "mistral", sliding_window=32)
    assert ours(model, 16, speculative_config=NGRAM).tokens == plain(model).tokens


def test_layers_of_two_shapes_with_soft_caps(folder: Path) -> None:
    """A Gemma 2 (a window in every other layer, soft caps in each) generates the texts of vLLM's own attention."""
    model = tiny(folder, "gemma2", **GEMMA)
    assert ours(model, 16, speculative_config=NGRAM).tokens == plain(model).tokens


@pytest.mark.parametrize(
    ("drafts", "page_size", "chunk"),
    [
        pytest.param(NGRAM, 16, 64, id="ngram-16-chunked"),
        pytest.param(NGRAM, 64, 512, id="ngram-64-whole", marks=pytest.mark.slow),
        pytest.param(None, 64, 64, id="plain-64-chunked", marks=pytest.mark.slow),
        pytest.param(None, 16, 512, id="plain-16-whole", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_agree(folder: Path, drafts: dict[str, object] | None, page_size: int, chunk: int) -> None:
    """With two tensor-parallel ranks texts equal one rank's, and the ranks have equal metadata in every step."""
    request = RunRequest(
        tiny(folder),
        "reference",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        arguments={
            "block_size": page_size,
            "tensor_parallel_size": 2,
            "speculative_config": drafts,
            "max_num_batched_tokens": chunk,
        },
    )
    assert request.run().tokens == plain(tiny(folder)).tokens


def test_triton_kernels_on_vllms_pages(folder: Path) -> None:
    """With cuda_triton in Triton's interpreter, and with drafts, texts equal those of vLLM's own attention."""
    model = tiny(folder)
    request = RunRequest(
        model,
        "cuda_triton",
        new_tokens=SLOW_NEW_TOKENS,
        environment={"TRITON_INTERPRET": "1"},
        arguments={"block_size": 16, "speculative_config": NGRAM},
    )
    wanted = [tokens[:SLOW_NEW_TOKENS] for tokens in plain(model).tokens]
    assert request.run().tokens == wanted


def test_fp8_pages_in_the_engine(folder: Path) -> None:
    """With e4m3 KV in cuda_triton, texts differ from vLLM's own only at near ties of two tokens' probabilities."""
    model = tiny(folder)
    wanted = plain(model, logprobs=True)
    result = RunRequest(
        model,
        "cuda_triton",
        new_tokens=SLOW_NEW_TOKENS,
        environment={"TRITON_INTERPRET": "1"},
        arguments={"block_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    ).run()
    for one, other, ahead in zip(result.tokens, wanted.tokens, wanted.ahead, strict=True):
        parts = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert parts is None or ahead[parts] < NEAR, f"at {parts}: {one} instead of {other}, ahead {ahead[parts]}"


def test_bfloat16_differs_only_at_near_ties(folder: Path) -> None:
    """In bfloat16, texts differ only where two tokens were nearly tied in vLLM's own attention."""
    model = tiny(folder, dtype="bfloat16")
    wanted = plain(model, "bfloat16", logprobs=True)
    result = ours(model, 16, dtype="bfloat16", speculative_config=NGRAM)
    for one, other, ahead in zip(result.tokens, wanted.tokens, wanted.ahead, strict=True):
        parts = next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        assert parts is None or ahead[parts] < NEAR, f"at {parts}: {one} instead of {other}, ahead {ahead[parts]}"


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [
        pytest.param(16, 64, id="16-chunked"),
        pytest.param(64, 64, id="64-chunked", marks=pytest.mark.slow),
        pytest.param(16, 512, id="16-whole", marks=pytest.mark.slow),
        pytest.param(64, 512, id="64-whole", marks=pytest.mark.slow),
    ],
)
def test_our_trained_head_drafts_for_smollm2(trained: tuple[str, str], page_size: int, chunk: int) -> None:
    """With this repository's EAGLE-3 head for SmolLM2, texts equal decoding without drafts, and drafts are accepted."""
    from transformers import AutoTokenizer

    model, head = trained
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["Copy: one two three four five six. Copy: one two three", "def fibonacci(n):\n    ", "Once upon a time"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    wanted = RunRequest(model, prompts=prompts, arguments={"block_size": 32}).run()
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    arguments = {"block_size": page_size, "max_num_batched_tokens": chunk, "speculative_config": drafts}
    result = RunRequest(model, "reference", prompts, arguments=arguments).run()
    assert result.tokens == wanted.tokens
    assert result.accepted > 0.1 * result.drafted > 0, f"{result.accepted} of {result.drafted} drafts were accepted"


@pytest.mark.parametrize(
    ("settings", "arguments", "sentence"),
    [
        ({"backend": "none_such"}, {}, "backend 'none_such' does not exist; give an installed backend"),
        ({"backend": "cuda_flashinfer"}, {}, "backend cuda_flashinfer is not installed; pip install"),
        ({"bakend": "reference"}, {}, "draftmark.bakend, which is unknown; use backend, debug, branches"),
        ({}, {"block_size": 24}, "block_size not supported"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_dtype float8_e4m3fn is not served: the reference stores KV as"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    folder: Path, settings: dict[str, object], arguments: dict[str, object], sentence: str
) -> None:
    """Bad input is refused before weights are loaded, in one sentence that names the bad value and the remedy."""
    request = RunRequest(
        tiny(folder),
        arguments={"attention_backend": "CUSTOM", "additional_config": {"draftmark": settings}, **arguments},
    )
    with pytest.raises(RuntimeError) as caught:
        request.run()
    assert sentence in str(caught.value), str(caught.value)
