"""Measurement of an engine's cost table, after all captures and before the first request.

Every program runs on requests with empty contexts, and again on long contexts. The difference gives the seconds per
committed token. The outputs are meaningless and are cleared afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import HostLengths, UpperBound, fence

from ..drafts import Round
from ..layers import PagePlan
from ..state import DeviceState
from .costs import Cost, CostTable

if TYPE_CHECKING:
    from ..drafting import RunRound

REPEATS = 4
"""Timed runs of a program in a row on an asynchronous device; a CPU runs it once."""
EAGER_SIZES = 3
"""Number of batch sizes measured for each program if nothing is captured; other sizes are interpolated."""

Drafting = Callable[[int, int, HostLengths], None]
"""Call of the draft model ``drafting(size, requests, host)``; `size` is a graph's size."""
Reading = Callable[[int, int, HostLengths], None]
"""Call of the head ``reading(requests, rows, host)``; it processes `rows` rows of each request."""


class Rehearsal:
    """Fills every row of the engine's empty state with dummy requests for a measurement; `clear` removes them.

    Args:
        seat: function that writes the inputs of drafting, from the number of committed tokens of each request.
    """

    def __init__(
        self, geometry: Geometry, state: DeviceState, pages: PagePlan, seat: Callable[[int], None] = lambda load: None
    ) -> None:
        self.geometry, self.state, self._seat = geometry, state, seat
        reqs, width, own = geometry.max_reqs, geometry.max_pages_per_req, pages.total - pages.null
        ids = torch.arange(reqs * width, dtype=torch.int32, device=state.device) % own + pages.null
        state.page_table[:reqs].copy_(ids.view(reqs, width))
        self._tokens_of_pool = own * geometry.attention.page_size

    def longest(self, requests: int) -> int:
        """Return the most committed tokens that fit into the pages of each of `requests` requests."""
        return max(0, min(self.geometry.limits.max_context_len - 1, self._tokens_of_pool // requests))

    def seconds(self, requests: int, load: int, run: Callable[[HostLengths], None]) -> float:
        """Return the seconds of `run` for `requests` requests with `load` committed tokens each, after a warm-up."""
        host = UpperBound((load,) * requests)
        self._fill(requests, load)
        run(host)
        self._wait()
        repeats = 1 if self.state.device.type == "cpu" else REPEATS
        start = time.perf_counter()
        for _ in range(repeats):
            self._fill(requests, load)
            run(host)
        self._wait()
        return (time.perf_counter() - start) / repeats

    def _wait(self) -> None:
        """Wait for all enqueued work."""
        end = fence(self.state.device)
        end.record()
        end.synchronize()

    def _fill(self, requests: int, load: int) -> None:
        """Reset rows, lengths and trees, which the last run changed; every tree is a chain of token 0."""
        state, reqs = self.state, self.geometry.max_reqs
        state.rows.copy_(torch.arange(reqs, device=state.device))
        state.rows[requests:] += reqs  # padding entry i uses null row max_reqs + i
        state.lengths.device[:reqs].fill_(load)
        state.tokens.zero_()
        state.parents.copy_(torch.arange(-1, state.parents.shape[1] - 1, device=state.device).expand_as(state.parents))
        self._seat(load)

    def clear(self) -> None:
        """Restore the empty state of every row."""
        state, reqs = self.state, self.geometry.max_reqs
        state.fill((), reqs)
        state.page_table[:reqs].zero_()
        state.lengths.device.zero_()
        state.pending.zero_()
        state.tokens.fill_(-1)
        state.parents.zero_()
        state.parents[:, 0] = -1


def measure(
    rehearsal: Rehearsal,
    run_round: RunRound,
    draft: Drafting | None = None,
    take_over: Drafting | None = None,
    catch_up: Reading | None = None,
    most_rows: int = 1,
) -> CostTable:
    """Return the cost table of an engine with captured or eager rounds.

    Args:
        rehearsal: dummy requests of the timed rounds.
        run_round: runs the target's forward of a round.
        draft: runs the draft model before a round; called with a padded batch size. None for drafts made on the host.
        take_over: runs the draft model after a round; called with a number of rows. None for drafts made on the host.
        catch_up: runs the draft model over accepted rows that it has not read yet, at most `most_rows` of a
            request. Measuring it also compiles its kernels before the first request.
        most_rows: see `catch_up`.
    """
    limits = rehearsal.geometry.limits
    sizes = limits.capture_batch_sizes or _some(range(1, rehearsal.geometry.max_reqs + 1))
    budgets = limits.row_budgets if limits.capture_batch_sizes else _some(limits.row_budgets)

    def decode(size: int, host: HostLengths) -> None:
        run_round(Round(Mode.DECODE, size), size, host)

    def verify(budget: int, host: HostLengths) -> None:
        requests = _live(rehearsal, budget)
        run_round(Round(Mode.RAGGED_VERIFY, budget), requests, host)
        if take_over is not None:
            take_over(budget, requests, host)

    drafting, catching_up = {}, {}
    if draft is not None:
        drafting = {size: _cost(rehearsal, size, partial(draft, size, size)) for size in sizes}
    if catch_up is not None:
        catching_up = {size: _by_rows(rehearsal, size, catch_up, most_rows) for size in sizes}
    return CostTable(
        {size: _cost(rehearsal, size, partial(decode, size)) for size in sizes},
        {budget: _cost(rehearsal, _live(rehearsal, budget), partial(verify, budget)) for budget in budgets},
        drafting,
        catching_up,
    )


def _cost(rehearsal: Rehearsal, requests: int, run: Callable[[HostLengths], None]) -> Cost:
    load = rehearsal.longest(requests)
    light = rehearsal.seconds(requests, 0, run)
    heavy = rehearsal.seconds(requests, load, run) if load else light
    return Cost(light, max(0.0, heavy - light) / max(1, load * requests))


def _by_rows(rehearsal: Rehearsal, requests: int, run: Reading, most: int) -> Cost:
    load = rehearsal.longest(requests)
    each = max(1, min(most, load))
    requests = max(1, min(requests, rehearsal.geometry.limits.max_extend_tokens // each))
    one, many = (rehearsal.seconds(requests, load, partial(run, requests, rows)) for rows in (1, each))
    per_row = max(0.0, many - one) / max(1, requests * (each - 1))
    return Cost(max(one - requests * per_row, one / 2), per_row)


def _live(rehearsal: Rehearsal, budget: int) -> int:
    """Return the number of requests with which a row budget is measured: half the budget, from 1 to max_reqs."""
    return max(1, min(rehearsal.geometry.max_reqs, budget // 2))


def _some(sizes: Iterable[int]) -> tuple[int, ...]:
    every = sorted(sizes)
    return tuple({every[i * (len(every) - 1) // (EAGER_SIZES - 1)] for i in range(EAGER_SIZES)})
