"""draftmark's backends in a real vLLM, on a CPU: texts equal to those of vLLM's own attention without drafts.

Needs an environment of its own (`make test-vllm`); skipped where vLLM is not installed. Every engine runs in the debug
mode: each batch is validated, and vLLM's KV slots are compared with those that draftmark derives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from draftmark import Form
from draftmark.reference import ReferencePlugin
from draftmark_vllm.versions import VLLM
from engines.vllm.tests.engine_models import eagle_head, gemma4_assistant, tiny
from engines.vllm.tests.engine_run import SLOW_NEW_TOKENS, Asked, Said
from engines.vllm.tests.families import SERVED

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GEMMA = {"sliding_window": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}
NEAR = 0.02
"""Of log-probabilities, in bfloat16."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the models."""
    return tmp_path_factory.mktemp("models")


@cache
def plain(model: str, dtype: str = "float32", logprobs: bool = False) -> Said:
    """What vLLM's own attention says without drafts."""
    return Asked(model, logprobs=logprobs, arguments={"block_size": 32, "dtype": dtype}).run()


def ours(model: str, page_size: int, backend: str = "reference", **more) -> Said:
    """What draftmark's backend says."""
    return Asked(model, backend, arguments={"block_size": page_size, **more}).run()


@pytest.mark.parametrize(
    ("drafts", "page_size"),
    [
        pytest.param(None, 64, id="plain-64"),
        pytest.param(NGRAM, 16, id="ngram-16"),
        pytest.param(None, 16, id="plain-16", marks=pytest.mark.slow),
        pytest.param(NGRAM, 64, id="ngram-64", marks=pytest.mark.slow),
    ],
)
def test_texts_are_vllms_own(folder: Path, page_size: int, drafts: dict[str, object] | None) -> None:
    """Chunked prompts beside decodes and verifies, uneven ones too, in float32."""
    said = ours(tiny(folder), page_size, speculative_config=drafts)
    assert said.tokens == plain(tiny(folder)).tokens
    assert (said.accepted > 0) is (drafts is not None)


def test_prompts_in_one_piece(folder: Path) -> None:
    """Whole prompts in one step, without prefix caching."""
    said = ours(tiny(folder), 16, max_num_batched_tokens=512, enable_prefix_caching=False, speculative_config=NGRAM)
    assert said.tokens == plain(tiny(folder)).tokens


def test_texts_without_the_debug_mode(folder: Path) -> None:
    """As users serve: no step is checked, and a backend that asks for no lengths on the host is told none."""
    arguments = {"block_size": 16, "max_num_batched_tokens": 64, "speculative_config": NGRAM}
    said = Asked(tiny(folder), "reference", settings={"debug": False}, arguments=arguments).run()
    assert said.tokens == plain(tiny(folder)).tokens and said.drafted > 0


@pytest.mark.parametrize(("forms", "drafts"), [((), None), ((Form.ENGINE_SLOTS,), NGRAM)], ids=["none", "slots"])
def test_a_backend_that_takes_little_of_vllms_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forms: tuple[Form, ...], drafts: dict[str, object] | None
) -> None:
    """vLLM keeps K apart from V for it, its page table is of the core's width, and without slots it works them out."""
    monkeypatch.setattr(ReferencePlugin, "info", replace(ReferencePlugin.info, forms=forms))
    said = ours(tiny(folder), 16, speculative_config=drafts)
    assert said.tokens == plain(tiny(folder)).tokens
    assert (said.accepted > 0) is (drafts is not None)


def test_preempted_requests_go_on(folder: Path) -> None:
    """With room for few pages requests are sent back and prefilled again, from cached pages where there are some."""
    said = ours(tiny(folder), 16, num_gpu_blocks_override=24, speculative_config=NGRAM)
    assert said.tokens == plain(tiny(folder)).tokens


def test_a_draft_model_decodes_in_our_pages(folder: Path) -> None:
    """A smaller model drafts, through the same backend and with heads of its own."""
    draft = tiny(folder, num_hidden_layers=1, num_key_value_heads=1)
    said = ours(
        tiny(folder),
        16,
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 3,
            "attention_backend": "CUSTOM",
        },
    )
    assert said.tokens == plain(tiny(folder)).tokens and said.drafted > 0


def test_a_draft_model_of_layers_of_two_shapes(folder: Path) -> None:
    """A Gemma 2, whose windows are of one group with its other layers: vLLM names the second behind the builder."""
    model = tiny(folder, "gemma2", **GEMMA)
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    said = ours(model, 16, speculative_config=drafts, disable_hybrid_kv_cache_manager=True)
    assert said.tokens == plain(model).tokens and said.accepted > 0


@pytest.mark.skipif(VLLM.installed_before("0.28"), reason="vLLM before 0.28 does not read this Gemma 4's configuration")
def test_an_assistant_that_reads_its_targets_kv(folder: Path) -> None:
    """Gemma 4's MTP: layers without KV, which are told whose they read once they are made. They store nothing."""
    model = SERVED["gemma-4"].write(folder, "gemma-4")
    drafts = {"method": "mtp", "model": gemma4_assistant(folder, model), "num_speculative_tokens": 3}
    said = ours(model, 16, speculative_config=drafts)
    assert said.tokens == plain(model).tokens and said.drafted > 0


