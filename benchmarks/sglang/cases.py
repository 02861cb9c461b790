"""What is measured: a dense model of Llama-8B's layer shape with dummy weights, and for each a way to speculate.

With dummy weights nothing is worth accepting, so SGLang is told how much it accepts (`SGLANG_SIMULATE_ACC_LEN`): the
same of every backend, so that rows differ by what attention costs and not by which tokens were guessed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, VOCABULARY, CONTEXT = 8, 32000, 16384


@dataclass(frozen=True)
class Case:
    """One server: how it speculates and at which page size.

    Attributes:
        speculate: none, chain or tree.
        topk, num_steps, num_draft_tokens: of chain and tree.
        accept: tokens a verification is told to commit, on average.
    """

    speculate: str
    page_size: int
    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    accept: float = 1.0

    @property
    def name(self) -> str:
        """How rows call it."""
        shape = "" if self.speculate == "none" else f"({self.topk},{self.num_steps},{self.num_draft_tokens})"
        return f"{self.speculate}{shape}"


PLAIN, CHAIN = Case("none", 64), Case("chain", 64, 1, 3, 4, 2.5)
SMALL, LARGE = Case("tree", 64, 4, 4, 16, 3.5), Case("tree", 64, 8, 6, 48, 4.5)
POINTS = ((1, 1024), (16, 1024), (32, 1024), (8, 8192))
"""Requests together, and tokens in each prompt."""
MEASURED = (
    (PLAIN, "draftmark"),
    (PLAIN, "triton"),
    (SMALL, "draftmark"),
    (SMALL, "triton"),
    (CHAIN, "draftmark"),
    (CHAIN, "triton"),
    (LARGE, "draftmark"),
    (LARGE, "triton"),
    (SMALL, "flashinfer"),
    (PLAIN, "flashinfer"),
    (Case("tree", 1, 4, 4, 16, 3.5), "draftmark"),
    (Case("tree", 1, 4, 4, 16, 3.5), "triton"),
    (Case("tree", 16, 4, 4, 16, 3.5), "draftmark"),
)
"""In the order in which they are measured, should time run out."""


def write_models(folder: Path) -> None:
    """The configurations of target and draft model; their weights are dummies."""
    shape: dict[str, Any] = dict(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
    )
    for name, architecture, layers in (
        ("target", "LlamaForCausalLM", LAYERS),
        ("draft", "LlamaForCausalLMEagle", 1),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        config = dict(shape, architectures=[architecture], num_hidden_layers=layers)
        (folder / name / "config.json").write_text(json.dumps(config))


def server_arguments(case: Case, backend: str, folder: Path) -> dict[str, Any]:
    """SGLang's arguments for one case."""
    arguments: dict[str, Any] = dict(
        model_path=str(folder / "target"),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        attention_backend=backend,
        page_size=case.page_size,
        mem_fraction_static=0.97,
        max_total_tokens=112_000,
        max_running_requests=32,
        cuda_graph_bs_decode=[1, 8, 16, 32],
        cuda_graph_backend_prefill="disabled",
        disable_radix_cache=True,
        chunked_prefill_size=8192,
    )
    if case.speculate != "none":
        arguments |= dict(
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(folder / "draft"),
            speculative_eagle_topk=case.topk,
            speculative_num_steps=case.num_steps,
            speculative_num_draft_tokens=case.num_draft_tokens,
        )
    return arguments


def environment(case: Case) -> dict[str, str]:
    """How much SGLang is told that it accepts."""
    if case.speculate == "none":
        return {}
    return {"SGLANG_SIMULATE_ACC_LEN": str(case.accept), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
