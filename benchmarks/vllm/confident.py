"""Weights with which a random draft head is sure of its drafts.

vLLM's dummy weights give every token the same chance. Adaptive verification then expects that no draft is accepted, and
verifies none, so it never learns how many are.
"""

from __future__ import annotations

from typing import Any

import torch

SPREAD = 0.15
"""Standard deviation of the output matrix: with 4,096 features logits differ by about ten."""


def make_confident(worker: Any) -> None:
    """Fill norms with ones and output matrices with random numbers, in place, in the models of vLLM's runner V2."""
    runner = worker.model_runner
    for model in (runner.model, runner.speculator.model):
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
        for name, one in model.named_parameters():
            if one.dim() == 1 and one.is_floating_point():
                one.data.fill_(1)
            elif name.endswith("lm_head.weight"):
                one.data.normal_(0, SPREAD, generator=generator)
