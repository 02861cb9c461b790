"""`Eagle`: the speculation that drafts on the device with a head."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmark import GeometryError, ModelError

from ..arguments import check_kind, is_count
from ..drafting import DeviceSpeculation, Drafting
from ..layers import AttentionLayers
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .config import HeadConfig
from .drafter import HeadDrafter
from .head import DraftHead
from .installed import installed_head


class HeadDrafts(DeviceSpeculation):
    """Speculation that drafts on the device, with the `Head` that `open` returns."""

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create a `HeadDrafter` over the head's layers."""
        return HeadDrafter(self, model, layers, state, runner)


@dataclass(frozen=True)
class Eagle(HeadDrafts):
    """Drafts by a head that continues the target's hidden states; the tree grows where tokens are probable.

    Attributes:
        head: a folder that `DraftHead.save` wrote, or the head itself. None selects the installed head for the model
            (`draftmark_speculative.eagle.installed`).
        topk: beams of a draft step, and candidates after each beam; 1 is a chain, which needs no mask.
        num_steps: levels of the tree. The head runs ``num_steps - 1`` times a round to draft, and once over the
            accepted tokens.
        num_draft_tokens: rows verified per request, root included.

    Raises:
        RequestError: `head` has another type. The geometry checks the counts.
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
        """Return the head on the model's device and in its dtype, in evaluation mode.

        Raises:
            ModelError: there is no head, or it is damaged or made for another model.
            GeometryError: topk exceeds the number of tokens that the head can draft.
        """
        if isinstance(self.head, DraftHead):
            head = deepcopy(self.head)  # a copy, because the caller can continue to train the head
        else:
            head = DraftHead.load(installed_head(model.name) if self.head is None else self.head)
        head = head.to(device=model.device, dtype=model.dtype).requires_grad_(False).eval().pack()
        check_fit(head.config, model)
        vocab = head.config.draft_vocab_size or head.config.vocab_size
        if is_count(self.topk) and self.topk > vocab:  # the geometry rejects a topk that is not a count
            raise GeometryError("draft.topk", self.topk, f"the head can draft {vocab} tokens", "lower topk")
        return head


def check_fit(config: HeadConfig, model: CausalLM) -> None:
    """Raise `ModelError` unless the head fits the model's hidden states and vocabulary."""
    rows = model.lm_head.shape[0]
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
