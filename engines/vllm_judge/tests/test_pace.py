"""Tests of the judge on pace-vllm 1.3.0, a backend of AMD for vLLM on CPUs.

`python tools/environments.py test pace` runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pace_vllm")
pytest.importorskip("draftmark_contract")

from draftmark_vllm_judge import ENGINE

TARGET = "CUSTOM"
FAULTS = "engines.vllm_judge.tests.pace_faults"
pytestmark = pytest.mark.usefixtures("judged")
ROUNDS = "history.equals_a_fresh_state[small-{}]"
DECODE = "numerics.match_float64[bf16-gqa4-128-decode]"
REPEATS = "repeats.give_the_same_bits[decode]"  # opens the layer twice
SERVE = """
import sys
from vllm import LLM, SamplingParams
def main():
    ngram = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    more = {"speculative_config": ngram} if sys.argv[2] == "drafts" else {}
    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256,
        max_num_seqs=4, enable_prefix_caching=False, async_scheduling=False, **more,
    )
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [9, 8, 7, 9, 8, 7, 9, 8], [5] * 12]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for out in llm.generate([{"prompt_token_ids": one} for one in prompts], sampling):
        print("TOKENS", list(out.outputs[0].token_ids))
main()
"""


def item(target: str, name: str) -> Any:
    """Return an item of a target."""
    return next(one for one in ENGINE.open(target, "cpu").items() if one.id == name)


@pytest.mark.parametrize(
    "name", [DECODE, "numerics.match_float64[fp32-gqa4-64-mixed]", REPEATS, ROUNDS.format("all-accepted")]
)
def test_vendors_backend_is_right(name: str) -> None:
    """The backend that pace-vllm's platform selects passes eager steps, and rounds in which all drafts are accepted."""
    item(TARGET, name).run()


@pytest.mark.parametrize("name", [ROUNDS.format("rejected"), "numerics.serve_what_is_not_refused[cap0.5]"])
def test_findings_are_still_there(name: str) -> None:
    """The judge finds the faults that docs/findings.md lists for this release."""
    from draftmark_contract.check import ContractViolation

    with pytest.raises(ContractViolation, match="the output is wrong"):
        item(TARGET, name).run()


def test_planted_fault_is_found() -> None:
    """A copy of the vendor's backend with a wrong softmax scale fails an item that the original passes."""
    from draftmark_contract.check import ContractViolation

    with pytest.raises(ContractViolation, match="the output is wrong"):
        item(f"{FAULTS}:Scaled", DECODE).run()


@pytest.mark.parametrize("plugin", ["pace", ""])
def test_served_texts_differ_with_drafts_only_under_the_plugin(tmp_path: Path, plugin: str) -> None:
    """A served model answers other greedy texts with n-gram drafts under pace-vllm, and equal texts without it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    environment = {**os.environ, "VLLM_PLUGINS": plugin, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    def texts(drafts: str) -> list[str]:
        command = [sys.executable, "-c", SERVE, str(tmp_path), drafts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("TOKENS")]

    plain, drafted = texts("none"), texts("drafts")
    assert len(plain) == 3 and (plain != drafted) == bool(plugin)
