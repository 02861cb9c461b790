"""The engine: continuous batching of speculative rounds over one model and one backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from draftmark.errors import BackendRefusal, CacheExhausted, GeometryError
from draftmark.geometry import DRAFT_MODES, GeometryPair, Mode
from draftmark.graphs import padded_batch_size
from draftmark.lengths import HostLengths
from draftmark.registry import load
from draftmark.requirements import HostLengthsNeed

from .allocator import PageAllocator
from .config import EngineConfig, HostKind
from .drafts import DraftTree
from .eagle import Eagle
from .eagle.drafter import HeadDrafter
from .forced import ForcedAcceptance
from .graph_runner import GraphRunner
from .host_view import HostView
from .layers import AttentionLayers, Pages, geometries_of
from .models import CausalLM
from .pending import PendingForward
from .prefill import Prefill
from .request import FinishReason, Progress, Request, check_prompt
from .rounds import Rounds
from .scheduler import Scheduler, by_row
from .state import DeviceState
from .statistics import Statistics


class Engine:
    """Decodes requests that join and leave between steps.

    Raises:
        GeometryError, BackendLoadError, BackendRefusal: at construction, before any token.
    """

    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        config.check_overlap()
        self.config = config
        if config.max_context_len > model.max_context_len:
            raise GeometryError(
                "limits.max_context_len",
                config.max_context_len,
                f"model {model.name!r} was made for {model.max_context_len} positions",
                "lower it, or take a model with a longer context",
            )
        loaded = load(config.backend)
        self.model = model
        head = config.speculate.open(model) if isinstance(config.speculate, Eagle) else None
        target = geometries_of(model, loaded, config)
        draft = geometries_of(head, loaded, config, DRAFT_MODES) if head else []
        pages = Pages.plan(loaded, [*target, *draft], config)
        self._layers = AttentionLayers(model, loaded, config, target, pages)
        self.geometry = self._layers.geometry
        self.pages = PageAllocator(pages.total, pages.null)
        self._state = DeviceState(self.geometry, model.device, pages.unique_slots)
        self._scheduler = Scheduler(self.geometry, self.pages, self._state)
        self._programs = GraphRunner(loaded.graph_state(self.geometry, model.device) if config.graph else None)
        self._drafter: HeadDrafter | None = None
        self._draft_layers: AttentionLayers | None = None
        if head is not None:
            GeometryPair(target[0], draft[0])
            self._draft_layers = AttentionLayers(head, loaded, config, draft, pages)
            self._drafter = HeadDrafter(model, head, self._draft_layers, self._state, self._programs)
        self._check_host_lengths()
        self._prefill = Prefill(model, self._layers, self._state, config.sampling, self._drafter)
        profile, seed = config.forced_acceptance, config.sampling.seed
        forced = ForcedAcceptance(profile, seed, model.device) if profile else None
        self._rounds = Rounds(model, self._layers, self._state, config.sampling, self._programs, self._drafter, forced)
        self._flights: deque[PendingForward] = deque()
        self._host = HostView(self._state.lengths, config)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.statistics = Statistics()
        if config.graph:
            self._capture()

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.busy

    @property
    def graph_bytes(self) -> int:
        """Bytes that all captured graphs hold; 0 without graphs."""
        return 0 if self._programs.graphs is None else self._programs.graphs.pool_bytes

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int] = ()) -> int:
        """Add a request; it joins at the next step.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to generate; the context wall may come first.
            stop: token ids that end it, besides the model's own; the token is part of the output.

        Returns:
            The request's id.

        Raises:
            RequestError: an empty prompt, one that leaves no room in the context, or a token out of range.
            CacheExhausted: the pool could never hold this request, even alone.
        """
        limit = self.geometry.limits.max_context_len
        check_prompt(prompt, max_new_tokens, limit, self.model.vocab_size)
        needed = self._scheduler.pages_at_worst(min(len(prompt) + max_new_tokens, limit))
        if needed > self.pages.total:
            raise CacheExhausted(needed, self.pages.total, self.pages.total)
        request = Request(self._next_id, tuple(prompt), max_new_tokens, list(prompt))
        request.stop = frozenset(stop) | frozenset(self.model.stop_token_ids)
        speculate = self.config.speculate
        if speculate is not None and not isinstance(speculate, Eagle):
            request.drafter = speculate.begin(request.id, prompt)
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.waiting.append(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        """End a request now, wherever it is. Its pages are free again; its tokens stay readable.

        A round that is under way may still write to its pages; whoever gets them writes later.
        """
        request = self._requests[request_id]
        if request.finish is None:
            request.finish = FinishReason.CANCELLED
            self._leave(request)

    def output(self, request_id: int) -> tuple[int, ...]:
        """Tokens generated for a request so far."""
        return self._requests[request_id].output

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One forward: a prefill if any prompt is unfinished, else a round. Returns what it gave to whom.

        With overlap the forward is only sent, and what the one before it gave is returned: perhaps nothing.
        """
        self._scheduler.admit()
        sent = self._extend() if self._scheduler.prefilling else self._round()
        progress: list[Progress] = []
        while len(self._flights) > (1 if sent and self.config.overlap else 0):
            progress += self._land(self._flights.popleft())
        self._check_guards()
        return progress

    # -- forwards -----------------------------------------------------------------------------------------

    def _extend(self) -> bool:
        """Send a prefill."""
        chunks = self._scheduler.chunks()
        rows = by_row([request for request, _ in chunks])
        ended, chosen = self._prefill.run(chunks, self._host.of(rows))
        for (request, count), row in zip(chunks, rows, strict=True):
            self._host.stored(row, count)
            request.computed += count
        self.statistics.extends += 1
        for request in ended:
            self._scheduler.prefilled(request)
        if ended:
            self._flights.append(PendingForward(ended, chosen[:, None], None, 0))
        return True

    def _round(self) -> bool:
        """Send a round for every request that may still need one; whether there was any."""
        running = self._reserve()
        if not running:
            return False
        rows, live = by_row(running), len(running)
        padded, host = self._padded(live), self._host.of(rows)
        self._state.fill(running, padded)
        mode = self._set_draft_tokens(running, padded, host)
        verdict = self._rounds.run(mode, padded, live, host)
        if self._drafter is not None:
            self._drafter.draft_extend(padded, live, host)
        nodes: int = self.geometry.extent(mode).q_len
        self._host.sent(rows, nodes)
        self._flights.append(PendingForward(running, verdict.tokens[:live], verdict.accept_lens[:live], nodes))
        return True

    def _reserve(self) -> list[Request]:
        """Running requests that have pages for a round, but those that end with what is in flight."""
        limit = self.geometry.limits.max_context_len
        wanting = [request for request in self._scheduler.running if not request.will_finish(limit)]
        bounds = self._state.lengths.upper_bound(by_row(wanting)).lens
        running = self._scheduler.reserve(list(zip(wanting, bounds, strict=True)))
        self.statistics.preemptions = self._scheduler.preemptions
        return running

    def _set_draft_tokens(self, running: list[Request], padded: int, host: HostLengths) -> Mode:
        """Draft a tree for every request; the mode that verifies them."""
        if self._drafter is not None:
            self._drafter.draft(padded, len(running), host)
            return Mode.VERIFY
        if self.config.speculate is None:
            return Mode.DECODE
        trees = [DraftTree([r.tokens[-1]]) if r.drafter is None else r.drafter.propose() for r in running]
        mode = Mode.VERIFY if any(len(tree) > 1 for tree in trees) else Mode.DECODE
        self._state.set_draft_trees(trees, padded, self.geometry.extent(mode).q_len)
        return mode

    def _padded(self, num_reqs: int) -> int:
        return padded_batch_size(num_reqs, self.geometry.limits.capture_batch_sizes) or num_reqs

    # -- results ------------------------------------------------------------------------------------------

    def _land(self, flight: PendingForward) -> list[Progress]:
        """Wait for a forward's tokens and give them out. Requests that have ended meanwhile get nothing."""
        landed = list(flight.land())
        self.statistics.host_syncs += 1
        due = [one for one in landed if one.request.finish is None]
        self.statistics.late += len(landed) - len(due)
        if flight.at_most:
            for one in due:
                self._host.settle(one, flight.at_most)
            self.statistics.rounds += 1
            self.statistics.verified += len(due)
            self.statistics.accepted += sum(len(one.tokens) for one in due)
        return [self._give(one.request, one.tokens) for one in due]

    # -- tokens out ---------------------------------------------------------------------------------------

    def _give(self, request: Request, tokens: list[int]) -> Progress:
        kept = request.accept(tokens, self.geometry.limits.max_context_len)
        self.statistics.tokens += len(kept)
        if request.finish is not None:
            self._leave(request)
        return Progress(request.id, kept, request.finish)

    def _leave(self, request: Request) -> None:
        self._host.forget(request)
        self._scheduler.release(request)

    # -- checks -------------------------------------------------------------------------------------------

    def _check_host_lengths(self) -> None:
        needs = [layers.host_need for layers in (self._layers, self._draft_layers) if layers is not None]
        if HostLengthsNeed.EXACT in needs and self.config.host_lengths is not HostKind.EXACT:
            reason = f"it needs exact host lengths, got {self.config.host_lengths.value}: use host_lengths=exact"
            raise BackendRefusal(self.config.backend, [reason])

    def _check_guards(self) -> None:
        self._layers.check_guards()
        if self._draft_layers is not None:
            self._draft_layers.check_guards()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Every program at every captured batch size."""
        if self._drafter is not None:
            self._rounds.capture((Mode.VERIFY,))
            self._drafter.capture()
        else:
            self._rounds.capture((Mode.DECODE, Mode.VERIFY) if self.config.speculate else (Mode.DECODE,))
