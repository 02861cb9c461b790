"""Checkpoints of recurrent state: the lengths at which a round saves one."""

from __future__ import annotations

import torch


def checkpoint_lens(
    prefix_lens: torch.Tensor, counts: torch.Tensor, interval: int, whole: bool = False
) -> torch.Tensor:
    """Return the length of the checkpoint that a round takes for each request. Capturable, no host read.

    A round commits counts[r] tokens after prefix_lens[r]. Its checkpoint is the largest multiple of `interval` that it
    reaches: ``b = (L + count) // interval · interval``, if b > L.

    Args:
        prefix_lens: int32 ``[R]``, committed lengths before the round.
        counts: integers ``[R]``, tokens that the round commits.
        interval: `Limits.state_interval`; 0 for no checkpoints.
        whole: only the state after all tokens is known, as after EXTEND and DECODE. A multiple before it is not saved.

    Returns:
        int32 ``[R]``; 0 for a request without a checkpoint.
    """
    if interval == 0:
        return torch.zeros_like(prefix_lens)
    reached = (prefix_lens + counts) // interval * interval
    saved = (reached == prefix_lens + counts) & (counts > 0) if whole else reached > prefix_lens
    return torch.where(saved, reached, 0).to(torch.int32)
