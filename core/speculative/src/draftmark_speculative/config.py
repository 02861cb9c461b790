"""What an engine is asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from draftmark.errors import RequestError
from draftmark.geometry import DraftShape, Limits

from .drafts import Speculation
from .eagle import Eagle
from .sampling import Sampling


class HostKind(StrEnum):
    """What the engine tells a backend about prefix lengths on the host."""

    EXACT = "exact"
    """Every length, settled by the round's one wait."""
    UPPER_BOUND = "upper_bound"
    """Lengths that lag one round, plus the most that round can have added: the sync-free path."""
    UNKNOWN = "unknown"
    """Nothing but the limit."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything that is fixed for an engine's life.

    Attributes:
        backend: entry-point name; it runs on the device that the model is on.
        speculate: how to draft, on the host or (`Eagle`) on the device; None decodes one token a round.
        page_size: tokens per KV page.
        max_num_reqs: requests that decode together; more wait.
        max_context_len: tokens of a request, prompt and output together.
        max_extend_tokens: prompt tokens of one prefill forward, over all requests.
        num_pages: KV pages a layer, null pages included; None gives every request its full context.
        graph: capture the round's forward and replay it.
        capture_batch_sizes: padded batch sizes to capture; empty means powers of two up to max_num_reqs.
        host_lengths: see `HostKind`.
        overlap: the host prepares a round while the device runs the one before, and waits for nothing but that one's
            tokens, a round late. It needs host_lengths other than exact, and drafts that do not come from the host.
        sampling: greedy, or temperature and top-p.
        forced_acceptance: a benchmark's switch, see `ForcedAcceptance`: the text means nothing when it is not empty.
        guard: guard words and poison in the arenas; None reads DRAFTMARK_GUARD.
    """

    backend: str = "reference"
    speculate: Speculation | Eagle | None = None
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
    forced_acceptance: tuple[float, ...] = ()
    guard: bool | None = None

    @property
    def draft_shape(self) -> DraftShape:
        """The draft shape of the geometry. Drafts from the host need no draft forward: S = 1."""
        speculate = self.speculate
        if speculate is None:
            return DraftShape()
        steps = speculate.num_steps if isinstance(speculate, Eagle) else 1
        return DraftShape(speculate.topk, steps, speculate.num_draft_tokens)

    @property
    def limits(self) -> Limits:
        """The limits of the geometry."""
        return Limits(
            self.max_num_reqs,
            self.max_context_len,
            self.max_extend_tokens,
            self._capture_sizes() if self.graph else (),
            self.overlap,
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
        if not isinstance(self.speculate, Eagle | None):
            raise RequestError(
                f"overlap is on with drafts of {type(self.speculate).__name__}, but the host cannot draft behind "
                "tokens that it has not seen; draft on the device (Eagle), or turn overlap off"
            )

    def _capture_sizes(self) -> tuple[int, ...]:
        if self.capture_batch_sizes:
            return self.capture_batch_sizes
        powers = [1 << i for i in range(self.max_num_reqs.bit_length()) if 1 << i < self.max_num_reqs]
        return (*powers, self.max_num_reqs)
