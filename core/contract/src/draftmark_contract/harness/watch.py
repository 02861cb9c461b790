"""Detects which tensors a call changes, by comparing them with snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draftmark.batch import ForwardBatch, Tree

from ..cases.forwards import ForwardCase
from ..check import ContractViolation
from .tensors import CaseTensors


def batch_tensors(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """Return a batch's tensors by name."""
    found = {name: getattr(batch, name) for name in ("prefix_lens", "q_indptr", "page_table", "positions")}
    if isinstance(batch.tail, Tree):
        found |= {"tail.mask": batch.tail.mask, "tail.depth": batch.tail.depth}
        found |= {} if batch.tail.parents is None else {"tail.parents": batch.tail.parents}
    if batch.chosen is not None:
        found |= {"chosen.slots": batch.chosen.slots, "chosen.counts": batch.chosen.counts}
    return found | ({} if batch.state_slots is None else {"state_slots": batch.state_slots})


def received(tensors: CaseTensors, forward: ForwardCase, batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """Return every tensor that a backend receives, except its arena: batch, static buffers, cache, rows."""
    static = {f"static {name}": one for name, one in vars(tensors.buffers).items() if isinstance(one, torch.Tensor)}
    return {
        **batch_tensors(batch),
        **static,
        **{name: one for name, one in tensors.named().items() if not name.startswith("out")},
        **tensors.outputs(forward),
    }


class Watch:
    """Takes snapshots of tensors.

    Args:
        watched: tensors by name.
        batch: object that a violation prints.
    """

    def __init__(self, watched: Mapping[str, torch.Tensor], batch: object) -> None:
        self._watched, self._batch = watched, batch
        self._before = {name: bits_of(one).clone() for name, one in watched.items()}

    def assert_unchanged_except(self, allowed: Sequence[str], call: str) -> None:
        """Raise a ContractViolation if a tensor outside `allowed` has changed since the last check."""
        for name, one in self._watched.items():
            now = bits_of(one)
            if name not in allowed and not torch.equal(now, self._before[name]):
                at = int((now != self._before[name]).nonzero()[0, 0])
                raise ContractViolation(
                    f"{call}() changes {name}, which it must not write",
                    batch=self._batch,
                    got=f"first difference in byte {at}",
                    expected=f"only {', '.join(allowed) or 'arena buffers'} change",
                    formula="the four methods of draftmark.backend.AttentionBackend",
                    bug="vllm#53821",
                )
            self._before[name] = now.clone()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, flat. A contiguous tensor gives a view of its memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)
