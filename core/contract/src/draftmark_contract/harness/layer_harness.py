"""Runs forwards of several layers: each has its own cache, scales and rows, and layer shapes may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftmark.batch import ForwardBatch
from draftmark.geometry import Geometry
from draftmark.graphs import GraphKey

from ..backend_under_test import BackendUnderTest
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from .contents import fill
from .expected import Expected, expected_of
from .graph_harness import no_sync
from .harness import Harness
from .tensors import CaseTensors

ROOM = 6
"""Layers of a pool. A model's layers lie at drawn places, as where some layers are of another kind."""


@dataclass
class Layer:
    """Holds one layer: the harness of the backend for its shape, and the layer's own tensors."""

    harness: Harness
    tensors: CaseTensors

    def of(self, forward: ForwardCase) -> ForwardCase:
        """Return the forward with this layer's geometry."""
        return replace(forward, geometry=self.harness.geometry)


class LayerHarness:
    """Runs the layers of a model. Layers of one shape share a backend, its metadata and a KV pool; all share the batch.

    A model of one shape has three layers, any other one two layers of each shape.

    Args:
        draw: value from which the places of the layers in their pools are drawn.

    Attributes:
        harnesses: one per distinct shape.
        layers: in order of execution. Shapes alternate, so that each layer finds stale buffers of another shape.
    """

    def __init__(self, subject: BackendUnderTest, shapes: Sequence[Geometry], num_pages: int, draw: object = 0) -> None:
        self.subject = subject
        self.harnesses = [Harness(subject, shape, num_pages) for shape in shapes]
        self.layers: list[Layer] = []
        pages = [harness.tensors.num_pages for harness in self.harnesses]
        for number in range(3 if len(shapes) == 1 else 2):
            for harness, count in zip(self.harnesses, pages, strict=True):
                first = harness.tensors if number else None
                own = CaseTensors(harness.geometry, subject.device, count, None, number, first, ROOM, draw)
                if not number:
                    harness.tensors = own
                self.layers.append(Layer(harness, own))
        self._state = subject.graph_state(shapes[0])

    def load(self, forward: ForwardCase, seed: int = 0, host: str | None = None) -> tuple[ForwardBatch, list[Expected]]:
        """Fill the tensors of every layer with a forward. Return the batch and the expected result of each layer."""
        batch = self.layers[0].tensors.set(forward, host or self._host)
        for number, layer in enumerate(self.layers):
            fill(layer.tensors, layer.of(forward), Contents.USUAL, seed + 100 * number)
        return batch, [expected_of(layer.of(forward), layer.tensors) for layer in self.layers]

    @property
    def capture_host(self) -> str:
        """Kind of host lengths at capture: exact if needed, else unknown, so that the plan fits every replay."""
        return "unknown" if all(harness.bounded for harness in self.harnesses) else "exact"

    @property
    def _host(self) -> str:
        """Least exact kind of host lengths that the backends of all shapes accept."""
        return max((harness.host for harness in self.harnesses), key=("unknown", "upper_bound", "exact").index)

    def place(self, forward: ForwardCase) -> ForwardCase:
        """Return the forward with the largest number of null pages that the backend of any shape needs."""
        most = max(harness.null_pages for harness in self.harnesses)
        return forward if most == forward.null_pages else forward.with_null_pages(most)

    def plan(self, batch: ForwardBatch) -> None:
        """Run the host part of a step, `plan`, on the backend of every shape."""
        for harness in self.harnesses:
            harness.backend.plan(batch)

    def step(self, forward: ForwardCase, batch: ForwardBatch) -> None:
        """Run the device part of a step: write_metadata for every shape, then every layer."""
        for harness in self.harnesses:
            harness.backend.write_metadata(batch)
        for layer in self.layers:
            if layer.harness.kernels:
                layer.harness.layer(layer.of(forward), batch, layer.tensors)

    def capture(self, key: GraphKey, forward: ForwardCase, batch: ForwardBatch) -> None:
        """Run a step of all layers eagerly as warm-up, then capture it."""
        self.plan(batch)
        self.step(forward, batch)
        self.plan(batch)
        with no_sync(self.subject.device):
            self._state.capture(key, lambda: self.step(forward, batch))

    def replay(self, key: GraphKey, batch: ForwardBatch) -> None:
        """Run plan(), then replay the captured graph."""
        self.plan(batch)
        with no_sync(self.subject.device):
            self._state.replay(key)

    def assert_layers(self, forward: ForwardCase, batch: ForwardBatch, expected: list[Expected], what: str) -> None:
        """Check each layer's cache and output, and the bytes around the buffers."""
        for number, (layer, one) in enumerate(zip(self.layers, expected, strict=True)):
            own = layer.of(forward)
            if not layer.harness.kernels:
                layer.harness.interpret(own, batch, layer.tensors, layer.harness.buffers())
            layer.harness.assert_cache(own, one, layer.tensors)
            layer.harness.assert_output(own, one, f"layer {number}'s output {what}", layer.tensors.rows(own)[3])
        for harness in self.harnesses:
            harness.assert_guards(forward)
