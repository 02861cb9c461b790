"""`Mtp`: the speculation that drafts with the model's own MTP layer."""

from __future__ import annotations

from dataclasses import dataclass

from draftmark import GeometryError

from ..arguments import check_kind, is_count
from ..eagle.speculation import HeadDrafts
from ..models import CausalLM
from .files import load_mtp
from .head import MtpHead


@dataclass(frozen=True)
class Mtp(HeadDrafts):
    """Drafts by the model's first MTP layer, which runs once per level of the tree; further layers are not used.

    Attributes:
        head: the layer; None reads it from the model's folder.
        topk, num_steps, num_draft_tokens: as in `Eagle`.

    Raises:
        RequestError: `head` has another type. The geometry checks the counts.
    """

    head: MtpHead | None = None
    topk: int = 1
    num_steps: int = 3
    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        check_kind("head", self.head, MtpHead | None, "an MtpHead", "leave it out to read the model's folder")

    def __str__(self) -> str:
        return f"MTP drafts (topk {self.topk}, {self.num_steps} steps, {self.num_draft_tokens} tokens)"

    def open(self, model: CausalLM) -> MtpHead:
        """Return the head.

        Raises:
            ModelError: the model's folder has no MTP layer, it is damaged, or it would run incorrectly.
            GeometryError: topk exceeds the vocabulary.
        """
        if is_count(self.topk) and self.topk > model.vocab_size:
            limit = f"the layer can draft {model.vocab_size} tokens"
            raise GeometryError("draft.topk", self.topk, limit, "lower topk")
        return load_mtp(model) if self.head is None else self.head
