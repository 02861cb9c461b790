"""One round that is sent to a late device: its inputs, its expected results, and its actual results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftmark.batch import ForwardBatch, ragged
from draftmark.geometry import Mode

from ..cases.forwards import ForwardCase
from .batch_tensors import host_lengths
from .expected import Expected
from .graph_harness import Copies
from .harness import Harness
from .tensors import CaseTensors
from .watch import batch_tensors


@dataclass
class Round:
    """Holds a round with its inputs in its own device memory, so that the host copies no input later.

    Attributes:
        forwards: one forward, or the steps of a draft round.
        sources: inputs of each step. If no kernels run in this tier, `assert_round` also writes the outputs there.
        batches: batches over the sources, for checking the metadata.
        expected: expected results, in the order of sending.
        copies, outs: metadata and outputs of each step, copied on the device after the step.
    """

    forwards: list[ForwardCase]
    sources: list[CaseTensors] = field(default_factory=list)
    batches: list[ForwardBatch] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    copies: Copies = field(default_factory=list)
    outs: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, forward: ForwardCase) -> Round:
        """Return the round that ends with this forward: for DRAFT all of its steps."""
        steps = range(forward.step + 1) if forward.mode is Mode.DRAFT else ()
        return cls([forward.at_step(i) for i in steps] or [forward])

    @property
    def is_ragged(self) -> bool:
        """True for a prefill. A prefill is not captured, and its batch is built over its own inputs."""
        return self.forwards[0].mode is Mode.EXTEND

    def stage(self, harness: Harness, seed: int, last: Expected | None) -> Expected | None:
        """Put the inputs on the device, and compute the expected results. `last` is the result of the rounds before."""
        for step, forward in enumerate(self.forwards):
            source = harness.tensors.twin()
            self.batches.append(source.set(forward))
            source.fill_rows(forward, seed + step)
            last = harness.expected(forward, source, last)
            self.sources.append(source)
            self.expected.append(last)
        return last

    def move_to(self, step_tensors: Sequence[CaseTensors]) -> None:
        """Copy the inputs in device memory to the static tensors of each step. Outputs become NaN."""
        for source, live in zip(self.sources, step_tensors, strict=False):
            source.copy_to(live)

    def on_device(self) -> list[torch.Tensor]:
        """Return the tensors of this round that are in device memory."""
        batches = [tensor for batch in self.batches for tensor in batch_tensors(batch).values()]
        return batches + [tensor for source in self.sources for tensor in memory_of(source)]

    def assert_round(self, harness: Harness, what: str) -> None:
        """Compare each step's metadata and outputs with the batch of this round."""
        steps = zip(self.forwards, self.batches, self.sources, self.copies, self.outs, self.expected, strict=True)
        for forward, batch, source, copy, out, expected in steps:
            harness.assert_metadata(forward, batch, copy)
            if not harness.kernels:
                harness.interpret(forward, batch, source, copy)
                out = source.rows(forward)[3]
            harness.assert_output(forward, expected, what, out)


def live_batch(forward: ForwardCase, live: CaseTensors, kind: str) -> ForwardBatch:
    """Return a forward's batch over the static tensors, without filling them. For `kind` see `host_lengths`."""
    b, size, lens = live.buffers, len(forward.requests), host_lengths(forward, kind)
    if forward.mode is Mode.EXTEND:
        rows, placed = tuple(one.rows for one in forward.requests), (b.prefix_lens[:size], b.page_table[:size])
        state_slots = None if b.state_slots is None else b.state_slots[:size]
        return ragged(forward.geometry, *placed, rows, lens, forward.live, state_slots=state_slots)
    return live.batch_of(forward, lens)


def memory_of(tensors: CaseTensors) -> list[torch.Tensor]:
    """Return every tensor that a `CaseTensors` holds."""
    return [
        one for one in (*vars(tensors.buffers).values(), *tensors.named().values()) if isinstance(one, torch.Tensor)
    ]
