"""Draft trees of guessed tokens, and the speculations (drafting methods) that an engine's configuration names.

An engine creates a `Drafting` (module `drafting`) from its speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from draftmark import DRAFT_MODES, TARGET_MODES, LoadedBackend, Mode

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import ForwardBatch


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

    Override `begin` to draft on the host. A `DeviceSpeculation` drafts on the device.

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


class NoSpeculation(Speculation):
    """Plain decoding without drafts."""

    topk, num_draft_tokens = 1, 1

    def __str__(self) -> str:
        return "no drafts"
