"""States of the probe: draftmark's reference over a few slots of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from draftmark import Limits, Mode, ModelError, StateGeometry, StateShape, load
from draftmark.runtime import BatchBuffers, Exact, ForwardBatch, StatePool, device_profile, ragged

BACKEND = "reference"
MODES = (Mode.EXTEND, Mode.DECODE)


class ProbeStates:
    """`StateRun` over requests that grow by the same number of tokens in every forward.

    Args:
        shapes: of each layer with state.
        requests: number of requests; all begin empty.
        most: most tokens of a request.
    """

    def __init__(self, shapes: Sequence[StateShape], requests: int, most: int, device: torch.device) -> None:
        self._requests, self._device, self._stored = requests, device, 0
        limits = Limits(requests, max_context_len=most, max_extend_tokens=requests * most)
        groups = {one: _Group(one, shapes.count(one), limits, device) for one in dict.fromkeys(shapes)}
        self._groups = list(groups.values())
        self._layers = [(groups[one], shapes[:i].count(one)) for i, one in enumerate(shapes)]
        self._called: list[int] = []

    @contextmanager
    def forward(self, count: int) -> Iterator[None]:
        """Append `count` tokens to every request in the forward that runs inside the context.

        Raises:
            ModelError: the forward did not run every layer with state once, in order.
        """
        batch = self._batch(count)
        for group in self._groups:
            group.begin(batch)
        self._called = []
        yield
        if self._called != list(range(len(self._layers))):
            raise ModelError(
                f"its forward ran the layers with state in the order {self._called}, but each of {len(self._layers)} "
                "must run once; use the family's own classes"
            )
        self._stored += count

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply a layer's convolution; see `StateRun`."""
        group, place = self._enter(layer)
        out = torch.empty_like(x)
        group.backend.convolve(x, weight, bias, group.pool.layers[place], group.batch, out)
        return out

    def recur(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Update and read a layer's state; see `StateRun`."""
        group, place = self._enter(layer)
        out = torch.empty_like(v)
        group.backend.recur(q, k, v, log_decay, beta, group.pool.layers[place], group.batch, out)
        return out

    def _enter(self, layer: int) -> tuple[_Group, int]:
        """Record a call of a layer; return its group and its place in the group."""
        if self._called[-1:] != [layer]:  # the convolution and the recurrence of a layer follow each other
            self._called.append(layer)
        return self._layers[layer]

    def _batch(self, count: int) -> ForwardBatch:
        geometry, requests = self._groups[0].geometry, self._requests
        host = Exact((self._stored,) * requests)
        slots = torch.arange(1, requests + 1, dtype=torch.int32, device=self._device)
        lens = torch.full((requests,), self._stored, dtype=torch.int32, device=self._device)
        if count > 1:
            table = lens.new_zeros(requests, 0)
            return ragged(geometry, lens, table, (count,) * requests, host, state_slots=slots)
        batch = BatchBuffers(geometry, self._device).uniform(Mode.DECODE, 0, requests, requests, host, tree=False)
        batch.prefix_lens.copy_(lens)
        assert batch.state_slots is not None, "a state geometry has slots"
        batch.state_slots.copy_(slots)
        return batch


class _Group:
    """Geometry, backend and pool of the layers of one shape, and the batch of the current forward."""

    batch: ForwardBatch

    def __init__(self, shape: StateShape, layers: int, limits: Limits, device: torch.device) -> None:
        loaded = load(BACKEND)
        self.geometry = StateGeometry.create(
            shape, limits, device=device_profile(device), modes=MODES, num_layers=layers
        )
        self.backend = loaded.open_state(self.geometry, device)
        nulls = self.geometry.null_slots()
        self.pool = StatePool(self.geometry, nulls + limits.max_num_reqs, nulls, device)

    def begin(self, batch: ForwardBatch) -> None:
        """Prepare the backend for a forward over `batch`."""
        self.batch = batch
        self.backend.plan(batch)
        self.backend.write_metadata(batch)
