"""The engine: continuous batching of speculative rounds over one model and one backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import ragged
from ..errors import BackendRefusal, CacheExhausted, GeometryError, RequestError
from ..geometry import Mode
from ..graphs import padded_batch_size
from ..lengths import HostLengths
from ..metadata import HostLengthsNeed
from ..registry import load
from .allocator import PageAllocator
from .config import EngineConfig, HostKind
from .drafts import DraftTree
from .layers import AttentionLayers
from .models import CausalLM
from .request import FinishReason, Progress, Request
from .rounds import Rounds
from .scheduler import Scheduler, by_row
from .state import DeviceState


@dataclass
class Statistics:
    """What an engine has done so far.

    Attributes:
        tokens: tokens emitted to requests.
        rounds: verify or decode forwards; extends: prefill forwards.
        verified: requests summed over rounds, so that accepted / verified is the mean accepted length.
        accepted: tokens those rounds yielded, the target's own token included.
        host_syncs: waits for the device, one a round and one a prefill that ends a prompt.
        preemptions: requests sent back to wait because pages ran out.
    """

    tokens: int = 0
    rounds: int = 0
    extends: int = 0
    verified: int = 0
    accepted: int = 0
    host_syncs: int = 0
    preemptions: int = 0

    @property
    def mean_accepted(self) -> float:
        """Tokens per request and round; 1 without speculation."""
        return self.accepted / self.verified if self.verified else 0.0


class Engine:
    """Decodes requests that join and leave between steps.

    Raises:
        GeometryError, BackendLoadError, BackendRefusal: at construction, before any token.
    """

    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
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
        self._layers = AttentionLayers(model, loaded, config)
        self.geometry = self._layers.geometry
        if self._layers.host_need is HostLengthsNeed.EXACT and config.host_lengths is not HostKind.EXACT:
            reason = f"it needs exact host lengths, got {config.host_lengths.value}: use host_lengths=exact"
            raise BackendRefusal(config.backend, [reason])
        device = model.device
        self._state = DeviceState(self.geometry, device, self._layers.unique_slots)
        self.pages = PageAllocator(self._layers.num_pages, self._layers.null_pages)
        self._scheduler = Scheduler(self.geometry, self.pages, self._state)
        graphs = loaded.graph_state(self.geometry, device) if config.graph else None
        self._rounds = Rounds(model, self._layers, self._state, config.sampling, graphs)
        self._unsettled: dict[int, tuple[int, int]] = {}
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.statistics = Statistics()
        if graphs is not None:
            with torch.inference_mode():
                self._rounds.capture((Mode.DECODE, Mode.VERIFY) if config.speculate else (Mode.DECODE,))

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.busy

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
        self._check(prompt, max_new_tokens)
        needed = self._scheduler.pages_at_worst(min(len(prompt) + max_new_tokens, limit))
        if needed > self.pages.total:
            raise CacheExhausted(needed, self.pages.total, self.pages.total)
        request = Request(self._next_id, tuple(prompt), max_new_tokens, list(prompt))
        request.stop = frozenset(stop) | frozenset(self.model.stop_token_ids)
        if self.config.speculate is not None:
            request.drafter = self.config.speculate.begin(request.id, prompt)
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.waiting.append(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        """End a request now, wherever it is. Its pages are free again; its tokens stay readable."""
        request = self._requests[request_id]
        if request.finish is None:
            request.finish = FinishReason.CANCELLED
            self._leave(request)

    def output(self, request_id: int) -> tuple[int, ...]:
        """Tokens generated for a request so far."""
        return self._requests[request_id].output

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One forward: a prefill if any prompt is unfinished, else a round. Returns what it gave to whom."""
        self._scheduler.admit()
        progress: list[Progress] = []
        if self._scheduler.prefilling:
            progress = self._extend()
        elif self._scheduler.running:
            progress = self._round()
        self._layers.check_guards()
        return progress

    # -- prefill ------------------------------------------------------------------------------------------

    def _extend(self) -> list[Progress]:
        chunks = self._scheduler.chunks()
        requests, counts = [request for request, _ in chunks], tuple(count for _, count in chunks)
        rows = by_row(requests)
        index = torch.tensor(rows).to(self._state.device)
        lengths = self._state.lengths
        batch = ragged(
            self.geometry, lengths.device[index], self._state.page_table[index], counts, self._host_lengths(rows)
        )
        tokens = [t for request, n in chunks for t in request.tokens[request.computed : request.computed + n]]
        ended = [r for r, n in chunks if r.computed + n == len(r.tokens)]
        last_rows = batch.q_indptr[1:].long()[[i for i, (r, _) in enumerate(chunks) if r in ended]] - 1
        self._layers.plan(batch)
        self._layers.begin(batch)
        logits = self.model.forward(
            torch.tensor(tokens).to(self._state.device), batch.positions, self._layers, last_rows
        )
        lengths.advance(index, torch.tensor(counts).to(self._state.device))
        for request, row, count in zip(requests, rows, counts, strict=True):
            lengths.dispatched([row], count)
            lengths.settle([row], [count], count)
            request.computed += count
        self.statistics.extends += 1
        return self._first_tokens(ended, logits, batch.positions[last_rows])

    def _first_tokens(self, ended: list[Request], logits: torch.Tensor, positions: torch.Tensor) -> list[Progress]:
        if not ended:
            return []
        ids = torch.tensor([request.id for request in ended]).to(self._state.device)
        chosen: list[int] = self.config.sampling.choose(logits, ids, positions).tolist()
        self.statistics.host_syncs += 1
        for request in ended:
            self._scheduler.prefilled(request)
        return [self._give(request, [token]) for request, token in zip(ended, chosen, strict=True)]

    # -- rounds -------------------------------------------------------------------------------------------

    def _round(self) -> list[Progress]:
        scheduler, lengths = self._scheduler, self._state.lengths
        bounds = lengths.upper_bound(by_row(scheduler.running)).lens
        before = list(scheduler.running)
        scheduler.reserve({request.id: bound for request, bound in zip(before, bounds, strict=True)})
        for request in before:
            if request.row is None:
                self._unsettled.pop(request.id, None)
        self.statistics.preemptions = scheduler.preemptions
        running = list(scheduler.running)
        rows = by_row(running)
        trees = self._draft(running)
        mode = Mode.VERIFY if any(len(tree) > 1 for tree in trees) else Mode.DECODE
        nodes: int = self.geometry.extent(mode).q_len
        padded = self._padded(len(running))
        self._state.fill(running, trees, padded, nodes)
        verdict = self._rounds.run(mode, padded, len(running), self._host_lengths(rows))
        lengths.dispatched(rows, nodes)
        counts: list[int] = verdict.counts[: len(running)].tolist()
        tokens: list[list[int]] = verdict.tokens[: len(running)].tolist()
        self._settle(running, counts, nodes)
        self.statistics.host_syncs += 1
        self.statistics.rounds += 1
        self.statistics.verified += len(running)
        self.statistics.accepted += sum(counts)
        return [self._give(r, t[:n]) for r, t, n in zip(running, tokens, counts, strict=True)]

    def _draft(self, running: list[Request]) -> list[DraftTree]:
        return [DraftTree([r.tokens[-1]]) if r.drafter is None else r.drafter.propose() for r in running]

    def _settle(self, running: list[Request], counts: list[int], at_most: int) -> None:
        """Tell the host what the round committed: at once, or a round late on the sync-free path."""
        for request, count in zip(running, counts, strict=True):
            row = by_row([request])
            if self.config.host_lengths is HostKind.EXACT:
                self._state.lengths.settle(row, [count], at_most)
                continue
            if late := self._unsettled.get(request.id):
                self._state.lengths.settle(row, [late[0]], late[1])
            self._unsettled[request.id] = (count, at_most)

    def _host_lengths(self, rows: Sequence[int]) -> HostLengths:
        lengths, kind = self._state.lengths, self.config.host_lengths
        if kind is HostKind.EXACT:
            return lengths.exact(rows)
        return lengths.upper_bound(rows) if kind is HostKind.UPPER_BOUND else lengths.unknown(rows)

    def _padded(self, num_reqs: int) -> int:
        return padded_batch_size(num_reqs, self.geometry.limits.capture_batch_sizes) or num_reqs

    # -- tokens out ---------------------------------------------------------------------------------------

    def _give(self, request: Request, tokens: list[int]) -> Progress:
        kept = request.accept(tokens, self.geometry.limits.max_context_len)
        self.statistics.tokens += len(kept)
        if request.finish is not None:
            self._leave(request)
        return Progress(request.id, kept, request.finish)

    def _leave(self, request: Request) -> None:
        self._unsettled.pop(request.id, None)
        self._scheduler.release(request)

    def _check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        limit = self.geometry.limits.max_context_len
        if not prompt:
            raise RequestError("the prompt has 0 tokens, but at least 1 is needed; give some text")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but max_context_len is {limit} and one must be free for the "
                "answer; shorten the prompt or raise max_context_len"
            )
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}, but it must be >= 1; ask for at least one token")
        wrong = next((t for t in prompt if not 0 <= t < self.model.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"the prompt has token {wrong}, but the vocabulary is 0 … {self.model.vocab_size - 1}; "
                "use this model's tokenizer"
            )
