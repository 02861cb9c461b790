"""Drafts that a target rejects although it made them itself, and the difference that explains each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftmark import ModelError

from ..config import EngineConfig
from ..decoding import generate
from ..layers import AttentionLayers
from ..models import CausalLM
from .attention import DraftAttention, Reading
from .self_drafts import SelfDrafts

CLOSE = 1e-2
"""Relative difference of KV that rounding explains: a verify forward computes the KV of drafts with other shapes."""


@dataclass(frozen=True)
class LostDraft:
    """The first rejected draft of one round.

    Attributes:
        request: id of the request.
        position: position of the rejected token.
        draft, target: the drafter's token, and the target's.
        difference: "position", "scale", "window" or "KV", the first one by which the drafter's row differs from the
            target's; "" if none differs, which leaves a near tie of two tokens.
        detail: the layer and the two values.
    """

    request: int
    position: int
    draft: int
    target: int
    difference: str = ""
    detail: str = ""

    def __str__(self) -> str:
        cause = "nothing differs, so it is a near tie"
        if self.difference:
            cause = f"it reads another {self.difference}: {self.detail}"
        return (
            f"request {self.request}, position {self.position}: the drafter chose {self.draft}, the target "
            f"{self.target}; {cause}"
        )


def judge_drafter(
    model: CausalLM,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    drafts: int = 4,
    topk: int = 1,
    attention: Callable[[AttentionLayers], DraftAttention] = DraftAttention,
) -> list[LostDraft]:
    """Let a target draft for itself with greedy decoding, and return every round that lost a draft.

    With the target's own KV, scales, windows and positions the list is empty, except for near ties of two tokens.

    Args:
        config: the engine's settings. `speculate`, `graph` and `overlap` are replaced.
        drafts: draft tokens of each branch.
        topk: branches of a draft tree. Positions that follow tail slots and not depths show from 2 on.
        attention: makes the drafter's attention from the target's layers.

    Raises:
        ModelError: the model has recurrent state, which a target that drafts for itself would change.
    """
    if model.states:
        raise ModelError(
            f"model {model.name!r} has {len(model.states)} layers with recurrent state, which its own drafts would "
            "change; use a model with attention layers only"
        )
    found: list[LostDraft] = []

    def rejected(lost: LostDraft, mine: dict[int, Reading], theirs: dict[int, Reading]) -> None:
        difference, detail = first_difference(mine, theirs)
        found.append(replace(lost, difference=difference, detail=detail))

    speculation = SelfDrafts(drafts, attention, lambda *lost: rejected(LostDraft(*lost[:4]), *lost[4:]), topk)
    generate(model, prompts, new_tokens, replace(config, speculate=speculation, graph=False, overlap=False))
    return found


def first_difference(mine: dict[int, Reading], theirs: dict[int, Reading]) -> tuple[str, str]:
    """Return the name of the first difference of two rows' readings by layer, and its values; ("", "") if none."""
    for layer, own in sorted(mine.items()):
        other = theirs[layer]
        values = {
            "position": (own.position, other.position),
            "scale": ((own.shape.softmax_scale, *own.scales), (other.shape.softmax_scale, *other.scales)),
            "window": (own.shape.window_left, other.shape.window_left),
        }
        for name, (got, wanted) in values.items():
            if got != wanted:
                return name, f"layer {layer}, {got} and not {wanted}"
    for layer, own in sorted(mine.items()):
        other, window = theirs[layer], own.shape.window_left
        first = max(0, own.position - window) if window >= 0 else 0
        for name, got, wanted in (("K", own.k, other.k), ("V", own.v, other.v)):
            far = ~torch.isclose(got[first:].float(), wanted[first:].float(), rtol=CLOSE, atol=CLOSE)
            if bool(far.any()):
                at = first + int(far.flatten(1).any(1).nonzero()[0])
                return "KV", f"layer {layer}, {name} of position {at}"
    return "", ""
