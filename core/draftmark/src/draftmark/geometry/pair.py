"""Target and draft model: what they share, and whether each geometry is its own model's. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import GeometryError
from .geometry import Geometry


@dataclass(frozen=True)
class ModelFacts:
    """What a model's configuration says of one of its attention layers, per tensor-parallel rank.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim, window_left: as in `AttentionShape`.
        dtype: torch dtype name of the activations.
        rotary_len: positions that the model's rotary table has.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rotary_len: int
    window_left: int = -1


@dataclass(frozen=True)
class GeometryPair:
    """A target and a draft model that decode together.

    They share the draft shape (the width of a tree or block), the limits, page ids, page table and lengths; each has
    its own attention shape, arena, cache and backend.

    Attributes:
        target, draft: the geometries.
        target_model, draft_model: what the models say of themselves; None leaves a model unchecked. A draft layer
            that was planned from the target's heads (vllm#53002), a page size that is not the kernel's block
            (vllm-ascend#13372) and a rotary table shorter than the positions (vllm#57941) are refused here.

    Raises:
        GeometryError: the first field in which two that must agree do not.
    """

    target: Geometry
    draft: Geometry
    target_model: ModelFacts | None = None
    draft_model: ModelFacts | None = None

    def __post_init__(self) -> None:
        for name in ("draft", "limits"):
            mine, other = getattr(self.target, name), getattr(self.draft, name)
            if mine != other:
                raise GeometryError(f"pair.{name}", other, f"the target has {mine!r}", "give both models the same one")
        pages = self.target.attention.page_size, self.draft.attention.page_size
        if pages[0] != pages[1]:
            raise GeometryError(
                "pair.page_size", pages[1], f"the target has {pages[0]}", "both models share one page table"
            )
        for side in ("target", "draft"):
            model = getattr(self, f"{side}_model")
            if model is not None:
                _check_model(f"pair.{side}", getattr(self, side), model)


def _check_model(side: str, geometry: Geometry, model: ModelFacts) -> None:
    """Raise unless `geometry` was made from `model`, and the model's positions reach as far as the engine goes."""
    mine = {**vars(geometry.attention), "dtype": geometry.attention.q_dtype}
    for name in (field.name for field in fields(ModelFacts) if field.name != "rotary_len"):
        said = getattr(model, name)
        if mine[name] != said:
            remedy = "make each geometry from its own model's configuration"
            raise GeometryError(f"{side}.{name}", mine[name], f"the model has {said!r}", remedy)
    needed = geometry.limits.max_context_len
    if model.rotary_len < needed:
        raise GeometryError(
            f"{side}.rotary_len",
            model.rotary_len,
            f"positions reach max_context_len = {needed}",
            "lower max_context_len, or take a draft model made for as many positions as its target",
        )
