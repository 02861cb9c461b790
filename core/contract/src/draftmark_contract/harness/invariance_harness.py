"""Runs drawn batches that contain the same requests, and compares the bits of these requests' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftmark.batch import ForwardBatch

from ..backend_under_test import BackendUnderTest
from ..cases.batch_invariance import Company, Draw
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from ..check import ContractViolation, Wrong
from ..oracle.history import kv_slots
from .expected import Expected
from .graph_harness import no_sync
from .harness import Harness
from .pools import raw

SMALL = 2.0**-8
"""Size of the values that the compared rows see besides large ones that cancel."""
Loaded = tuple[ForwardCase, ForwardBatch, Expected]


class InvarianceHarness:
    """Runs the batches of a draw, in which every compared request has the same rows and KV everywhere.

    The V rows of a request's second half are those of its first half, negated, under the same keys. So each output is
    a small remainder of large terms, and another order of summation changes its bits in any dtype.

    Args:
        batches: every batch that will run, for the size of the pool.
    """

    def __init__(self, subject: BackendUnderTest, draw: Draw, batches: list[Company]) -> None:
        pages = max(one.forward.num_pages for one in batches)
        self.harness = Harness(subject, draw.geometry, pages)
        self._draw, self._hosts = draw, self.harness.host_kinds  # eager batches alternate
        self._alone: dict[int, torch.Tensor] = {}

    def run_alone(self) -> None:
        """Run each compared request by itself, check its output, and keep the bits."""
        for company in self._draw.alone():
            self._run(company, 0, self._hosts[0], "by itself, the output")
            self._alone |= self._bits(company)

    def assert_same_bits(self, company: Company, number: int) -> None:
        """Run a batch eagerly, and check that the compared requests have the bits that they have by themselves."""
        host = self._hosts[number % len(self._hosts)]
        self._run(company, number, host, "the output")
        self._assert_bits(company, f"in an eager batch with {host} host lengths")

    def captured(self, company: Company) -> Callable[[Company, int], None]:
        """Capture a batch. Return a function that replays its graph on another batch and checks that batch's bits."""
        harness, key = self.harness, key_of(company.forward)
        state = harness.subject.graph_state(harness.geometry)
        forward, batch, _ = self._load(company, 0, self._hosts[0])

        def step() -> None:
            harness.backend.write_metadata(batch)
            if harness.kernels:
                harness.layer(forward, batch)

        harness.backend.plan(batch)
        step()  # Run the step once before the capture, as an engine's warm-up does.
        with no_sync(harness.subject.device):
            state.capture(key, step)

        def assert_replay(other: Company, number: int) -> None:
            forward, batch, expected = self._load(other, number, self._hosts[number % len(self._hosts)])
            harness.backend.plan(batch)
            with no_sync(harness.subject.device):
                state.replay(key)
            self._assert_step(forward, batch, expected, f"the replay of {key}")
            self._assert_bits(other, f"in a replay of {key}")

        return assert_replay

    def _load(self, company: Company, number: int, host: str) -> Loaded:
        """Load a batch, with the compared requests' own contents, and return it with its expected result."""
        forward = self.harness.place(company.forward)
        batch = self.harness.load(forward, host, number)
        self._fill(forward, company.places)
        return forward, batch, self.harness.expected(forward)

    def _run(self, company: Company, number: int, host: str, what: str) -> None:
        forward, batch, expected = self._load(company, number, host)
        self.harness.run(forward, batch)
        self._assert_step(forward, batch, expected, what)

    def _assert_step(self, forward: ForwardCase, batch: ForwardBatch, expected: Expected, what: str) -> None:
        if self.harness.kernels:
            self.harness.assert_step(forward, batch, expected, what)

    def _fill(self, forward: ForwardCase, places: Sequence[tuple[int, int]]) -> None:
        """Give each compared request its own rows and KV, and the layer its own sinks, equal in every batch."""
        tensors, size = self.harness.tensors, self.harness.geometry.attention.page_size
        pools = (tensors.cache.k, tensors.cache.v)
        for n, index in places:
            one, dice = forward.requests[index], torch.Generator().manual_seed(n)
            rows = _rows(forward, index)
            stored = torch.tensor(kv_slots(one, size)[: one.prefix + one.tail - one.rows], dtype=torch.int64)
            keys, values = (torch.randn(len(stored), *pools[0].shape[2:], generator=dice) for _ in pools)
            half = len(stored) // 2
            keys[half : 2 * half], values[half : 2 * half] = keys[:half], -values[:half]
            values[2 * half :] *= SMALL
            for pool, content in zip(pools, (keys, values), strict=True):
                where = stored.to(pool.device)
                raw(pool)[where // size, where % size] = raw(content.to(pool.dtype)).to(pool.device)
            assert tensors.v is not None, "these rounds have layers with K and V apart only"
            for tensor, scale in ((tensors.q, 1.0), (tensors.k, 1.0), (tensors.v, SMALL)):
                tensor[rows] = (torch.randn(tensor[rows].shape, generator=dice) * scale).to(tensor)
        heads = self.harness.geometry.attention.num_qo_heads
        tensors.set_sinks(torch.randn(heads, generator=torch.Generator().manual_seed(1)))

    def _bits(self, company: Company) -> dict[int, torch.Tensor]:
        """Return the output bits ``[rows, heads, head_dim]`` of each compared request that is present."""
        out = raw(self.harness.tensors.out)
        return {n: out[_rows(company.forward, index)].clone() for n, index in company.places}

    def _assert_bits(self, company: Company, where: str) -> None:
        if not self.harness.kernels:
            self.harness.subject.interpreted()
            return
        for n, got in self._bits(company).items():
            differs = got != self._alone[n]
            if bool(differs.any()):
                index = dict(company.places)[n]
                row, head, dim = (int(i) for i in differs.nonzero()[0])
                dtype = self.harness.tensors.out.dtype
                here, alone = (float(bits.view(dtype)[row, head, dim]) for bits in (got, self._alone[n]))
                raise ContractViolation(
                    f"{int(differs.sum())} of {differs.numel()} output values of request {index} have other bits "
                    f"{where} than in a batch of its own",
                    batch=company.forward,
                    got=f"{here:.9g} at row {row}, head {head}, dim {dim}",
                    expected=f"{alone:.9g}, as by itself",
                    formula="Limits.batch_invariant",
                    remedy="choose tiles, splits and kernels by the geometry and by the request's own length, never by "
                    "the batch or the host's lengths; or set BackendInfo.batch_invariant to False",
                    wrong=Wrong("output", [(index, row)]),
                )


def _rows(forward: ForwardCase, index: int) -> slice:
    first = sum(one.rows for one in forward.requests[:index])
    return slice(first, first + forward.requests[index].rows)
