"""Draft trees of guessed tokens, and the interfaces that produce them for an engine.

A configuration names a `Speculation`. An engine creates a `Drafting` from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from draftmark import DRAFT_MODES, TARGET_MODES, Geometry, LoadedBackend, Mode

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import ForwardBatch, HostLengths, VerifyResult

    from .adaptive.survival import Admitted
    from .forwards import Forwards
    from .layers import AttentionLayers, Layered
    from .models import CausalLM
    from .models.features import FeatureTaps
    from .pending import FinishedForward
    from .request import Request
    from .state import DeviceState, GraphRunner


@dataclass
class DraftTree:
    """Draft tokens of one request, parents before children. Node 0 is the root, which is the pending token.

    Attributes:
        tokens: token of each node.
        parents: node index of each node's parent; -1 for the root.
        grounds: class of evidence for each node, a small integer; empty means 0 for every node. Adaptive drafting
            learns how often nodes of each class are accepted. An n-gram look-up stores the number of matched tokens.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    grounds: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def insert(self, path: Sequence[int], budget: int, ground: int = 0) -> int:
        """Add a path from the root, sharing existing nodes; return the number of new nodes, at most `budget`."""
        self.grounds += [0] * (len(self) - len(self.grounds))
        node, added = 0, 0
        for token in path:
            child = self._child(node, token)
            if child is None:
                if added == budget:
                    break
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.grounds.append(ground)
                added += 1
            node = child
        return added

    def _child(self, node: int, token: int) -> int | None:
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


class Drafter(Protocol):
    """Source of drafts for one request, on the host. It receives every token of that request, in order."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that were verified and given to the request."""

    def propose(self) -> DraftTree:
        """Return a tree below the newest token, within the speculation's limits; without a guess only the root."""


class Round(NamedTuple):
    """Mode and size of a round's verifying forward.

    Attributes:
        mode: DECODE, VERIFY or RAGGED_VERIFY.
        size: size of the graph: padded requests, or the budget of rows in RAGGED_VERIFY.
    """

    mode: Mode
    size: int


class Prefill(NamedTuple):
    """Prefill of the target that a drafting processes.

    Attributes:
        batch: the target's EXTEND batch.
        features: ``[num_rows, width]``, the target's tapped hidden states.
        tokens: int64 ``[lookahead, num_rows]``, the tokens that follow each row's own token; 0 where none exists yet.
        rows: int64 ``[R]``, state row of each request.
        ended: int64 ``[n]``, state rows of the requests with a prompt that ends in this batch.
        last: int64 ``[n]``, last batch row of each of these requests.
    """

    batch: ForwardBatch
    features: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    ended: torch.Tensor
    last: torch.Tensor


class Speculation:
    """Drafting method, fixed for an engine's life.

    Override `begin` to draft on the host. Override `open` and `drafting` to draft on the device.

    Attributes:
        topk: most branches of a tree; 1 means that every tree is a chain and needs no mask.
        num_draft_tokens: most nodes of a tree, root included.
        num_steps: levels of a tree that a draft model adds; 1 without a draft model.
        block_size: rows of a draft model that proposes whole blocks, root included; 0 for others.
        num_modules: MTP modules that draft one token each; 1 for others.
    """

    topk: int
    num_draft_tokens: int
    num_steps: int = 1
    block_size: int = 0
    num_modules: int = 1

    def __str__(self) -> str:
        return f"{type(self).__name__} drafts (topk {self.topk}, {self.num_draft_tokens} tokens)"

    @property
    def reads_tokens(self) -> bool:
        """True if the host makes drafts from the newest tokens. The engine then cannot overlap rounds."""
        return type(self).begin is not Speculation.begin

    @property
    def target_modes(self) -> tuple[Mode, ...]:
        """Modes that the target's backend must support."""
        return TARGET_MODES

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """Modes that the draft model's backend must support, if there is a draft model."""
        return DRAFT_MODES

    def row_budgets(self, max_num_reqs: int) -> tuple[int, ...]:
        """Return the row budgets to capture; empty unless the device decides the number of rows of each request."""
        return ()

    def require(self, loaded: LoadedBackend) -> None:
        """Raise `BackendRefusal` if a backend cannot run this speculation with any model."""

    def begin(self, request_id: int, prompt: Sequence[int]) -> Drafter | None:
        """Return the host drafter of a new request, or None if nothing is drafted on the host."""
        return None

    def open(self, model: CausalLM) -> Layered | None:
        """Return the draft model for `model`, or None. Its KV lies in separate pools under the same page ids."""
        return None

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create the drafting of one engine.

        Args:
            layers: attention layers of the draft model, or of `model` if there is no draft model.
        """
        return Drafting(self, layers.geometry, state)


class NoSpeculation(Speculation):
    """Plain decoding without drafts."""

    topk, num_draft_tokens = 1, 1

    def __str__(self) -> str:
        return "no drafts"


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

    def ready(self, forwards: Forwards) -> None:
        """Finish the setup. The engine calls this once, after all captures and before the first request."""

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
