"""Tests of DP attention: each rank has its own requests, and SGLang pads all ranks' batches to a common size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from any_model import any_model, use_random_weights
from scheduler import generate_on_ranks, on_a_cpu

from draftmark_sglang_judge.in_process import submit

BUSY: list[list[list[int]]] = [[[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30] * 10], [[40, 41, 42]]]
"""Prompts of each rank. The second rank finishes before the first."""
IDLE = [BUSY[0], []]
TOKENS = 12
DRAFTS = dict(speculative_algorithm="EAGLE3", speculative_num_steps=3)
CHAIN = dict(DRAFTS, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
TREE = dict(DRAFTS, speculative_eagle_topk=4, speculative_num_draft_tokens=10)


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, Any]:
    """Server arguments for a Qwen3-MoE of four layers on two ranks; the last two layers have experts."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    path = any_model(
        folder / "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", num_hidden_layers=4, head_dim=32,
        decoder_sparse_step=1, mlp_only_layers=[0, 1], **experts,
    )  # fmt: skip
    return dict(model_path=path, load_format="dummy", dp_size=2, enable_dp_attention=True)


@pytest.fixture(scope="module")
def head(folder: Path) -> str:
    """Folder of an EAGLE-3 head for the served model, with random weights, so most of its drafts are wrong."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    shape = dict(num_hidden_layers=1, draft_vocab_size=96, eagle_config=layers)
    return any_model(folder / "qwen3_moe_head", "LlamaForCausalLMEagle3", "llama", **shape)


@pytest.fixture(scope="module")
def plain(served: dict[str, Any]) -> list[list[list[int]]]:
    """Output tokens of each rank's requests with SGLang's own attention."""
    made = generate_on_ranks(2, BUSY, TOKENS, _generate, attention_backend="torch_native", **served)
    return [one["texts"] for one in made]


@pytest.mark.parametrize("drafts", [{}, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_two_ranks(drafts: dict[str, Any], served: dict[str, Any], head: str, plain: Any) -> None:
    """Two ranks generate the same tokens as SGLang's own attention, also after one rank has finished its requests."""
    if drafts:
        drafts = dict(drafts, speculative_draft_model_path=head)
    made = generate_on_ranks(
        2, BUSY, TOKENS, _generate, attention_backend="draftmark", page_size=16, **served, **drafts
    )
    assert [one["texts"] for one in made] == plain
    assert made[1]["modes"]["IDLE"] > 0 and {one["backend"] for one in made} == {"DraftmarkBackend"}
    assert all((one["verifies"] > 0) == bool(drafts) for one in made)


def test_rank_without_requests(served: dict[str, Any], head: str, plain: Any) -> None:
    """A rank without requests runs idle batches only, and the other rank still generates the right tokens."""
    drafts = dict(TREE, speculative_draft_model_path=head)
    made = generate_on_ranks(
        2, IDLE, TOKENS, _generate, attention_backend="draftmark", page_size=16, **served, **drafts
    )
    assert [one["texts"] for one in made] == [plain[0], []]
    assert set(made[1]["modes"]) == {"IDLE"}


def _generate(prompts: list[list[list[int]]], max_new_tokens: int, rank: int, **arguments: Any) -> dict[str, Any]:
    """Return the output tokens of this rank's prompts, and the forward modes of its batches."""
    use_random_weights()
    _stand_in()
    scheduler = on_a_cpu(rank=rank, **arguments)
    requests = submit(scheduler, prompts[rank], max_new_tokens)
    modes = _run_together(scheduler, requests)
    return {
        "texts": [list(request.output_ids)[:max_new_tokens] for request in requests],
        "verifies": sum(getattr(request, "spec_verify_ct", 0) for request in requests),
        "backend": type(scheduler.tp_worker.model_runner.attn_backend).__name__,
        "modes": modes,
    }


def _run_together(scheduler: Any, requests: list[Any]) -> Counter[str]:
    """Run SGLang's event loop until all ranks' requests have ended, and count the batches by forward mode.

    A rank without requests continues, because every turn of the loop has collectives of all ranks.
    """
    modes: Counter[str] = Counter()

    def receive(**_: Any) -> list[Any]:
        if scheduler.last_batch:
            modes[scheduler.last_batch.forward_mode.name] += 1
        done = torch.tensor(int(all(request.finished() for request in requests)))
        torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MIN, scheduler.tp_group.cpu_group)
        scheduler.gracefully_exit = bool(done)
        return []

    scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
    scheduler.gracefully_exit = False
    scheduler.run_event_loop()
    return modes


def _stand_in() -> None:
    """Emulate device features that SGLang's DP attention needs: pinned memory, two collectives, and a fill value."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    tensor = torch.tensor

    def unpinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return tensor(*arguments, **named)

    def reduce_scatter(group: Any, output: torch.Tensor, given: torch.Tensor) -> None:
        whole = given.clone()
        torch.distributed.all_reduce(whole, group=group.device_group)
        output.copy_(whole.tensor_split(group.world_size)[group.rank_in_group])

    torch.tensor = unpinned
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = reduce_scatter
    for graph in ("cuda", "cpu"):
        setattr(TorchNativeAttnBackend, f"get_{graph}_graph_seq_len_fill_value", lambda self: 1)
