"""Runs steps on one of vLLM's backends as vLLM's runner does: builder, forward context, layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark_contract.cases.forwards import ForwardCase
from draftmark_contract.judge.devices import device_of
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.step import Step
from draftmark_contract.oracle.history import Request, chain

from .batch import RunnerBuffers
from .config import LAYER, SECOND, max_model_len
from .layer import Layers
from .order import Ordered, in_runner_order
from .queries import rounds_queries


@dataclass
class Captured:
    """Holds one captured batch size: its graph, metadata and static tensors.

    Attributes:
        rows_each: rows of each request.
        requests: number of requests, padding included.
        metadata: metadata that the builder made for the capture. Without graphs a replay runs with it.
        graph: graph of the device; None if it has no graphs.
        q, k, v, out: static rows of the graph; None without one.
    """

    rows_each: int
    requests: int
    metadata: Any
    graph: Any = None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    out: torch.Tensor | None = None


class VllmDriver:
    """Runs the judge's steps on a vLLM backend; implements `draftmark_contract.judge.driver.Driver`."""

    def __init__(self, backend: Any, geometry: Geometry, num_pages: int, device: str) -> None:
        self.geometry = geometry
        self.layers = Layers(backend, geometry, num_pages, device)
        self.buffers = RunnerBuffers(geometry, num_pages, device)
        self.device, self._home = device, device_of(device)
        self._rounds_queries = rounds_queries(self.layers.layers[LAYER], self.layers.builder)
        self.layers.caches[LAYER].learn(self._store)
        self.layers.caches[SECOND].same_as(self.layers.caches[LAYER])

    @property
    def capturable(self) -> Capturable:
        """The batches that the builder declares capturable as full CUDA graphs."""
        return capturable(self.layers)

    @property
    def rounds_queries(self) -> bool:
        """True if the layer's quantizer or its builder rounds queries to e4m3."""
        return self._rounds_queries

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V to slots of the first layer's cache."""
        self.layers.caches[LAYER].write(slots, k, v)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at slots of the first layer's cache."""
        return self.layers.caches[LAYER].read(slots)

    def forward(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Run one eager step. The metadata covers live requests; padding rows follow the live rows."""
        ordered = self.ordered(step)
        metadata, slots = self.prepare(ordered.step)
        return ordered.back(self.layers.run(metadata, slots, *ordered.rows(q, k, v)))

    def ordered(self, step: Step) -> Ordered:
        """Return the step with its requests in the order that the runner uses for this builder."""
        return in_runner_order(step, self.layers.builder)

    def prepare(self, step: Step, **more: Any) -> tuple[Any, torch.Tensor]:
        """Return the builder's metadata of an eager step, and the slots of all its rows."""
        self.buffers.fill(step, len(step.forward.requests))
        common = self.common(step, len(step.forward.requests), step.forward.live_rows)
        with self.layers.current():
            metadata = self.layers.builder.build(common_prefix_len=0, common_attn_metadata=common, **more)
        return metadata, self.buffers.slots[: step.num_rows]

    def common(self, step: Step, requests: int, rows: int) -> Any:
        """Return vLLM's `CommonAttentionMetadata` of a step that `fill` has written to the buffers."""
        longest = max((one.rows for one in step.forward.requests), default=0)
        return self.buffers.metadata(requests, rows, longest, int(self.buffers.bounds.max()))

    # -- graphs -------------------------------------------------------------------------------------------

    def capture(self, rows_each: int, requests: int) -> Captured:
        """Capture a batch size as the runner does at startup, on a dummy batch."""
        rows = rows_each * requests
        self.buffers.dummy(rows_each, requests)
        common = self.buffers.metadata(requests, rows, rows_each, max_model_len(self.geometry))
        with self.layers.current():
            metadata = self.layers.builder.build_for_cudagraph_capture(common)
        made = Captured(rows_each, requests, metadata)
        if self._home.captures:
            self._record(made, rows)
        return made

    def replay(self, graph: Captured, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Fill the buffers, build metadata padded to the captured size, then run the captured graph."""
        rows = graph.rows_each * graph.requests
        self.buffers.fill(step, graph.requests)
        common = self.buffers.metadata(graph.requests, rows, graph.rows_each, max(1, int(self.buffers.bounds.max())))
        with self.layers.current():
            self.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
        if graph.graph is None:
            return self.layers.run(graph.metadata, self.buffers.slots[:rows], q, k, v)
        assert graph.q is not None and graph.k is not None and graph.v is not None and graph.out is not None
        with torch.inference_mode():
            for own, given in ((graph.q, q), (graph.k, k), (graph.v, v)):
                own.copy_(given)
            graph.out.fill_(float("nan"))
            graph.graph.replay()
            self._home.synchronize()
            return graph.out.clone()

    def _record(self, made: Captured, rows: int) -> None:
        a = self.geometry.attention
        shapes = ((a.num_qo_heads, a.head_dim), (a.num_kv_heads, a.head_dim), (a.num_kv_heads, a.head_dim))
        made.q, made.k, made.v = (
            torch.zeros(rows, *one, dtype=getattr(torch, a.q_dtype), device=self.device) for one in shapes
        )
        slots = self.buffers.slots[:rows]
        q, k, v = made.q, made.k, made.v

        def run() -> torch.Tensor:
            return self.layers.run(made.metadata, slots, q, k, v)

        self._home.warm_up(run)
        made.graph, made.out = self._home.record(run)

    # -- page layout --------------------------------------------------------------------------------------

    def _store(self, page: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write one page by the backend's own KV write, as rows of one request, in as few steps as possible."""
        a, most = self.geometry.attention, len(self.buffers.slots)
        dtype = getattr(torch, a.q_dtype)
        for first in range(0, a.page_size, most):
            count = min(most, a.page_size - first)
            request = Request(first, (page,), chain(count), count)
            step = Step(ForwardCase("page", self.geometry, Mode.EXTEND, 0, (request,), True, page + 1, 1))
            keys, values = (one[first : first + count].to(self.device, dtype) for one in (k, v))
            if self.layers.writes_separately:
                self.buffers.fill(step, 1)
                self.layers.store(self.buffers.slots[:count], keys, values)
                continue
            metadata, slots = self.prepare(step)
            q = torch.zeros(count, a.num_qo_heads, a.head_dim, dtype=dtype, device=self.device)
            self.layers.run(metadata, slots, q, keys, values)


def capturable(layers: Layers) -> Capturable:
    """Convert the builder's declared CUDA graph support to the judge's enum `Capturable`."""
    from .api import AttentionCGSupport

    builder = layers.builder
    get_support = getattr(builder, "get_cudagraph_support", None)
    with layers.current():
        support = (
            get_support(layers.config, layers.spec)
            if get_support
            else getattr(builder, "cudagraph_support", AttentionCGSupport.NEVER)
        )
    names = {
        "ALWAYS": Capturable.ANY,
        "UNIFORM_BATCH": Capturable.UNIFORM,
        "UNIFORM_SINGLE_TOKEN_DECODE": Capturable.ONE_ROW,
        "PURE_DECODE_ONLY": Capturable.ONE_ROW,
    }
    return names.get(support.name, Capturable.NONE)
