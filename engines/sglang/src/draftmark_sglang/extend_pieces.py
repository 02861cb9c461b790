"""Prompts that leave a checkpoint of their state inside, cut into two EXTEND batches.

SGLang keeps the state of a prompt at a multiple of its chunk size, which may lie before the prompt's last row. So the
rows up to there run first, the states are copied, and the remaining rows run in a second batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from draftmark import StateGeometry
from draftmark.runtime import Exact, ForwardBatch, HostLengths, Unknown, ragged

Cut = tuple[bool, ForwardBatch, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]


def extend_pieces(geometry: StateGeometry, batch: ForwardBatch, tracked: Sequence[tuple[int, int]]) -> list[Cut]:
    """Return the batches of a prefill.

    Args:
        geometry: geometry of the recurrent layers.
        batch: EXTEND batch of all rows, with `state_slots`.
        tracked: rows of each request up to its checkpoint, and the slot for it; (0, 0) for a request without one.

    Returns:
        For each batch: whether it is the second one, the batch, the indices of its rows (None for all), and the slots
        to copy after it as (source, target).
    """
    saving = [request for request, (rows, _) in enumerate(tracked) if rows]
    if not saving:
        return [(False, batch, None, None)]
    assert batch.state_slots is not None, "the caller fills the slots"
    device = batch.device
    counts = list(batch.q_lens)
    for request in saving:
        counts[request] = tracked[request][0]
    targets = torch.tensor([tracked[request][1] for request in saving], device=device)
    saved = batch.state_slots[torch.tensor(saving, device=device)].long(), targets
    rest = [request for request, rows in enumerate(batch.q_lens) if rows > counts[request]]
    if not rest:
        return [(False, batch, None, saved)]
    starts = list(accumulate(batch.q_lens, initial=0))
    first_rows = [starts[r] + n for r, count in enumerate(counts) for n in range(count)]
    last_rows = [n for r in rest for n in range(starts[r] + counts[r], starts[r + 1])]
    every, after = list(range(len(counts))), [counts[r] for r in rest]
    lasts = [batch.q_lens[r] - counts[r] for r in rest]
    return [
        (False, _part(geometry, batch, every, [0] * len(every), counts), _index(first_rows, device), saved),
        (True, _part(geometry, batch, rest, after, lasts), _index(last_rows, device), None),
    ]


def _part(
    geometry: StateGeometry, batch: ForwardBatch, requests: list[int], done: list[int], counts: list[int]
) -> ForwardBatch:
    """Return the EXTEND batch of some requests, each with `done` rows added to its prefix."""
    assert batch.state_slots is not None
    index = _index(requests, batch.device)
    prefix = batch.prefix_lens[index] + _index(done, batch.device).int()
    known = batch.host
    host: HostLengths = Unknown(len(requests), geometry.max_prefix_len)
    if isinstance(known, Exact):
        host = Exact(tuple(known.lens[r] + more for r, more in zip(requests, done, strict=True)))
    table = torch.empty(len(requests), 0, dtype=torch.int32, device=batch.device)
    return ragged(geometry, prefix, table, tuple(counts), host, state_slots=batch.state_slots[index])


def _index(numbers: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
