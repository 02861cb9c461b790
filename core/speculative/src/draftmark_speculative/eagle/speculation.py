"""Eagle: drafting on the device, as an engine is asked for it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmark import GeometryError, ModelError

from ..arguments import check_kind, is_count
from ..drafts import Drafting, Speculation
from ..layers import AttentionLayers
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .drafter import HeadDrafter
from .head import DraftHead
from .installed import installed_head


@dataclass(frozen=True)
class Eagle(Speculation):
    """Drafts by a head that continues the target's hidden states, as a tree that grows where it is probable.

    Attributes:
        head: a folder that `DraftHead.save` wrote, or the head itself; None looks for an installed one that was
            trained for the model (`draftmark_speculative.eagle.installed`).
        topk: beams of a draft step, and candidates behind each; 1 is a chain, and needs no mask.
        num_steps: levels of the tree; the head runs ``num_steps - 1`` times a round, and once to take over what
            was accepted.
        num_draft_tokens: rows verified per request, root included.

    Raises:
        RequestError: a head that is neither. The geometry refuses the counts.
    """

    head: str | Path | DraftHead | None = None
    topk: int = 4
    num_steps: int = 4
    num_draft_tokens: int = 16

    def __post_init__(self) -> None:
        kinds = str | Path | DraftHead | None
        check_kind("head", self.head, kinds, "a folder or a DraftHead", "leave it out for the installed one")

    def __str__(self) -> str:
        return f"EAGLE drafts (topk {self.topk}, {self.num_steps} steps, {self.num_draft_tokens} tokens)"

    def open(self, model: CausalLM) -> DraftHead:
        """The head on the model's device and in its dtype, in evaluation mode.

        Raises:
            ModelError: no head, a damaged one, or one for another model.
            GeometryError: topk is more than the head can tell apart.
        """
        if isinstance(self.head, DraftHead):
            head = deepcopy(self.head)  # the caller may go on training it
        else:
            head = DraftHead.load(installed_head(model.name) if self.head is None else self.head)
        head = head.to(device=model.device, dtype=model.dtype).requires_grad_(False).eval().pack()
        _check_fit(head, model)
        vocab = head.config.draft_vocab_size or head.config.vocab_size
        if is_count(self.topk) and self.topk > vocab:  # the geometry refuses what is no count
            raise GeometryError("draft.topk", self.topk, f"the head knows {vocab} tokens", "lower topk")
        return head

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """A `HeadDrafter` over the head's layers."""
        return HeadDrafter(self, model, layers, state, runner)


def _check_fit(head: DraftHead, model: CausalLM) -> None:
    """The head reads this model's hidden states and scores its vocabulary."""
    config, rows = head.config, model.lm_head.shape[0]
    for name, mine, models in (
        ("hidden_size", config.hidden_size, model.hidden_size),
        ("embedding width", config.hidden_size, _embedding_width(model)),
        ("vocab_size", config.vocab_size, model.vocab_size),
        ("output rows", config.vocab_size, rows),
    ):
        if mine != models:
            trained = f" (it was trained for {config.target})" if config.target else ""
            raise ModelError(
                f"the draft head's {name} is {mine}{trained}, but model {model.name!r} has {models}; "
                "use the head that was trained for this model"
            )


def _embedding_width(model: CausalLM) -> int:
    return int(model.embed(torch.zeros(1, dtype=torch.int64, device=model.device)).shape[-1])
