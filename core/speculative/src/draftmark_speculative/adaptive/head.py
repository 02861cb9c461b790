"""Adaptive drafting with a draft head.

All work that depends on drafts runs on the device. The host picks the budget from the reports of finished rounds. So
the host waits for no round in flight, and overlap is supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from draftmark import Mode
from draftmark.runtime import (
    ForwardBatch,
    GraphKey,
    HostLengths,
    Program,
    UpperBound,
    VerifyResult,
    ragged,
    to_device,
)

from ..drafts import Prefill, Round, Speculation
from ..eagle.drafter import HeadDrafter
from ..eagle.tree_builder import DraftTreeBuilder
from ..layers import AttentionLayers
from ..models import CausalLM
from ..pending import FinishedForward
from ..ragged import Admitted, RaggedRows, rows_of_nodes
from ..request import Request
from ..scheduler import by_row
from ..state import DeviceState, GraphRunner
from .backlog import Backlog
from .calibration import Calibration
from .candidates import Candidates
from .costs import CostTable
from .forecast import Forecast
from .measure import Rehearsal, measure
from .policy import Load, Policy

if TYPE_CHECKING:
    from ..drafting import RunRound

BACKLOG_BYTES, BACKLOG_ROWS = 1 << 28, (32, 512)
"""Bytes for features of plain rounds, and the least and the most rows of one request.

