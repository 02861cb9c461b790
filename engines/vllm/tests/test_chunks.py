"""Layers whose rows see their own chunk of positions (Llama 4): vLLM presents each chunk as a request; needs vLLM."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from draftmark_engines import EngineLimits
from draftmark_vllm.limits import limits_of_chunks

PAGE = 16


@pytest.mark.parametrize("seed", range(40))
def test_a_step_has_no_more_chunks_than_the_limits_say(seed: int) -> None:
    """Nor is a chunk's page table of another width, whatever the requests bring."""
    rng = random.Random(seed)
    chunk, requests = PAGE * rng.randint(1, 4), rng.randint(1, 6)
    rows = [rng.choice((0, 1, 1, 5, rng.randint(1, 150))) for _ in range(requests)]
    lens = [count + rng.randint(0, 200) for count in rows]
    start = torch.tensor([0, *rows]).cumsum(0).int()
    step = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(requests, 32, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
    )
    made, _ = make_local_attention_virtual_batches(chunk, step, PAGE)
    limits = limits_of_chunks(EngineLimits(requests, 512, sum(rows)), chunk)
    assert made.num_reqs <= limits.max_num_reqs
    assert int(made.seq_lens.max()) <= limits.max_model_len == chunk
    assert made.block_table_tensor.shape[1] == chunk // PAGE


def test_other_layers_keep_their_limits() -> None:
    """No chunk, no other limit."""
    limits = EngineLimits(4, 512, 64)
    assert limits_of_chunks(limits, None) is limits
