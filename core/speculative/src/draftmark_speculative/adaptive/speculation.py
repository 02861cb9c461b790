"""`Adaptive`: drafts only when they increase the tokens a second, and chooses their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftmark import BackendRefusal, GeometryError, LoadedBackend, Mode, RequestError

from ..arguments import check_kind, is_number
from ..drafting import DeviceSpeculation, Drafting, draft_model
from ..drafts import Drafter, Speculation
from ..eagle import Eagle
from ..eagle.speculation import HeadDrafts
from ..layers import AttentionLayers, Layered
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .budgets import row_budgets
from .costs import CostTable
from .head import AdaptiveHeadDrafter
from .host import AdaptiveHostDrafting


@dataclass(frozen=True)
class Adaptive(DeviceSpeculation):
    """Speculation that verifies only the likeliest drafts of another speculation, up to a row budget over all requests.

    Each round is plain decoding, or verifies the budget that yields the most tokens a second. Expected tokens come from
    the drafts' survival. Seconds come from a cost table, measured when the engine starts.

    Attributes:
        drafts: source of the drafts: `Eagle`, `Mtp`, `Ngram`, or a custom `Speculation` that drafts on the host. Its
            num_draft_tokens limits the rows of one request.
        budgets: numbers of rows that a round may verify, with one graph each. Empty means powers of two and midpoints.
        costs: the cost table; None measures it.
        probe_share: share of the time of plain rounds that probes may cost, besides the head's time for its backlog.
            Probes find out if drafts pay again.

    Raises:
        RequestError: probe_share is not in [0, 1), or a field has another type.
        GeometryError: the drafts have one row only, the root.
    """

    drafts: Speculation = field(default_factory=Eagle)
    budgets: tuple[int, ...] = ()
    costs: CostTable | None = None
    probe_share: float = 0.005
    topk: int = field(init=False)
    num_steps: int = field(init=False)
    num_draft_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        check_kind("drafts", self.drafts, Speculation, "a Speculation", "write Eagle() or Ngram()")
        check_kind("budgets", self.budgets, tuple | list, "a tuple of row counts", "write (8, 16), or leave it out")
        check_kind("costs", self.costs, CostTable | None, "a CostTable", "leave it out to have it measured")
        for name in ("topk", "num_steps", "num_draft_tokens"):
            object.__setattr__(self, name, getattr(self.drafts, name))
        if not (is_number(self.probe_share) and 0 <= self.probe_share < 1):
            raise RequestError(f"probe_share is {self.probe_share!r}, but it must be in [0, 1); use 0.005")
        if self.num_draft_tokens == 1:
            remedy = "raise num_draft_tokens, or leave speculation out"
            raise GeometryError("draft.num_draft_tokens", 1, "adaptive drafting needs a root and a draft", remedy)

    def __str__(self) -> str:
        return f"adaptive {self.drafts}"

    @property
    def reads_tokens(self) -> bool:
        """True if the wrapped speculation drafts on the host."""
        return self.drafts.reads_tokens

    @property
    def target_modes(self) -> tuple[Mode, ...]:
        """Modes for prefill, plain rounds, and rounds in which the device decides the rows."""
        return (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY)

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """Modes of the draft model. RAGGED_VERIFY processes accepted tokens with one row a token."""
        return (Mode.EXTEND, Mode.DRAFT, Mode.RAGGED_VERIFY)

    def row_budgets(self, max_num_reqs: int) -> tuple[int, ...]:
        """Return the configured row budgets, or default budgets for the draft shape."""
        return self.budgets or row_budgets(max_num_reqs, self.num_draft_tokens)

    def require(self, loaded: LoadedBackend) -> None:
        """Raise `BackendRefusal` unless the backend supports RAGGED_VERIFY."""
        if Mode.RAGGED_VERIFY not in loaded.info.modes:
            fixed = type(self.drafts).__name__
            reason = (
                f"speculate=adaptive verifies rows that the device decides, but mode {Mode.RAGGED_VERIFY.value} is not "
                f"in BackendInfo.modes: use a backend that supports it, or fixed drafts (speculate={fixed}(…))"
            )
            raise BackendRefusal(loaded.name, [reason])

    def begin(self, request_id: int, prompt: Sequence[int]) -> Drafter | None:
        """Return the wrapped speculation's drafter for a new request."""
        return self.drafts.begin(request_id, prompt)

    def open(self, model: CausalLM) -> Layered | None:
        """Return the wrapped speculation's draft model."""
        return draft_model(self.drafts, model)

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create adaptive drafting with a head or with drafts of the host.

        Raises:
            RequestError: the wrapped speculation drafts on the device without a head.
        """
        if isinstance(self.drafts, HeadDrafts):
            return AdaptiveHeadDrafter(self, model, layers, state, runner, self.costs, self.probe_share)
        if not self.drafts.reads_tokens:
            raise RequestError(
                f"adaptive drafting got {type(self.drafts).__name__}, but it needs Eagle, Mtp or a Speculation with "
                "a begin() on the host; pass one of them"
            )
        return AdaptiveHostDrafting(self, layers, state, self.costs, self.probe_share)
