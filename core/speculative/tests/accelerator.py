"""What tests of the loop on an accelerator share: a tiny pair, prompts, and the text that a CPU decodes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftmark.registry import available
from draftmark_speculative import EngineConfig, generate
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
