"""What an engine is configured to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from draftmark import DraftShape, Limits, RequestError

from .arguments import LARGEST, check_count, check_kind, is_count
from .drafts import NoSpeculation, Speculation
from .sampling import Sampling


class HostKind(StrEnum):
    """What the engine tells a backend about prefix lengths on the host."""

    EXACT = "exact"
    """Every length, settled by the round's one wait."""
    UPPER_BOUND = "upper_bound"
    """Lengths that lag one round, plus the most that round can have added: the sync-free path."""
    UNKNOWN = "unknown"
    """The limit alone."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything that is fixed for an engine's life.

    Attributes:
        backend: entry-point name; it runs on the device that the model is on.
        speculate: how to draft (`Ngram`, `Eagle`, `Adaptive` around one of them, or a `Speculation` of your own);
            "adaptive" is ``Adaptive(Eagle())``; None decodes one token a round.
        page_size: tokens per KV page.
        max_num_reqs: requests that decode together; more wait.
        max_context_len: tokens of a request, prompt and output together.
        max_extend_tokens: prompt tokens of one prefill forward, over all requests.
        num_pages: KV pages a layer, null pages included; None gives every request its full context.
        graph: capture the round's forward and replay it.
        capture_batch_sizes: padded batch sizes to capture; empty means powers of two up to max_num_reqs.
        host_lengths: see `HostKind`; its value will do.
        overlap: the host prepares a round while the device runs the one before, and waits for nothing but that one's
            tokens, a round late. It needs host_lengths other than exact, and drafts that do not come from the host.
        sampling: greedy, or temperature and top-p.
        guard: guard words and poison in the arenas; None reads DRAFTMARK_GUARD.

    Raises:
        RequestError: a field of another type, or fewer pages than one. The geometry refuses the other counts.
    """

    backend: str = "reference"
    speculate: Speculation | Literal["adaptive"] | None = None
    page_size: int = 16
    max_num_reqs: int = 8
    max_context_len: int = 1024
    max_extend_tokens: int = 512
    num_pages: int | None = None
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
            from .adaptive import Adaptive

            object.__setattr__(self, "speculate", Adaptive())
        if not isinstance(self.speculate, Speculation | None):
            raise RequestError(
                f"speculate is {self.speculate!r}, but it must be a Speculation, 'adaptive' or None; "
                "write Adaptive(Eagle()) or Ngram()"
            )

    def _check_types(self) -> None:
        """Nothing is taken for what it resembles: "no" is true, and 7.0 pages are no count."""
        counts = {name: getattr(self, name) for name in ("max_num_reqs", "max_context_len")}
        counts |= {} if self.num_pages is None else {"num_pages": self.num_pages}
        for name, value in counts.items():
            if not is_count(value):
                raise RequestError(f"{name} is {value!r}, but it must be an integer; give a count")
        if self.num_pages is not None and self.num_pages < 1:
            raise RequestError(f"num_pages is {self.num_pages}, but it must be >= 1; leave it out for what is needed")
        sizes, example = self.capture_batch_sizes, "write (4,) for one, or leave it out"
        check_kind("capture_batch_sizes", sizes, tuple | list, "a tuple of batch sizes", example)
        for size in sizes:
            check_count("a size of capture_batch_sizes", size, 1, LARGEST, example)
        switches = {"graph": self.graph, "overlap": self.overlap} | (
            {} if self.guard is None else {"guard": self.guard}
        )
        for name, switch in switches.items():
            if not isinstance(switch, bool):
                raise RequestError(f"{name} is {switch!r}, but it must be True or False; give one of them")
        if not isinstance(self.backend, str):
            raise RequestError(f"backend is {self.backend!r}, but it must be a name; `draftmark list` shows them")
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling is {self.sampling!r}, but it must be a Sampling; Sampling() is greedy")

    @property
    def speculation(self) -> Speculation:
        """How to draft, plain decoding included."""
        return self.speculate if isinstance(self.speculate, Speculation) else NoSpeculation()

    @property
    def draft_shape(self) -> DraftShape:
        """The draft shape of the geometry."""
        how = self.speculation
        return DraftShape(how.topk, how.num_steps, how.num_draft_tokens)

    @property
    def limits(self) -> Limits:
        """The limits of the geometry."""
        return Limits(
            self.max_num_reqs,
            self.max_context_len,
            self.max_extend_tokens,
            self._capture_sizes() if self.graph else (),
            self.overlap,
            row_budgets=self.speculation.row_budgets(self.max_num_reqs),
        )

    def check_overlap(self) -> None:
        """Raise `RequestError` for settings that contradict `overlap`."""
        if not self.overlap:
            return
        if self.host_lengths is HostKind.EXACT:
            raise RequestError(
                "overlap is on with host_lengths exact, but the host knows no exact length while a round runs; "
                "use host_lengths upper_bound or unknown"
            )
        if self.speculation.reads_tokens:
            raise RequestError(
                f"overlap is on with drafts of {type(self.speculate).__name__}, but the host cannot draft behind "
                "tokens that it has not seen; draft on the device (Eagle), or turn overlap off"
            )

    def _capture_sizes(self) -> tuple[int, ...]:
        if self.capture_batch_sizes:
            return self.capture_batch_sizes
        powers = [1 << i for i in range(self.max_num_reqs.bit_length()) if 1 << i < self.max_num_reqs]
        return (*powers, self.max_num_reqs)
