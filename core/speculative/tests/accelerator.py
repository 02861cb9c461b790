"""What tests of the loop on an accelerator share: a tiny pair, prompts, and the text that a CPU decodes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftmark.registry import available
from draftmark_speculative import EngineConfig, Sampling, generate
from draftmark_speculative.eagle.tiny import tiny_pair

NEEDS_CUDA = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
BACKENDS = [row.name for row in available() if row.name in ("reference", "cuda_triton")]
COUNT = 24


@cache
def on(device):
    """The tiny model and its head."""
    return tiny_pair(device=device)


def starts():
    """Six prompts of different lengths."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (1, 5, 9, 17, 26, 30)]


@cache
def wanted(sampling):
    """The CPU's plain text."""
    outs, _ = generate(on("cpu")[0], starts(), COUNT, EngineConfig(max_context_len=64, sampling=sampling))
    return [out.tokens for out in outs]


def decode_without_a_wait(engine):
    """Requests join, leave and are cancelled while torch raises at any hidden synchronisation; texts are the CPU's."""
    prompts = starts()
    engine.submit(prompts[0], 3)  # the first prefill compiles what is not captured
    while engine.busy:
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = [engine.submit(prompt, COUNT) for prompt in prompts[:3]]
        for _ in range(4):
            engine.step()
        ids += [engine.submit(prompt, COUNT) for prompt in prompts[3:]]
        engine.step()
        engine.cancel(ids[1])
        while engine.busy:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    texts = wanted(Sampling())
    for one in (0, 2, 3, 4, 5):
        assert engine.output(ids[one]) == texts[one]
