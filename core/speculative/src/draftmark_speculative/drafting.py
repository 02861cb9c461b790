"""Drafting of an engine: the programs that produce its drafts, which a speculation creates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from draftmark import Geometry, Mode

from .drafts import DraftTree, Prefill, Round, Speculation

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import ForwardBatch, HostLengths, VerifyResult

    from .layers import AttentionLayers, Layered
    from .models import CausalLM
    from .models.features import FeatureTaps
    from .pending import FinishedForward
    from .ragged import Admitted
    from .request import Request
    from .state import DeviceState, GraphRunner

    RunRound = Callable[[Round, int, HostLengths], object]


class Drafting:
    """Produces the drafts of one engine. This base class drafts on the host, with one `Drafter` per request.

    The engine calls `begin` for a new request and `extend` after each prefill. In a round it calls `draft`, then `keep`
    at the end of the verify forward, then `draft_extend`.

    Attributes:
        modes: modes that verify; each is captured at every captured batch size.
        budgets: row budgets at which RAGGED_VERIFY is captured.
        taps: the target's hidden states that `extend` and `keep` read, or None.
        lookahead: tokens after a row that `extend` reads; a prefix is reused only where they agree.
    """

    taps: FeatureTaps | None = None
    lookahead: int = 1
    budgets: tuple[int, ...] = ()

    def __init__(self, speculation: Speculation, geometry: Geometry, state: DeviceState) -> None:
        self._speculation, self._geometry, self._state = speculation, geometry, state
        drafts = geometry.draft.num_draft_tokens > 1
        self.modes: tuple[Mode, ...] = (Mode.DECODE, Mode.VERIFY) if drafts else (Mode.DECODE,)

    def capture(self) -> None:
        """Capture the drafting's own programs at every captured batch size."""

    def begin(self, request: Request) -> None:
        """Create the drafter of a new request."""
        request.drafter = self._speculation.begin(request.id, request.prompt)

    def extend(self, prefill: Prefill) -> None:
        """Process a prefill of the target."""

    def ready(self, run_round: RunRound) -> None:
        """Finish the setup. The engine calls this once, after all captures and before the first request.

        Args:
            run_round: runs the target's forward of a round: `Forwards.round`.
        """

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Write a draft tree for each request into the filled state; return the round that verifies the trees.

        If no drafter has a guess, the round is plain decoding.
        """
        trees = self._propose(requests)
        if all(len(tree) == 1 for tree in trees):
            return Round(Mode.DECODE, padded)
        self._state.set_draft_trees(trees, padded)
        return Round(Mode.VERIFY, padded)

    def _propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree([r.tokens[-1]]) if r.drafter is None else r.drafter.propose() for r in requests]

    def admit(self, batch: ForwardBatch) -> Admitted:
        """Return the trees that a RAGGED_VERIFY batch verifies, chosen from the trees in the state. Captured."""
        raise NotImplementedError("this drafting has no row budgets, so it cannot admit trees; use VERIFY rounds")

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Store a verified batch's data for `draft_extend`; features ``[R · D, width]``, of all nodes. Captured."""

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Process the tokens that the round accepted; `host` bounds the lengths before the round."""

    @property
    def report(self) -> torch.Tensor | None:
        """Measurements of the round just enqueued, float32 on the device, for `learn`; None if there are none."""
        return None

    def learn(self, sent: Round, finished: Sequence[FinishedForward], report: Sequence[float] | None) -> None:
        """Learn from a round's results before the requests get the tokens. With overlap this is one round late."""


class DeviceSpeculation(Speculation):
    """Drafting method with programs on the device, such as the steps of a draft model."""

    def open(self, model: CausalLM) -> Layered | None:
        """Return the draft model for `model`, or None. Its KV lies in separate pools under the same page ids."""
        return None

    @abstractmethod
    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create the drafting of one engine.

        Args:
            layers: attention layers of the draft model, or of `model` if there is no draft model.
        """


def draft_model(speculation: Speculation, model: CausalLM) -> Layered | None:
    """Return the draft model of a speculation, or None if it has none."""
    return speculation.open(model) if isinstance(speculation, DeviceSpeculation) else None


def make_drafting(
    speculation: Speculation, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner
) -> Drafting:
    """Create the drafting of one engine; see `DeviceSpeculation.drafting`."""
    if isinstance(speculation, DeviceSpeculation):
        return speculation.drafting(model, layers, state, runner)
    return Drafting(speculation, layers.geometry, state)
