"""Test of draftmark's draft head for SmolLM2-135M in SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scheduler import generate, in_a_fork

TOKENS = 48
QUESTIONS = ("Why is the sky blue?", "Name three colours and a fruit of each.", "What is a prime number?")
CHAIN = dict(speculative_eagle_topk=1, speculative_num_steps=4, speculative_num_draft_tokens=5)
TREE = dict(speculative_eagle_topk=4, speculative_num_steps=4, speculative_num_draft_tokens=16)


def _prompts(model: str) -> list[list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return [tokenizer(f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n").input_ids for one in QUESTIONS]


def _head(model: str, out: Path) -> str:
    import draftmark_head_smollm2_135m

    from draftmark_sglang.heads import write_folder

    write_folder(Path(draftmark_head_smollm2_135m.__file__).parent, Path(model), out)
    return str(out)


@pytest.fixture(scope="module")
def plain(smollm2: str) -> list[list[int]]:
    """Output tokens of SGLang's own attention without drafts."""
    return in_a_fork(generate, _prompts(smollm2), TOKENS, model_path=smollm2, attention_backend="torch_native")["texts"]


def _accepted(smollm2: str, folder: Path, plain: list[list[int]], **arguments: Any) -> float:
    drafts = dict(speculative_algorithm="EAGLE3", speculative_draft_model_path=_head(smollm2, folder / "head"))
    served = dict(model_path=smollm2, attention_backend="draftmark") | drafts | arguments
    made = in_a_fork(generate, _prompts(smollm2), TOKENS, **served)
    assert made["texts"] == plain
    return len(QUESTIONS) * TOKENS / made["verifies"]


def test_tree_accepts_more_than_chain(smollm2: str, folder: Path, plain: list[list[int]]) -> None:
    """A tree of 16 nodes accepts more tokens than a chain of four, and both give the tokens of plain decoding."""
    chain = _accepted(smollm2, folder, plain, page_size=16, **CHAIN)
    tree = _accepted(smollm2, folder, plain, page_size=64, **TREE)
    assert chain > 1.4 and tree > 1.1 * chain, (chain, tree)