@pytest.mark.usefixtures("stand_ins")
def test_suffixes_draft_other_numbers_of_tokens_each_step(folder: Path) -> None:
    """vLLM's suffix decoding, over a stand-in for the package that it asks for."""
    said = ours(tiny(folder), 16, speculative_config={"method": "suffix", "num_speculative_tokens": 4})
    assert said.tokens == plain(tiny(folder)).tokens and said.accepted > 0
    assert said.drafted < 4 * said.rounds, "each round had as many drafts"


def test_an_eagle_head_drafts_in_our_pages(folder: Path) -> None:
    """EAGLE's first form, with a random head whose drafts are hardly ever accepted."""
    head = eagle_head(folder, tiny(folder))
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    said = ours(tiny(folder), 16, speculative_config=drafts)
    assert said.tokens == plain(tiny(folder)).tokens and said.drafted > 0


def test_a_window(folder: Path) -> None:
    """A Mistral whose window is shorter than its texts."""
    model = tiny(folder, "mistral", sliding_window=32)
    assert ours(model, 16, speculative_config=NGRAM).tokens == plain(model).tokens


def test_layers_of_two_shapes_with_soft_caps(folder: Path) -> None:
    """A Gemma 2: every other layer has a window, all cap their logits."""
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
    """Tensor parallelism: the texts of one rank, and in every step the same metadata on both."""
    asked = Asked(
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
    assert asked.run().tokens == plain(tiny(folder)).tokens


def test_triton_kernels_on_vllms_pages(folder: Path) -> None:
    """cuda_triton in Triton's interpreter, with drafts."""
    model = tiny(folder)
    asked = Asked(
        model,
        "cuda_triton",
        new_tokens=SLOW_NEW_TOKENS,
        environment={"TRITON_INTERPRET": "1"},
        arguments={"block_size": 16, "speculative_config": NGRAM},
    )
    wanted = [tokens[:SLOW_NEW_TOKENS] for tokens in plain(model).tokens]
    assert asked.run().tokens == wanted


def test_fp8_pages_in_the_engine(folder: Path) -> None:
    """e4m3 KV with the layers' scales, by cuda_triton in Triton's interpreter: a text parts at near ties alone."""
    model = tiny(folder)
    wanted = plain(model, logprobs=True)
    said = Asked(
        model,
        "cuda_triton",
        new_tokens=SLOW_NEW_TOKENS,
        environment={"TRITON_INTERPRET": "1"},
        arguments={"block_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    ).run()
    for one, other, ahead in zip(said.tokens, wanted.tokens, wanted.ahead, strict=True):
        parts = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert parts is None or ahead[parts] < NEAR, f"at {parts}: {one} instead of {other}, ahead {ahead[parts]}"


def test_bfloat16_parts_at_near_ties_only(folder: Path) -> None:
    """In bfloat16 a text may part where vLLM's own attention hardly preferred its token."""
    model = tiny(folder, dtype="bfloat16")
    wanted = plain(model, "bfloat16", logprobs=True)
    said = ours(model, 16, dtype="bfloat16", speculative_config=NGRAM)
    for one, other, ahead in zip(said.tokens, wanted.tokens, wanted.ahead, strict=True):
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
    """EAGLE-3 with the head of this repository: the texts of plain decoding, and drafts that are accepted."""
    from transformers import AutoTokenizer

    model, head = trained
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["Copy: one two three four five six. Copy: one two three", "def fibonacci(n):\n    ", "Once upon a time"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    wanted = Asked(model, prompts=prompts, arguments={"block_size": 32}).run()
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    arguments = {"block_size": page_size, "max_num_batched_tokens": chunk, "speculative_config": drafts}
    said = Asked(model, "reference", prompts, arguments=arguments).run()
    assert said.tokens == wanted.tokens
    assert said.accepted > 0.1 * said.drafted > 0, f"{said.accepted} of {said.drafted} drafts were accepted"


@pytest.mark.parametrize(
    ("settings", "arguments", "sentence"),
    [
        ({"backend": "none_such"}, {}, "there is no backend 'none_such'; give one of those installed"),
        ({"backend": "cuda_flashinfer"}, {}, "backend cuda_flashinfer is not installed; pip install"),
        ({"bakend": "reference"}, {}, "draftmark.bakend, but there are backend, debug, branches only"),
        ({}, {"block_size": 24}, "block_size not supported"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_dtype float8_e4m3fn is not served: the reference stores KV as"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    folder: Path, settings: dict[str, object], arguments: dict[str, object], sentence: str
) -> None:
    """Before weights are loaded, with what is wrong and the way out."""
    asked = Asked(
        tiny(folder),
        arguments={"attention_backend": "CUSTOM", "additional_config": {"draftmark": settings}, **arguments},
    )
    with pytest.raises(RuntimeError) as caught:
        asked.run()
    assert sentence in str(caught.value), str(caught.value)
