"""`DFlash`: the speculation that drafts a whole block in one forward."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from draftmark import GeometryError, Mode

from ..arguments import check_kind, is_count
from ..drafting import DeviceSpeculation, Drafting
from ..eagle.speculation import check_fit
from ..layers import AttentionLayers
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .drafter import BlockDrafter
from .head import BlockHead


@dataclass(frozen=True)
class DFlash(DeviceSpeculation):
    """Drafts by a block head: a chain of each mask row's best token, or a best-first tree over topk of them (DDTree).

    Attributes:
        head: the head, made for the model's hidden states.
        topk: candidates of each mask row; 1 is a chain, which needs no mask.
        num_draft_tokens: rows verified per request, root included; 0 means the head's block_size. A chain has at most
            block_size.

    Raises:
        RequestError: `head` has another type.
        GeometryError: a chain is longer than a block. The geometry checks the counts.
    """

    head: BlockHead
    topk: int = 1
    num_draft_tokens: int = 0
    block_size: int = field(init=False)

    def __post_init__(self) -> None:
        check_kind("head", self.head, BlockHead, "a BlockHead", "write BlockHead(BlockConfig(…))")
        block = self.head.config.block_size
        object.__setattr__(self, "block_size", block)
        if self.num_draft_tokens == 0:
            object.__setattr__(self, "num_draft_tokens", block)
        if self.topk == 1 and is_count(self.num_draft_tokens) and self.num_draft_tokens > block:
            limit = f"a chain has at most block_size = {block} rows"
            raise GeometryError("draft.num_draft_tokens", self.num_draft_tokens, limit, "lower it, or raise topk")

    def __str__(self) -> str:
        return f"DFlash drafts (topk {self.topk}, blocks of {self.block_size}, {self.num_draft_tokens} tokens)"

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """Modes of the head: prefills, and blocks."""
        return (Mode.EXTEND, Mode.DRAFT_BLOCK)

    def open(self, model: CausalLM) -> BlockHead:
        """Return a copy of the head on the model's device and in its dtype, in evaluation mode.

        Raises:
            ModelError: the head was made for another model.
            GeometryError: topk exceeds the vocabulary.
        """
        head = deepcopy(self.head).to(device=model.device, dtype=model.dtype).requires_grad_(False).eval()
        check_fit(head.config, model)
        if is_count(self.topk) and self.topk > model.vocab_size:
            limit = f"the head can draft {model.vocab_size} tokens"
            raise GeometryError("draft.topk", self.topk, limit, "lower topk")
        return head

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create a `BlockDrafter` over the head's layers."""
        return BlockDrafter(self, model, layers, state, runner)
