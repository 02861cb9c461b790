"""Compiles vLLM's kernel that verifies the drafts of greedy requests, before the first request."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY = 16
"""Columns of the logits that the warm-up verifies. The kernel does not depend on this number."""


def warm_up_rejection(config: Any, device: torch.device) -> None:
    """Compile the kernel with which vLLM's runner V1 verifies drafts of greedy requests.

    In early releases vLLM's own warm-up verifies sampled requests only, and Triton compiles another kernel for greedy
    requests. That compilation delays the first verification, and ``--jit-monitor-mode error`` ends the engine there.
    Later releases register the kernel for their warm-up. Nothing is done on a CPU, for runner V2, or without drafts.

    Args:
        config: a `VllmConfig`.
        device: the worker's device.
    """
    draft = config.speculative_config
    drafts = getattr(draft, "num_speculative_tokens", None)
    if device.type == "cuda" and drafts and not getattr(config, "use_v2_model_runner", False):
        _warm_up(drafts, draft.rejection_sample_method == "synthetic", device)


@cache
def _warm_up(drafts: int, synthetic: bool, device: torch.device) -> None:
    """Verify one request, unless vLLM's own warm-up does. A worker's first builder verifies, its others do nothing."""
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler, "_rejection_greedy_sample"):
        verify_greedily(drafts, synthetic, device)


def verify_greedily(drafts: int, synthetic: bool, device: torch.device) -> torch.Tensor:
    """Verify one greedy request, and accept all its drafts.

    Args:
        drafts: number of drafts.
        synthetic: verify by vLLM's synthetic sampler, which accepts drafts by a rate.

    Returns:
        int32 ``[1, drafts + 1]``, zeros: the accepted drafts and the bonus token.
    """
    from vllm.v1.sample.rejection_sampler import rejection_sample

    # Dtypes are those of a step, because Triton compiles a kernel for each combination.
    found: torch.Tensor = rejection_sample(
        draft_token_ids=torch.zeros(drafts, dtype=torch.int32, device=device),
        num_draft_tokens=[drafts],
        max_spec_len=drafts,
        cu_num_draft_tokens=torch.full((1,), drafts, dtype=torch.int32, device=device),
        draft_probs=None,
        target_logits=torch.zeros(drafts, VOCABULARY, device=device),
        bonus_token_ids=torch.zeros(1, 1, dtype=torch.int32, device=device),
        sampling_metadata=SimpleNamespace(all_greedy=True, all_random=False, generators={}),
        synthetic_mode=synthetic,
        synthetic_conditional_rates=torch.ones(drafts, device=device) if synthetic else None,
    )
    return found
