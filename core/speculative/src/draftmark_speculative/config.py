"""Configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pkgutil import resolve_name
from typing import Literal

from draftmark import DraftShape, Limits, RequestError

from .arguments import LARGEST, check_count, check_kind, is_count
from .drafts import NoSpeculation, Speculation
from .sampling import Sampling

ADAPTIVE = "draftmark_speculative.adaptive:Adaptive"
"""Class that the word "adaptive" selects. It runs rounds over layers, which read this configuration."""


class HostKind(StrEnum):
    """Precision of the prefix lengths that a backend gets on the host: exact, an upper bound, or unknown."""

    EXACT = "exact"
    """Exact lengths. The engine waits for the device once a round."""
    UPPER_BOUND = "upper_bound"
    """Lengths of one round ago, plus the most that the round can have added. Planning needs no synchronization."""
    UNKNOWN = "unknown"
    """Only the limit on lengths."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings that are fixed for an engine's life.

    Attributes:
        backend: entry-point name; the backend runs on the model's device.
        speculate: how to draft: `Ngram`, `Eagle`, `Adaptive` around one of them, or a custom `Speculation`.
            "adaptive" means ``Adaptive(Eagle())``; None decodes one token a round.
        page_size: tokens per KV page.
        max_num_reqs: requests that decode together; more wait.
        max_context_len: most tokens of a request, prompt and output together.
        max_extend_tokens: most prompt tokens of one prefill forward, over all requests.
        num_pages: KV pages of each layer, null pages included; None gives every request its full context.
        prefix_cache: keep the KV pages of prompts and texts, and checkpoints of recurrent states, for requests that
            start with the same tokens and for preempted requests. The oldest unused ones give their memory back.
        state_interval: tokens between checkpoints of a model with recurrent state; only read with `prefix_cache`. It is
            a multiple of page_size and at least twice the draft tokens.
        state_slots: slots of recurrent states, null slots not counted; None gives each request one, and four with
            `prefix_cache`.
        graph: capture each round's forward and replay it.
        capture_batch_sizes: padded batch sizes to capture; empty means powers of two up to max_num_reqs.
        host_lengths: a `HostKind` or its value.
        overlap: prepare a round on the host while the device runs the round before. The host waits only for the
            earlier round's tokens. Needs host_lengths other than exact, and drafts that are not made on the host.
        sampling: greedy, or temperature and top-p.
        guard: guard words and poison in the arenas; None reads DRAFTMARK_GUARD.

    Raises:
        RequestError: a field has the wrong type, or num_pages is below 1. The geometry checks the other counts.
    """

    backend: str = "reference"
    speculate: Speculation | Literal["adaptive"] | None = None
    page_size: int = 16
    max_num_reqs: int = 8
    max_context_len: int = 1024
    max_extend_tokens: int = 512
    num_pages: int | None = None
    prefix_cache: bool = False
    state_interval: int = 256
    state_slots: int | None = None
    graph: bool = False
    capture_batch_sizes: tuple[int, ...] = ()
    host_lengths: HostKind = HostKind.EXACT
    overlap: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    guard: bool | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.host_lengths not in tuple(HostKind):
            kinds = ", ".join(HostKind)
            raise RequestError(f"host_lengths is {self.host_lengths!r}, but it must be one of {kinds}; use a HostKind")
        object.__setattr__(self, "host_lengths", HostKind(self.host_lengths))
        if self.speculate == "adaptive":
            object.__setattr__(self, "speculate", resolve_name(ADAPTIVE)())
        if not isinstance(self.speculate, Speculation | None):
            raise RequestError(
                f"speculate is {self.speculate!r}, but it must be a Speculation, 'adaptive' or None; "
                "write Adaptive(Eagle()) or Ngram()"
            )

    def _check_types(self) -> None:
        """Reject values of the wrong type that Python would accept: "no" is true, and 7.0 pages are not a count."""
        counts = {name: getattr(self, name) for name in ("max_num_reqs", "max_context_len", "state_interval")}
        counts |= {name: value for name in ("num_pages", "state_slots") if (value := getattr(self, name)) is not None}
        for name, value in counts.items():
            if not is_count(value):
                raise RequestError(f"{name} is {value!r}, but it must be an integer; give a count")
        for name in ("num_pages", "state_slots", "state_interval"):
            if counts.get(name, 1) < 1:
                raise RequestError(f"{name} is {counts[name]}, but it must be >= 1; leave it out for the default")
        sizes, example = self.capture_batch_sizes, "write (4,) for one, or leave it out"
        check_kind("capture_batch_sizes", sizes, tuple | list, "a tuple of batch sizes", example)
        for size in sizes:
            check_count("a size of capture_batch_sizes", size, 1, LARGEST, example)
        switches = {"graph": self.graph, "overlap": self.overlap, "prefix_cache": self.prefix_cache} | (
            {} if self.guard is None else {"guard": self.guard}
        )
        for name, switch in switches.items():
            if not isinstance(switch, bool):
                raise RequestError(f"{name} is {switch!r}, but it must be True or False; pass one of them")
        if not isinstance(self.backend, str):
            raise RequestError(f"backend is {self.backend!r}, but it must be a name; `draftmark list` prints them")
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling is {self.sampling!r}, but it must be a Sampling; Sampling() is greedy")

    @property
    def speculation(self) -> Speculation:
        """Drafting method; `NoSpeculation` for plain decoding."""
        return self.speculate if isinstance(self.speculate, Speculation) else NoSpeculation()

    @property
    def draft_shape(self) -> DraftShape:
        """Draft shape (topk, steps, nodes, block, modules) for the geometry of each layer."""
        how = self.speculation
        return DraftShape(how.topk, how.num_steps, how.num_draft_tokens, how.block_size, how.num_modules)

    @property
    def limits(self) -> Limits:
        """Limits (requests, context, prefill tokens, captured sizes, row budgets) for the geometry of each layer."""
        return Limits(
            self.max_num_reqs,
            self.max_context_len,
            self.max_extend_tokens,
            self._capture_sizes() if self.graph else (),
            self.overlap,
            row_budgets=self.speculation.row_budgets(self.max_num_reqs),
            state_interval=self.state_interval if self.prefix_cache else 0,
        )

    def check_overlap(self) -> None:
        """Raise `RequestError` if other settings contradict `overlap`."""
        if not self.overlap:
            return
        if self.host_lengths is HostKind.EXACT:
            raise RequestError(
                "overlap is on with host_lengths exact, but the host has no exact length while a round runs; "
                "use host_lengths upper_bound or unknown"
            )
        if self.speculation.reads_tokens:
            raise RequestError(
                f"overlap is on with drafts of {type(self.speculate).__name__}, but the host cannot draft before it "
                "has read the newest tokens; draft on the device (Eagle), or turn overlap off"
            )

    def _capture_sizes(self) -> tuple[int, ...]:
        if self.capture_batch_sizes:
            return self.capture_batch_sizes
        powers = [1 << i for i in range(self.max_num_reqs.bit_length()) if 1 << i < self.max_num_reqs]
        return (*powers, self.max_num_reqs)
