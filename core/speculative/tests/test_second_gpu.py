"""The loop on a second GPU, while the first one is torch's current device: the CPU's text, eagerly and in graphs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftmark.registry import available
from draftmark_speculative import Eagle, EngineConfig, HostKind, generate
from draftmark_speculative.eagle.tiny import tiny_pair

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
BACKENDS = [row.name for row in available() if row.name in ("reference", "cuda_triton")]
PROMPTS = [[5, 9, 2], [7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9]]
COUNT = 24


@pytest.mark.parametrize(("backend", "graph"), list(product(BACKENDS, [False, True])))
def test_the_second_gpu_gives_the_text_of_the_cpu(backend: str, graph: bool) -> None:
    """Draft trees with overlap give the CPU's greedy text, and torch's current device stays the first."""
    small = {"max_num_reqs": 4, "max_context_len": 64, "max_extend_tokens": 20}
    plain, _ = generate(tiny_pair(device="cpu")[0], PROMPTS, COUNT, EngineConfig(**small))
    torch.cuda.set_device(0)
    model, head = tiny_pair(device="cuda:1")
    config = EngineConfig(
        **small, speculate=Eagle(head, 4, 3, 12), overlap=True, host_lengths=HostKind.UPPER_BOUND, graph=graph,
        backend=backend, page_size=16,
    )  # fmt: skip
    outs, _ = generate(model, PROMPTS, COUNT, config)
    assert torch.cuda.current_device() == 0
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
