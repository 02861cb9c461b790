"""Adaptive: drafts when they pay, and as many as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftmark import BackendRefusal, GeometryError, LoadedBackend, Mode, RequestError

from ..arguments import check_kind, is_number
from ..drafts import Drafter, Drafting, Speculation
from ..eagle import Eagle
from ..layers import AttentionLayers, Layered
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .budgets import row_budgets
from .costs import CostTable
from .head import AdaptiveHeadDrafter
from .host import AdaptiveHostDrafting


@dataclass(frozen=True)
class Adaptive(Speculation):
    """Another speculation's drafts, of which a budget of rows over all requests admits the likeliest.

    Each round is plain decoding, or verifies the budget that yields most tokens a second: expected tokens by the
    drafts' survival, seconds by a cost table that is measured when graphs are captured.

    Attributes:
        drafts: whose drafts: `Eagle`, `Ngram`, or a `Speculation` of your own that drafts on the host. Its
            num_draft_tokens bounds the rows of one request.
        budgets: rows that a round may verify; one graph each. Empty: powers of two and halves between.
        costs: the cost table; None measures it.
        probe_share: of the time of plain rounds, what probes may cost that find out whether drafts pay again.

    Raises:
        RequestError: a probe_share that is no share, or a field of another type.
        GeometryError: drafts of one row, the root alone.
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
        """As the drafts."""
        return self.drafts.reads_tokens

    @property
    def target_modes(self) -> tuple[Mode, ...]:
        """Plain rounds, and rows that the device decides."""
        return (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY)

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """The head takes over what was accepted raggedly too: as many rows as tokens."""
        return (Mode.EXTEND, Mode.DRAFT, Mode.RAGGED_VERIFY)

    def row_budgets(self, max_num_reqs: int) -> tuple[int, ...]:
        """`budgets`, or those of the draft shape."""
        return self.budgets or row_budgets(max_num_reqs, self.num_draft_tokens)

    def require(self, loaded: LoadedBackend) -> None:
        """Raise `BackendRefusal` unless the backend serves RAGGED_VERIFY."""
        if Mode.RAGGED_VERIFY not in loaded.info.modes:
            fixed = type(self.drafts).__name__
            reason = (
                f"speculate=adaptive verifies rows that the device decides, but mode {Mode.RAGGED_VERIFY.value} is not "
                f"among BackendInfo.modes: use a backend that serves it, or fixed drafts (speculate={fixed}(…))"
            )
            raise BackendRefusal(loaded.name, [reason])

    def begin(self, request_id: int, prompt: Sequence[int]) -> Drafter | None:
        """As the drafts."""
        return self.drafts.begin(request_id, prompt)

    def open(self, model: CausalLM) -> Layered | None:
        """As the drafts."""
        return self.drafts.open(model)

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """By where the drafts come from.

        Raises:
            RequestError: drafts of the device that are not a head's.
        """
        if isinstance(self.drafts, Eagle):
            return AdaptiveHeadDrafter(self, model, layers, state, runner)
        if not self.drafts.reads_tokens:
            raise RequestError(
                f"adaptive drafting got {type(self.drafts).__name__}, but drafts come from Eagle or from a begin() of "
                "the host; give one of them"
            )
        return AdaptiveHostDrafting(self, layers, state)
