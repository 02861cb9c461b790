"""Tests of MLA models: with chains and trees, at any page size, tokens equal those of SGLang's own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler import generate, in_a_fork

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30, 40, 50, 60]]
TOKENS = 24
CHAIN = dict(speculative_eagle_topk=1, speculative_num_steps=3, speculative_num_draft_tokens=4)
TREE = dict(speculative_eagle_topk=4, speculative_num_steps=3, speculative_num_draft_tokens=10)
NGRAM = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)


@pytest.fixture(scope="module")
def deepseek(folder: Path) -> str:
    """Folder of a tiny random DeepSeek V3 with an MTP layer."""
    import models

    return str(models.tiny_deepseek(folder / "deepseek"))


@pytest.fixture(scope="module")
def plain(deepseek: str) -> list[list[int]]:
    """Output tokens of SGLang's own Triton attention without drafts, in Triton's interpreter."""
    return in_a_fork(_generate, model_path=deepseek, attention_backend="triton")["texts"]


def _generate(**arguments: Any) -> dict[str, Any]:
    """Run `generate` where SGLang's DeepSeek, which shares weights with its MTP layer, may wait for a GPU."""
    torch.cuda.synchronize = lambda *_: None
    return generate(PROMPTS, TOKENS, **arguments)


def _mtp(model: str, shape: dict[str, Any]) -> dict[str, Any]:
    return dict(shape, speculative_algorithm="EAGLE", speculative_draft_model_path=model)


@pytest.mark.parametrize(
    ("page_size", "drafts", "fewest_saved"),
    [(1, None, 0), (16, CHAIN, 4), (1, TREE, 12), (16, TREE, 12), (64, NGRAM, 4)],
    ids=["1-plain", "16-chain", "1-tree", "16-tree", "64-ngram"],
)
def test_tokens_equal_sglangs_own(
    deepseek: str, plain: list[list[int]], page_size: int, drafts: dict[str, Any] | None, fewest_saved: int
) -> None:
    """Without drafts, with MTP chains and trees, and with n-gram trees, tokens equal SGLang's own."""
    more = {} if drafts is None else drafts if "speculative_algorithm" in drafts else _mtp(deepseek, drafts)
    served = dict(model_path=deepseek, attention_backend="draftmark", page_size=page_size)
    made = in_a_fork(_generate, **served, **more)
    assert made["backend"] == "DraftmarkBackend" and made["heads"] == [(4, 1)]
    assert made["texts"] == plain
    saved = len(PROMPTS) * TOKENS - made["verifies"] if more else 0
    assert saved >= fewest_saved, f"{made['verifies']} verifications: drafts were not accepted"


def test_triton_kernels_on_sglangs_rows(deepseek: str, plain: list[list[int]]) -> None:
    """With cuda_triton in Triton's interpreter, MTP trees at page size 16 give SGLang's own tokens."""
    served = dict(model_path=deepseek, attention_backend="draftmark", page_size=16)
    made = in_a_fork(_generate, **served, **_mtp(deepseek, TREE), environment={"DRAFTMARK_BACKEND": "cuda_triton"})
    assert made["backend"] == "DraftmarkBackend" and made["texts"] == plain


def test_draft_model_without_latent_attention(deepseek: str, target: str, plain: list[list[int]]) -> None:
    """A Llama that drafts trees for an MLA target has its own KV pool with keys and values; tokens stay equal."""
    drafts = dict(TREE, speculative_algorithm="STANDALONE", speculative_draft_model_path=target)
    made = in_a_fork(_generate, model_path=deepseek, attention_backend="draftmark", page_size=16, **drafts)
    assert made["backend"] == "DraftmarkBackend" and made["texts"] == plain and made["verifies"] > 0
