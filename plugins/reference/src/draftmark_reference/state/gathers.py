"""Gathers and writes of slots, windows and kept rows."""

from __future__ import annotations

import torch

from draftmark.runtime import ForwardBatch, StateCache


def requests_of(batch: ForwardBatch) -> list[tuple[slice, slice]]:
    """Return the batch entry and the rows of each request of an EXTEND that has rows."""
    found, first = [], 0
    for request, n in enumerate(batch.q_lens):
        if n:
            found.append((slice(request, request + 1), slice(first, first + n)))
        first += n
    return found


def slots_of_states(batch: ForwardBatch) -> torch.Tensor:
    """Return the state slot of each request, int64 ``[R]``."""
    assert batch.state_slots is not None, "validate requires it"
    return batch.state_slots.long()


def ancestors_in(parents: torch.Tensor, window: int) -> list[torch.Tensor]:
    """Return where the history holds each tail slot and its ancestors, int64 ``[R, T]`` each, nearest first.

    The history is the `window` committed columns, then the tail slots.
    """
    at = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    found = [at + window]
    for _ in range(window):
        at = torch.where(at >= 0, parents.gather(1, at.clamp(min=0)), at - 1)
        found.append(at + window)
    return found


def columns_after(history: torch.Tensor, count: torch.Tensor, window: int) -> torch.Tensor:
    """Return the window ``[R, channels, window]`` after `count` rows of a history ``[R, window + T, channels]``."""
    at = count.long()[:, None] + torch.arange(window, device=history.device)
    return history.gather(1, at[..., None].expand(-1, -1, history.shape[2])).transpose(1, 2)


def along(kept: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Gather kept rows ``[max_reqs, D, …]`` along each request's path ``[R, D]``."""
    return kept[torch.arange(len(path), device=path.device)[:, None], path]


def write_slots(
    cache: StateCache, slots: torch.Tensor, state: torch.Tensor, conv: torch.Tensor, moves: torch.Tensor
) -> None:
    """Write states and windows to slots; a request that does not move writes its slot's own bytes again."""
    for kept, new in ((cache.state, state), (cache.conv, conv)):
        if kept.numel():
            mask = moves.view(-1, *[1] * (kept.dim() - 1))
            kept[slots] = torch.where(mask, new.to(kept.dtype), kept[slots])
