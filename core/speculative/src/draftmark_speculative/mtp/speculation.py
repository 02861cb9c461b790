"""`Mtp` and `MtpModules`: the speculations that draft with the model's own MTP layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftmark import GeometryError, Mode, RequestError

from ..arguments import LARGEST, check_count, check_kind, is_count
from ..drafting import DeviceSpeculation, Drafting
from ..eagle.speculation import HeadDrafts
from ..layers import AttentionLayers
from ..models import CausalLM
from ..state import DeviceState, GraphRunner
from .files import load_mtp
from .head import MtpHead
from .modules import ModulesDrafter


@dataclass(frozen=True)
class Mtp(HeadDrafts):
    """Drafts by the model's first MTP layer, which runs once per level of the tree. `MtpModules` uses further layers.

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


@dataclass(frozen=True)
class MtpModules(DeviceSpeculation):
    """Drafts by the model's first MTP layers (modules). Each drafts one token of a chain.

    Attributes:
        head: the layers; None reads them from the model's folder.
        num_modules: layers that draft, n. A round verifies n + 1 rows per request.

    Raises:
        RequestError: a field has another type, or the head has fewer layers.
    """

    head: MtpHead | None = None
    num_modules: int = 2
    topk: int = field(default=1, init=False)
    num_draft_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        check_kind("head", self.head, MtpHead | None, "an MtpHead", "leave it out to read the model's folder")
        check_count("num_modules", self.num_modules, 1, LARGEST, "use the number of the model's MTP layers")
        if self.head is not None and self.num_modules > len(self.head.layers):
            raise RequestError(
                f"num_modules is {self.num_modules}, but the head has {len(self.head.layers)} MTP layers; lower it"
            )
        object.__setattr__(self, "num_draft_tokens", self.num_modules + 1)

    def __str__(self) -> str:
        return f"MTP drafts ({self.num_modules} modules)"

    @property
    def draft_modes(self) -> tuple[Mode, ...]:
        """Modes of the layers: prefills, and accepted rows."""
        return (Mode.EXTEND, Mode.DRAFT_EXTEND)

    def open(self, model: CausalLM) -> MtpHead:
        """Return the layers.

        Raises:
            ModelError: the model's folder has fewer MTP layers, one is damaged, or one would run incorrectly.
        """
        return load_mtp(model, self.num_modules) if self.head is None else self.head

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create a `ModulesDrafter` over the layers."""
        return ModulesDrafter(self, model, layers, state, runner)
