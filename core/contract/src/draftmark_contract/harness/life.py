"""Long runs on one arena: batches of ever new lengths and layouts, and steps with compared bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from draftmark.batch import ForwardBatch
from draftmark.geometry import Mode
from draftmark.lengths import Exact, UpperBound

from ..cases.forwards import ForwardCase
from ..check import ContractViolation, Wrong
from ..oracle.formulas import max_prefix
from .harness import Harness
from .pools import raw
from .tensors import CaseTensors

_RUNS = itertools.count()
"""Seeds of `new_batches`. A second run in this process draws other lengths, which a cache does not hold yet."""


class Life:
    """Prepares the forwards of a long run, and checks the first step of each against float64.

    Args:
        harness: an opened backend with tensors for any of the forwards.
        forwards: forwards with one geometry.
    """

    def __init__(self, harness: Harness, forwards: Sequence[ForwardCase]) -> None:
        self._harness, self._forwards = harness, forwards
        self._tensors: list[CaseTensors] = []
        self._batches: list[ForwardBatch] = []
        self._first: list[torch.Tensor] = []
        self._stored: list[torch.Tensor] = []
        for number, forward in enumerate(forwards):
            harness.tensors = harness.more_tensors()
            batch = harness.load(forward, seed=number)
            harness.assert_forward(forward, batch, "the output of a first step")
            self._tensors.append(harness.tensors)
            self._batches.append(batch)
            self._first.append(raw(harness.tensors.rows(forward)[3]).clone())
            self._stored.append(torch.tensor(sorted(forward.truth.writes.values()), device=harness.subject.device))

    def step(self, number: int) -> None:
        """Run one step, and check that its output has the bits of the forward's first step.

        The slots of its rows contain NaN before it, so that a row that is not stored shows.
        """
        which, harness = number % len(self._forwards), self._harness
        forward, batch, tensors = self._forwards[which], self._batches[which], self._tensors[which]
        harness.subject.current = forward
        harness.prepare(batch)
        if not harness.kernels:
            harness.assert_metadata(forward, batch)
            return
        q, k, v, out = tensors.rows(forward)
        out.fill_(float("nan"))
        for pool in (tensors.cache.k, tensors.cache.v):
            pool.flatten(0, 1)[self._stored[which]] = float("nan")
        harness.backend.write_kv(k, v, tensors.cache, batch)
        harness.backend.attend(q, tensors.cache, batch, out)
        if not torch.equal(raw(out), self._first[which]):
            raise ContractViolation(
                f"step {number + 1 + len(self._forwards)} on one arena gives other bits than its forward's first step",
                batch=forward,
                got=f"first row {out.flatten(1)[0, :4].tolist()} …",
                expected="the same bits in every step",
                formula="docs/contract.md, what may differ between two runs",
                remedy="let no result depend on the number of steps: counters, rings of buffers, caches with a limit",
                wrong=Wrong("output", forward.rows[: forward.live_rows]),
            )


def new_batches(harness: Harness, batches: Sequence[ForwardBatch]) -> Iterator[ForwardBatch]:
    """Yield batches with other host numbers each time: lengths, live requests, and splits of the rows.

    The tensors are those of the given batches. They do not match the host numbers, so only a plan may receive them.
    """
    kind = Exact if harness.host == "exact" else UpperBound
    wall, context = max_prefix(harness.geometry), harness.geometry.limits.max_context_len
    draw = random.Random(next(_RUNS)).randrange
    for one in itertools.cycle(batches):
        if one.mode is not Mode.EXTEND:
            lens = tuple(draw(wall + 1) for _ in range(1 + draw(len(one.q_lens))))
            yield replace(one, host=kind(lens), num_reqs=len(lens))
            continue
        spare, others = one.num_rows - len(one.q_lens), len(one.q_lens) - 1
        first = 1 + (draw(spare + 1) if others else spare)
        rows = (first, *[1] * (others - 1), 2 + spare - first)[: others + 1]
        lens = tuple(draw(context - one.num_rows + 1) for _ in rows)
        yield replace(one, host=kind(lens), q_lens=rows, tail_lens=rows)
