"""Runs steps on a backend with a `SequenceMemory`. The judge keeps KV by slots, and the backend by sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark_contract.cases.forwards import ForwardCase
from draftmark_contract.check import Unjudged
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.step import Step
from draftmark_contract.oracle.history import Request, chain

from .batch import RunnerBuffers
from .config import dtype_of, max_model_len
from .driver import capturable
from .layer import Layers
from .order import in_runner_order
from .sequence_memory import Schedule

NO_SLOTS = "the backend takes no slots, so no row can be left out of its memory, and padding rows have no meaning"
CACHE = {"enable_prefix_caching": False}
"""Settings of a server with drafts, where shared pages would need vLLM's block table."""


class SequenceDriver:
    """Implements `draftmark_contract.judge.driver.Driver` for a backend that keeps KV by sequences.

    `write` and `read` use tensors of the judge. Each eager step starts new sequences: prompts bring the prefixes into
    the backend's memory, through the backend. So its memory is checked by outputs only.
    """

    def __init__(self, memory: Any, geometry: Geometry, num_pages: int, device: str) -> None:
        a = geometry.attention
        self.geometry, self.device = geometry, device
        self.layers = Layers(memory.backend, geometry, None, device, CACHE)
        self.buffers = RunnerBuffers(geometry, num_pages, device)
        slots = num_pages * a.page_size
        shape = (slots, a.num_kv_heads, a.head_dim)
        self._pools = [torch.zeros(shape, dtype=dtype_of(a.kv_dtype), device=device) for _ in "kv"]
        with self.layers.current():
            self._memory = memory(list(self.layers.layers), self.layers.spec, self.layers.config, 2 * slots)
        self._started = 0
        self.names: tuple[str, ...] = ()

    @property
    def capturable(self) -> Capturable:
        """The batches that the builder declares capturable as full CUDA graphs."""
        return capturable(self.layers)

    rounds_queries = False

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep K and V of these slots; a sequence that starts later gets them."""
        for pool, values in zip(self._pools, (k, v), strict=True):
            pool[slots] = values.to(pool.device)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of these slots."""
        return self._pools[0][slots].clone(), self._pools[1][slots].clone()

    def forward(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Start a sequence for each request, bring its prefix into the backend's memory, and run the step.

        Raises:
            Unjudged: the step has rows without a slot.
        """
        if step.unstored or step.surplus or step.padding:
            raise Unjudged(NO_SLOTS)
        ended = self.names
        ordered = in_runner_order(step, self.layers.builder)
        requests = ordered.step.forward.requests
        self.names = tuple(f"request-{self._started + number}" for number in range(len(requests)))
        self._started += len(requests)
        new: Sequence[str] = self.names
        for name, one in zip(self.names, requests, strict=True):
            for first in range(0, one.prefix, len(self.buffers.slots)):
                count = min(one.prefix - first, len(self.buffers.slots))
                self._prompt(name, Request(first, one.pages, chain(count), count), ended, new)
                ended, new = (), ()
        return ordered.back(self._run(ordered.step, self.names, ended, new, *ordered.rows(q, k, v)))

    def proceed(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Run the next step of the last step's requests, which the scheduler has set back to the new prefixes."""
        return self._run(step, self.names, (), (), q, k, v)

    def capture(self, rows_each: int, requests: int) -> Any:
        """Reject: there is no block table that a graph could read."""
        raise Unjudged("graphs of a backend with its own memory are not judged")

    def replay(self, graph: Any, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Reject, as `capture`."""
        raise Unjudged("graphs of a backend with its own memory are not judged")

    def _prompt(self, name: str, request: Request, ended: Sequence[str], new: Sequence[str]) -> None:
        a = self.geometry.attention
        slots = [
            request.pages[n // a.page_size] * a.page_size + n % a.page_size
            for n in range(request.prefix, request.prefix + request.rows)
        ]
        where = torch.tensor(slots, dtype=torch.int64, device=self.device)
        k, v = (one.to(dtype_of(a.q_dtype)) for one in self.read(where))
        q = torch.zeros(request.rows, a.num_qo_heads, a.head_dim, dtype=dtype_of(a.q_dtype), device=self.device)
        pages = max(request.pages) + 1
        step = Step(ForwardCase("prompt", self.geometry, Mode.EXTEND, 0, (request,), True, pages, 1))
        self._run(step, (name,), ended, new, q, k, v)

    def _run(
        self, step: Step, names: Sequence[str], ended: Sequence[str], new: Sequence[str], *rows: torch.Tensor
    ) -> torch.Tensor:
        requests = step.forward.requests
        computed: Mapping[str, int] = {name: one.prefix for name, one in zip(names, requests, strict=True)}
        counts = {name: one.rows for name, one in zip(names, requests, strict=True)}
        self.buffers.fill(step, len(requests))
        longest = max(counts.values(), default=0)
        common = self.buffers.metadata(
            len(requests), step.num_rows, longest, min(int(self.buffers.bounds.max()), max_model_len(self.geometry))
        )
        with self.layers.current():
            self._memory.update(Schedule(new, ended, computed, counts))
            metadata = self.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
        out = self.layers.run(metadata, self.buffers.slots[: step.num_rows], *rows)
        where = torch.tensor(list(step.writes.values()), dtype=torch.int64, device=self.device)
        for pool, values in zip(self._pools, rows[1:], strict=True):
            pool[where] = values[: len(where)].to(pool.dtype)
        return out
