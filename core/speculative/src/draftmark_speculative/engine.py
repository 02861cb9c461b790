"""Engine: continuous batching of speculative rounds over one model and one backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from draftmark import BackendRefusal, GeometryError, HostLengthsNeed, Mode, RequestError, load
from draftmark.runtime import TreeOps, padded_batch_size

from .allocator import CacheExhausted, PageAllocator
from .arguments import check_kind
from .config import EngineConfig, HostKind
from .drafting import draft_model, make_drafting
from .drafts import Round
from .forwards import Forwards
from .layers import open_layers
from .models import CausalLM
from .pending import FinishedForward, HostView, PendingForward
from .prefix_cache import PrefixCache
from .request import FinishReason, Progress, Request, checked_request, checked_stop
from .scheduler import Scheduler, by_row
from .state import DeviceState, GraphRunner
from .statistics import Statistics


class Engine:
    """Speculative decoder of many requests, which join and leave between steps.

    Args:
        wrap_tree_ops: for measurements only: wraps the backend's `TreeOps`, which verify and compact. If the wrapper
            changes which tokens are accepted, the text is no longer the model's.

    Raises:
        RequestError, GeometryError, BackendLoadError, BackendRefusal: at construction, before any token.
    """

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, wrap_tree_ops: Callable[[TreeOps], TreeOps] | None = None
    ) -> None:
        kinds = (("model", model, CausalLM, "use load_model"), ("config", config, EngineConfig, "write EngineConfig()"))
        for name, value, kind, remedy in kinds:
            check_kind(name, value, kind, f"a {kind.__name__}", remedy)
        config.check_overlap()
        if config.max_context_len > model.max_context_len:
            raise GeometryError(
                "limits.max_context_len",
                config.max_context_len,
                f"model {model.name!r} was made for {model.max_context_len} positions",
                "lower it, or take a model with a longer context",
            )
        self.model, self.config, self.statistics = model, config, Statistics()
        loaded = load(config.backend)
        config.speculation.require(loaded)
        self._models = open_layers(model, draft_model(config.speculation, model), loaded, config)
        self._check_host_lengths()
        self._layers = layers = self._models[0]
        if wrap_tree_ops is not None:
            layers.tree_ops = wrap_tree_ops(layers.tree_ops)
        self.geometry = layers.geometry
        self.pages = PageAllocator(layers.pages.total, layers.pages.null)
        states = layers.states
        geometry = None if states is None else states.geometry
        self._state = state = DeviceState(self.geometry, model.device, layers.pages.unique_slots, geometry)
        self._runner = GraphRunner(loaded.graph_state(self.geometry, model.device) if config.graph else None)
        self._drafting = make_drafting(config.speculation, model, self._models[-1], state, self._runner)
        self._scheduler = Scheduler(self.geometry, self.pages, state, states, self._cache(), self._skips_updates)
        self._forwards = Forwards(model, layers, state, config.sampling, self._drafting, self._runner)
        self._pending: deque[PendingForward] = deque()
        self._host = HostView(state.lengths, config)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        if config.graph:
            with torch.inference_mode():
                self._forwards.capture()
                self._drafting.capture()
        with torch.inference_mode():
            self._drafting.ready(self._forwards.round)

    @property
    def busy(self) -> bool:
        """True if any request is not finished."""
        return self._scheduler.busy

    @property
    def graph_bytes(self) -> int:
        """Bytes that all captured graphs keep allocated; 0 without graphs."""
        return 0 if self._runner.graphs is None else self._runner.graphs.pool_bytes

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int] = ()) -> int:
        """Add a request, which joins at the next step.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to generate; the request ends earlier if it reaches max_context_len.
            stop: token ids that end the request, besides the model's own. The stop token is part of the output.

        Returns:
            The request's id.

        Raises:
            RequestError: the prompt is empty or leaves no room in the context, or a token is out of range or not an
                integer.
            CacheExhausted: the whole pool is too small for this request.
        """
        limit = self.geometry.limits.max_context_len
        tokens, count = checked_request(prompt, max_new_tokens, limit, self.model.vocab_size)
        ended = checked_stop(stop, self.model.vocab_size)
        needed = self._scheduler.pages_at_worst(min(len(tokens) + count, limit))
        if needed > self.pages.total:
            raise CacheExhausted(needed, self.pages.total, self.pages.total)
        request = Request(self._next_id, tuple(tokens), count, tokens)
        request.stop = ended | frozenset(self.model.stop_token_ids)
        self._drafting.begin(request)
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.waiting.append(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        """End a request now, in any state. Its pages become free and its tokens stay readable.

        A round in flight may still write to its pages. The next owner of these pages writes after that round.
        """
        request = self._request(request_id)
        if request.finish is None:
            request.finish = FinishReason.CANCELLED
            self._leave(request)

    def output(self, request_id: int) -> tuple[int, ...]:
        """Return the tokens generated for a request so far."""
        return self._request(request_id).output

    def release(self, request_id: int) -> None:
        """Delete a finished request and its tokens. An unfinished request is cancelled first."""
        self.cancel(request_id)
        del self._requests[request_id]

    def _request(self, request_id: int) -> Request:
        try:
            return self._requests[request_id]
        except (KeyError, TypeError):
            raise RequestError(
                f"request {request_id!r} is not here: it was never submitted, or it is released; pass an id from submit"
            ) from None

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Run one forward and return each request's new tokens.

        The forward is a prefill if any prompt is unfinished, else a round. With overlap the forward is only enqueued,
        and the tokens of the forward before it are returned; the list may be empty.
        """
        self._scheduler.admit()
        self.statistics.reused = self._scheduler.reused
        sent = self._extend() if self._scheduler.prefilling else self._round()
        progress: list[Progress] = []
        while len(self._pending) > (1 if sent and self.config.overlap else 0):
            progress += self._finish(self._pending.popleft())
        for layers in self._models:
            layers.check_guards()
        return progress

    # -- prefills and rounds --------------------------------------------------------------------------------

    def _extend(self) -> bool:
        """Enqueue a prefill."""
        chunks = self._scheduler.chunks()
        rows, checkpoints = by_row([request for request, _ in chunks]), self._scheduler.checkpoints
        self._scheduler.lend([request for request, _ in chunks])
        ended, chosen = self._forwards.prefill(chunks, self._host.of(rows))
        for (request, count), row in zip(chunks, rows, strict=True):
            self._host.stored(row, count)
            request.computed += count
            if checkpoints is not None:
                checkpoints.stored(request, request.computed)
        self.statistics.extends += 1
        for request in ended:
            self._scheduler.prefilled(request)
        if ended:
            self._pending.append(PendingForward(ended, chosen[:, None], None, 0))
        return True

    def _round(self) -> bool:
        """Enqueue one round for all running requests that need more tokens; return False if there are none."""
        running = self._reserve()
        if not running:
            return False
        rows, live = by_row(running), len(running)
        padded, host = self._padded(live), self._host.of(rows)
        self._state.fill(running, padded)
        self._scheduler.lend(running)
        kind = self._drafting.draft(running, padded, host)
        result = self._forwards.round(kind, live, host)
        self._drafting.draft_extend(padded, live, host)
        nodes: int = self.geometry.extent(kind.mode).q_len
        self._host.sent(rows, nodes)
        tokens, counts = result.tokens[:live], result.accept_lens[:live]
        saved, checkpoints = result.saved, self._scheduler.checkpoints
        saved = None if saved is None else saved[:live]
        lent = [] if checkpoints is None else checkpoints.lent(running)
        report = self._drafting.report
        self._pending.append(PendingForward(running, tokens, counts, nodes, kind, report, saved, lent))
        return True

    def _reserve(self) -> list[Request]:
        """Reserve pages for a round; return its requests, except those that the tokens in flight will end."""
        limit = self.geometry.limits.max_context_len
        wanting = [request for request in self._scheduler.running if not request.will_finish(limit)]
        bounds = self._state.lengths.upper_bound(by_row(wanting)).lens
        before = len(self._scheduler.running)
        running = self._scheduler.reserve(list(zip(wanting, bounds, strict=True)))
        self.statistics.preemptions += before - len(self._scheduler.running)
        return running

    def _rows(self, sent: Round) -> int:
        nodes: int = self.geometry.extent(sent.mode).q_len
        return sent.size if sent.mode is Mode.RAGGED_VERIFY else sent.size * nodes

    def _padded(self, num_reqs: int) -> int:
        return padded_batch_size(num_reqs, self.geometry.limits.capture_batch_sizes) or num_reqs

    # -- results of forwards --------------------------------------------------------------------------------

    def _finish(self, forward: PendingForward) -> list[Progress]:
        """Wait for a forward's tokens and give them to the requests. Requests that ended meanwhile get nothing."""
        finished, statistics = forward.wait(), self.statistics
        statistics.host_syncs += 1
        due = [one for one in finished if one.request.finish is None]
        statistics.late += len(finished) - len(due)
        if forward.sent is not None:
            self._drafting.learn(forward.sent, finished, forward.report)
            for one in due:
                self._host.settle(one, forward.at_most)
                self._keep_checkpoint(one)
        progress = [self._give(one.request, one.tokens) for one in due]
        if forward.sent is not None:
            statistics.count_round(forward.sent, self._rows(forward.sent), progress)
        return progress

    def _give(self, request: Request, tokens: list[int]) -> Progress:
        kept = request.accept(tokens, self.geometry.limits.max_context_len)
        self.statistics.tokens += len(kept)
        if request.finish is not None:
            self._leave(request)
        elif request.checkpoints:
            self._scheduler.store(request)
        return Progress(request.id, kept, request.finish)

    def _keep_checkpoint(self, finished: FinishedForward) -> None:
        """Keep the checkpoint that a round saved. It goes to the prefix cache when the request has its tokens."""
        if self._scheduler.checkpoints is not None:
            self._scheduler.checkpoints.finished(finished.request, finished.lent, finished.saved)

    def _leave(self, request: Request) -> None:
        self._host.forget(request)
        self._scheduler.release(request)

    @property
    def _skips_updates(self) -> bool:
        """True if rounds may leave out the update of the draft head's KV."""
        return bool(self._drafting.budgets) and len(self._models) > 1

    def _cache(self) -> PrefixCache | None:
        """Return an empty prefix cache if the configuration has one."""
        if not self.config.prefix_cache:
            return None
        states, lookahead = self._layers.states, self._drafting.lookahead * (len(self._models) > 1)
        release = _no_slots if states is None else states.slots.release
        return PrefixCache(self.pages, self.config.page_size, lookahead, states is not None, release)

    # -- checks of the settings -----------------------------------------------------------------------------

    def _check_host_lengths(self) -> None:
        needs = [layers.host_need for layers in self._models]
        if HostLengthsNeed.EXACT in needs and self.config.host_lengths is not HostKind.EXACT:
            reason = f"it needs exact host lengths, got {self.config.host_lengths.value}: use host_lengths=exact"
            raise BackendRefusal(self.config.backend, [reason])


def _no_slots(slot: int) -> None:
    raise AssertionError(f"slot {slot} is a checkpoint of a model without recurrent state")
