"""Drafts: guesses at the next tokens of a request, as a tree, and how an engine comes by them.

A configuration names a `Speculation`; an engine makes a `Drafting` of it.
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
    """Draft tokens of one request, parents before children; node 0 is the root (the pending token).

    Attributes:
        tokens: token of each node.
        parents: node index of each node's parent; -1 for the root.
        grounds: what each node was guessed from, as a small number: nodes on like grounds come true alike, which
            adaptive drafting learns. For n-gram look-up the tokens that matched; empty means 0 for every node.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    grounds: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def insert(self, path: Sequence[int], budget: int, ground: int = 0) -> int:
        """Add a path from the root, sharing nodes with what is there; returns how many nodes were new."""
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
    """Guesses the next tokens of one request. It sees every token of it, in order."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that were verified and given out."""

    def propose(self) -> DraftTree:
        """A tree whose root is the newest token; a root alone means no guess. Within the speculation's limits."""


class Round(NamedTuple):
    """Which forward verifies.

    Attributes:
        mode: DECODE, VERIFY or RAGGED_VERIFY.
        size: of the graph: padded requests, in RAGGED_VERIFY the budget of rows.
    """

    mode: Mode
    size: int


class Speculation:
    """A way of drafting, fixed for an engine's life. On the host it gives `begin`, on the device `open` and `drafting`.

    Attributes:
        topk: most branches of a tree; 1 means that every tree is a chain and needs no mask.
        num_draft_tokens: most nodes of a tree, root included.
        num_steps: levels that a draft model grows; 1 where there is none.
    """

    topk: int
    num_draft_tokens: int
    num_steps: int = 1

    def __str__(self) -> str:
        return f"{type(self).__name__} drafts (topk {self.topk}, {self.num_draft_tokens} tokens)"

    @property
    def reads_tokens(self) -> bool:
        """Whether drafts are made from the newest tokens on the host, which rules out overlap."""
        return type(self).begin is not Speculation.begin

    @property
    def target_modes(self) -> tuple[Mode, ...]:
        """What the target's backend is asked to serve."""
        return TARGET_MODES

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """What the draft model's backend is asked to serve, if there is one."""
        return DRAFT_MODES

    def row_budgets(self, max_num_reqs: int) -> tuple[int, ...]:
        """`Limits.row_budgets` for that many requests: none unless the device decides how many rows each has."""
        return ()

    def require(self, loaded: LoadedBackend) -> None:
        """Raise `BackendRefusal` where a backend cannot be speculated on in this way, whatever the model."""

    def begin(self, request_id: int, prompt: Sequence[int]) -> Drafter | None:
        """A drafter for a new request; None drafts nothing on the host."""
        return None

    def open(self, model: CausalLM) -> Layered | None:
        """The draft model that goes with `model`, or None; its KV lies in pools of its own, under the same page ids."""
        return None

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """One engine's drafting.

        Args:
            layers: of the draft model; of `model` where there is none.
        """
        return Drafting(self, layers.geometry, state)


class NoSpeculation(Speculation):
    """Plain decoding."""

    topk, num_draft_tokens = 1, 1

    def __str__(self) -> str:
        return "no drafts"


class Drafting:
    """How one engine drafts: here, with a `Drafter` a request on the host.

    The engine calls `begin` for a new request and `extend` behind each prefill. In a round it calls `draft`, `keep` at
    the end of the verifying forward, and `draft_extend`.

    Attributes:
        modes: what verifies, at every captured batch size; all are captured.
        budgets: rows that RAGGED_VERIFY is captured for.
        taps: the target's hidden states that `extend` and `keep` read, or None.
    """

    taps: FeatureTaps | None = None
    budgets: tuple[int, ...] = ()

    def __init__(self, speculation: Speculation, geometry: Geometry, state: DeviceState) -> None:
        self._speculation, self._geometry, self._state = speculation, geometry, state
        drafts = geometry.draft.num_draft_tokens > 1
        self.modes: tuple[Mode, ...] = (Mode.DECODE, Mode.VERIFY) if drafts else (Mode.DECODE,)

    def capture(self) -> None:
        """Capture programs of its own, at every captured batch size."""

    def begin(self, request: Request) -> None:
        """Give a new request its drafter."""
        request.drafter = self._speculation.begin(request.id, request.prompt)

    def extend(
        self, batch: ForwardBatch, features: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Follow a prefill of the target.

        Args:
            batch: the target's EXTEND batch.
            features: ``[num_rows, width]``, of the target.
            tokens: int64 ``[num_rows]``, the token *behind* each row's own.
            rows, last: int64 ``[n]``, of the requests whose prompt ends here: state row, and last row of the batch.
        """

    def ready(self, forwards: Forwards) -> None:
        """Follow the capture of everything, before the first request."""

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Write a tree for every request into the state, which was filled with them; the round that verifies it.

        Where no drafter has a guess, the round is plain decoding.
        """
        trees = self._propose(requests)
        if all(len(tree) == 1 for tree in trees):
            return Round(Mode.DECODE, padded)
        self._state.set_draft_trees(trees, padded)
        return Round(Mode.VERIFY, padded)

    def _propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree([r.tokens[-1]]) if r.drafter is None else r.drafter.propose() for r in requests]

    def admit(self, batch: ForwardBatch) -> Admitted:
        """The trees that a RAGGED_VERIFY batch verifies, out of those in the state. Captured."""
        raise NotImplementedError("a drafting without budgets admits nothing")

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Keep what `draft_extend` needs of a verified batch; features ``[R · D, width]``, of every node. Captured."""

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Take over what the round accepted; `host` bounds the lengths before it."""

    @property
    def report(self) -> torch.Tensor | None:
        """What the round that was just sent says of itself, for `learn`; on the device."""
        return None

    def learn(self, sent: Round, finished: Sequence[FinishedForward], report: Sequence[float] | None) -> None:
        """Take note of a round's results, before they are given to the requests; perhaps a round late."""
