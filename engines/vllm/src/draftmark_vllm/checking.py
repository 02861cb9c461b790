"""Checks of the debug mode. They copy tensors to the host and compare them with values derived independently."""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, slots_of, validate
from draftmark_engines import EngineError


def check_batch(batch: ForwardBatch, geometry: Geometry, slots: torch.Tensor) -> None:
    """Check a batch against its geometry, and vLLM's KV slots against slots derived from its page table.

    Args:
        slots: int64 ``[rows of the batch]``, vLLM's slots, also for a backend that derives them itself.

    Raises:
        BatchError: a tensor contradicts the geometry.
        EngineError: vLLM's slot of a live row differs from the derived slot.
    """
    validate(batch, geometry)
    starts, prefixes = batch.q_indptr.tolist(), batch.prefix_lens.tolist()
    for request in range(batch.num_reqs):
        first, rows = starts[request], starts[request + 1] - starts[request]
        given = slots[first : first + rows]
        if not len(given) or int(given.max()) < 0 or _is_dummy(batch, request, prefixes[request], geometry):
            continue
        positions = torch.arange(prefixes[request], prefixes[request] + rows, device=batch.device)
        # vLLM stores no drafts past the maximum length (slot -1), and the request may have no page there.
        there = given >= 0
        derived = slots_of(
            batch.page_table[request : request + 1], positions[there][None], geometry.attention.page_size
        )
        if not torch.equal(derived[0], given[there]):
            raise EngineError(
                f"request {request} of a {batch.mode.value} batch stores rows {first} to {first + rows - 1} at slots "
                f"{given.tolist()}, but its page table and prefix {prefixes[request]} give {derived[0].tolist()}; "
                "report this as a bug, with vLLM's version and arguments"
            )


def _is_dummy(batch: ForwardBatch, request: int, prefix: int, geometry: Geometry) -> bool:
    """Return True for a dummy request of vLLM's warm-up: its pages are the null page, which no live request has."""
    return int(batch.page_table[request, prefix // geometry.attention.page_size]) == 0