When they are full and drafting is off, the head processes them in one forward if that is cheap."""


class AdaptiveHeadDrafter(HeadDrafter):
    """Drafts with a head only in rounds where drafts should raise tokens per second, under a row budget.

    In rounds without drafts the head does not run, and their rows are appended to a `Backlog`. The head processes the
    backlog in one forward when drafting resumes or when the backlog is full.
    """

    def __init__(
        self,
        speculation: Speculation,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        runner: GraphRunner,
        costs: CostTable | None,
        probe_share: float,
    ) -> None:
        super().__init__(speculation, model, layers, state, runner)
        geometry, device = layers.geometry, model.device
        self.modes, self.budgets = (Mode.DECODE,), geometry.limits.row_budgets
        depth = min(geometry.draft.num_steps, geometry.draft.num_draft_tokens - 1)
        self._costs, self._probe_share = costs, probe_share
        self._calibration = Calibration(2 * geometry.max_reqs, depth, device)
        self._candidates = Candidates(geometry, state, depth, self._calibration)
        width, most = self.accepted.features.shape[2], geometry.max_rows(Mode.RAGGED_VERIFY)
        least, largest = BACKLOG_ROWS
        fitting = BACKLOG_BYTES // (geometry.max_reqs * width * model.dtype.itemsize)
        room = min(max(least, min(largest, fitting)), geometry.limits.max_extend_tokens)
        self._features = torch.zeros(most, width, dtype=model.dtype, device=device)
        self._path = torch.zeros_like(state.tokens)
        self._ragged_rows = RaggedRows(geometry, device)
        self._backlog = Backlog(geometry.max_reqs, room, width, model.dtype, device)
        self._forecast = Forecast(self._candidates.points)
        self._sent, self._rested = Round(Mode.DECODE, 0), 0

    def capture(self) -> None:
        """Capture drafting at every captured batch size, and DRAFT_EXTEND at every budget."""
        limits = self._geometry.limits
        for budget in sorted(limits.row_budgets, reverse=True):
            padded = min(self._geometry.max_reqs, budget)
            self._state.fill((), padded)
            host = self._layers.lengths_at_capture(padded)
            batch = self._batch.ragged_verify(budget, padded, host, tree=False)
            self._layers.plan(batch)
            self._runner.capture(GraphKey(Program.DRAFT_EXTEND, budget), partial(self._take_over_ragged, batch))
        for size in sorted(limits.capture_batch_sizes, reverse=True):
            self._state.fill((), size)
            self.capture_steps(size, self._layers.lengths_at_capture(size))

    def ready(self, run_round: RunRound) -> None:
        """Measure the cost of rounds, unless a cost table was given."""
        table = self._costs
        if table is None:
            rehearsal = Rehearsal(self._geometry, self._state, self._layers.pages, self._seat)
            table = measure(
                rehearsal, run_round, self.grow, self._take_over_budget, self._rehearse_backlog, self._backlog.room
            )
            self._clear(rehearsal)
        self._policy = Policy(table, self.budgets, self._probe_share)

    def extend(self, prefill: Prefill) -> None:
        """Run the head over a prefill, and reset backlog and calibration of state rows with a finished prompt."""
        super().extend(prefill)
        self._backlog.forget(prefill.ended)
        self._calibration.forget(prefill.ended)

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Draft for a budget of rows, or choose plain decoding; return the round."""
        budget = self._decide(requests, padded)
        if budget is None:
            if self._backlog.full(requests):
                self._keep_up(requests, padded)
            self._backlog.counted(requests)
            self._rested += 1
            self._sent = Round(Mode.DECODE, padded)
            return self._sent
        self._catch_up(requests)
        if self._rested:
            self._calibration.age(self._rested)
            self._forecast.age(self._rested)
            self._rested = 0
        self._sent = Round(Mode.RAGGED_VERIFY, budget)
        self._state.fill(requests, max(padded, min(budget, self._geometry.max_reqs)))
        self.grow(padded, len(requests), host)
        return self._sent

    def admit(self, batch: ForwardBatch) -> Admitted:
        """Return the likeliest nodes of the head's trees, up to the row budget."""
        return self._candidates.admit(batch)

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Store the accepted path for the head. After a plain round, append each request's row to the backlog."""
        if batch.mode is Mode.DECODE:
            rows = self._state.rows[: batch.padded_reqs]
            self._backlog.append(rows, result.tokens[:, 0], features)
            return
        size, accepted = batch.padded_reqs, self.accepted
        accepted.prefix_lens[:size].copy_(batch.prefix_lens)
        accepted.tokens[:size].copy_(result.tokens)
        accepted.accept_lens[:size].copy_(result.accept_lens)
        self._features[: batch.num_rows].copy_(features)
        self._path[:size].copy_(rows_of_nodes(batch, result.accept_index))
        self._candidates.observe(result)

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Run the head over the accepted path; do nothing after a plain round."""
        if self._sent.mode is not Mode.DECODE:
            self._take_over_budget(self._sent.size, num_reqs, host)

    @property
    def report(self) -> torch.Tensor | None:
        """Expected tokens of the latest round for each number of rows per request; None after a plain round."""
        return None if self._sent.mode is Mode.DECODE else self._candidates.report

    def learn(self, sent: Round, finished: Sequence[FinishedForward], report: Sequence[float] | None) -> None:
        """Add a round's report and its accepted tokens to the forecast."""
        if report is not None:
            accepted = sum(len(one.tokens) for one in finished)
            self._forecast.learn(report, sent.size, len(finished), accepted)

    def _take_over_budget(self, budget: int, num_reqs: int, host: HostLengths) -> None:
        """Run the head over the accepted paths, in a batch with the row budget that the round verified."""
        batch = self._batch.ragged_verify(budget, num_reqs, host, tree=False)
        self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT_EXTEND, budget), partial(self._take_over_ragged, batch))

    def _take_over_ragged(self, batch: ForwardBatch) -> None:
        """Run the head over one row for each accepted token, and keep the newest row's output. Captured."""
        size, accepted = batch.padded_reqs, self.accepted
        rows = self._state.rows[:size]
        counts = torch.where(rows < self._state.lengths.first_null_row, accepted.accept_lens[:size], 0)
        self._gather(batch, accepted.prefix_lens[:size])
        tokens, path = accepted.tokens[:size], self._path[:size]
        placed = self._ragged_rows.write(batch, Admitted(tokens, path, counts, path), self._layers.tree_ops)
        self._layers.begin(batch)
        features = self._features.index_select(0, placed.of_nodes(path))
        hidden = self._run(placed.of_nodes(tokens).clamp(min=0), self._head.fuse(features), batch.positions)
        newest = (batch.q_indptr[1:] - 1).clamp(min=0)
        self._keep(rows, hidden.index_select(0, newest))

    def _plant(self, size: int, growth: DraftTreeBuilder) -> None:
        """Write the draft trees into the state, and the nodes' acceptance probabilities into `Candidates`. Captured."""
        tokens, parents, chances, levels = growth.best_with_chances(self._geometry.draft.num_draft_tokens - 1)
        self._state.set_draft_tokens(size, tokens, parents)
        count, candidates = tokens.shape[1], self._candidates
        current = self._backlog.current(self._state.rows[:size])
        candidates.chances[:size, 1 : count + 1].copy_(chances * current[:, None])
        candidates.levels[:size, 1 : count + 1].copy_(levels)

    # -- host side: choice of the round, backlog ------------------------------------------------------------

    def _decide(self, requests: Sequence[Request], padded: int) -> int | None:
        if all(map(self._backlog.lapsed, requests)):
            return None
        load = self._load(requests, padded)
        if not self._forecast.known:
            return self._policy.start(load)
        tokens = partial(self._forecast.tokens, requests=load.live)
        return self._policy.decide(load, tokens, sum(map(self._backlog.waiting, requests)))

    def _load(self, requests: Sequence[Request], padded: int) -> Load:
        return Load(len(requests), padded, sum(self._state.lengths.upper_bound(by_row(requests)).lens))

    def _keep_up(self, requests: Sequence[Request], padded: int) -> None:
        """Empty a full backlog: run the head over it if the policy's time allowance suffices, else drop its rows."""
        waiting = sum(map(self._backlog.waiting, requests))
        if self._policy.keeps_up(self._load(requests, padded), waiting):
            self._catch_up(requests)
            return
        full = [r for r in requests if self._backlog.full([r])]
        self._backlog.lapse(full, to_device(by_row(full), self._state.device))

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Run the head over the requests' whole backlog; max_extend_tokens limits the rows of one forward."""
        for chunk in self._chunks([r for r in requests if self._backlog.waiting(r)]):
            numbers = by_row(chunk)
            bound = UpperBound(self._state.lengths.upper_bound(numbers).lens)
            self._read_backlog(numbers, tuple(self._backlog.waiting(r) for r in chunk), bound)
        self._backlog.caught_up(requests)

    def _read_backlog(self, numbers: Sequence[int], counts: tuple[int, ...], bound: UpperBound) -> None:
        """Run the head over the first ``counts[i]`` backlog entries of each state row ``numbers[i]``."""
        state, device, room = self._state, self._state.device, self._backlog.room
        rows = to_device(numbers, device)
        prefix_lens = state.lengths.device.index_select(0, rows) - to_device(counts, device, torch.int32)
        batch = ragged(self._geometry, prefix_lens, state.page_table.index_select(0, rows), counts, bound)
        places = [row * room + i for row, count in zip(numbers, counts, strict=True) for i in range(count)]
        tokens, features = self._backlog.read(to_device(places, device))
        last = to_device([end - 1 for end in accumulate(counts)], device)
        super().extend(Prefill(batch, features, tokens[None], rows, rows, last))
        self._backlog.forget(rows)

    def _chunks(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Yield groups of requests with backlogs that fit into one forward."""
        chunk: list[Request] = []
        for request in requests:
            total = sum(map(self._backlog.waiting, chunk)) + self._backlog.waiting(request)
            if chunk and total > self._geometry.limits.max_extend_tokens:
                yield chunk
                chunk = []
            chunk.append(request)
        if chunk:
            yield chunk

    # -- measurement of the cost table ----------------------------------------------------------------------

    def _seat(self, load: int) -> None:
        self.accepted.prefix_lens.fill_(load)
        self._candidates.chances.fill_(1)

    def _rehearse_backlog(self, requests: int, rows: int, host: HostLengths) -> None:
        """Run the head over `rows` backlog rows of each of the first `requests` requests, to measure its cost."""
        assert isinstance(host, UpperBound), "a rehearsal passes upper bounds"
        self._read_backlog(range(requests), (rows,) * requests, host)

    def _clear(self, rehearsal: Rehearsal) -> None:
        """Clear the tensors that the cost measurement wrote: their values could be NaN."""
        rehearsal.clear()
        self._backlog.clear()
        self._calibration.forget()
        for tensor in (self.accepted.prefix_lens, self._features, self._path, self._hidden, self._scores, self._tokens):
            tensor.zero_()
        self.accepted.accept_lens.fill_(1)
        self.accepted.tokens.fill_(-1)
        self._candidates.chances.zero_()
        self._candidates.levels.zero_()
