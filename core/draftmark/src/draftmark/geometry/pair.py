"""Geometries of a target and a draft model, checked against each other and their models. Integers only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import GeometryError
from .batch_geometry import BatchGeometry
from .geometry import Geometry


@dataclass(frozen=True)
class ModelFacts:
    """Shape of one attention layer in a model's configuration, per tensor-parallel rank.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim, window_left, value_dim, latent, chosen_width: as in `AttentionShape`.
        dtype: torch dtype name of the activations.
        rotary_len: number of positions in the model's rotary table.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rotary_len: int
    window_left: int = -1
    value_dim: int | None = None
    latent: bool = False
    softmax_scale: float | None = None
    """Factor on q·k; None skips its check."""
    chosen_width: int = 0


@dataclass(frozen=True)
class GeometryPair:
    """Geometries of a target and a draft model that decode together.

    Both share the draft shape (the width of a tree or block), the limits, page ids, page table and lengths. Each has
    its own attention shape, arena, cache and backend.

    Attributes:
        target, draft: the two geometries.
        target_model, draft_model: shapes in the models' configurations; None skips the check of that model. The
            check rejects a draft layer with the target's heads (vllm#53002) and a rotary table shorter than
            max_context_len (vllm#57941). Different page sizes are always rejected (vllm-ascend#13372).

    Raises:
        GeometryError: the first field with different values in target and draft, or in geometry and model.
    """

    target: Geometry
    draft: Geometry
    target_model: ModelFacts | None = None
    draft_model: ModelFacts | None = None

    def __post_init__(self) -> None:
        for side in ("target", "draft"):
            _check_kind(f"pair.{side}", getattr(self, side), Geometry)
            if getattr(self, f"{side}_model") is not None:
                _check_kind(f"pair.{side}_model", getattr(self, f"{side}_model"), ModelFacts)
        for name in ("draft", "limits"):
            mine, other = getattr(self.target, name), getattr(self.draft, name)
            if mine != other:
                raise GeometryError(
                    f"pair.{name}", other, f"the target has {mine!r}", "give both geometries the same value"
                )
        pages = self.target.attention.page_size, self.draft.attention.page_size
        if pages[0] != pages[1]:
            raise GeometryError(
                "pair.page_size", pages[1], f"the target has {pages[0]}", "use one page size: both share a page table"
            )
        for side in ("target", "draft"):
            model = getattr(self, f"{side}_model")
            if model is not None:
                _check_model(f"pair.{side}", getattr(self, side), model)


def check_shared_batch(geometry: BatchGeometry, state: BatchGeometry) -> None:
    """Raise `GeometryError` unless two layers of one model have the same draft shape and limits, so share a batch."""
    for name in ("draft", "limits"):
        mine, other = getattr(geometry, name), getattr(state, name)
        for field in (one.name for one in fields(mine)):
            value, said = getattr(other, field), getattr(mine, field)
            if value != said:
                remedy = "give all geometries of a model the same value: they share a batch"
                raise GeometryError(f"state.{name}.{field}", value, f"the other layers have {said!r}", remedy)


def _check_kind(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        remedy = f"write {kind.__name__}{'.create' * (kind is Geometry)}(…)"
        raise GeometryError(field, value, f"it must be an instance of {kind.__name__}", remedy)


def _check_model(side: str, geometry: Geometry, model: ModelFacts) -> None:
    """Raise unless `geometry` has the model's attention shape and the rotary table covers max_context_len."""
    a = geometry.attention
    mine = {**vars(a), "dtype": a.q_dtype, "value_dim": a.value_width}
    theirs = {**vars(model), "value_dim": model.head_dim if model.value_dim is None else model.value_dim}
    if model.softmax_scale is None:
        theirs["softmax_scale"] = mine["softmax_scale"]
    for name in (field.name for field in fields(ModelFacts) if field.name != "rotary_len"):
        said = theirs[name]
        if not _equal(mine[name], said):
            remedy = "make each geometry from its own model's configuration"
            raise GeometryError(f"{side}.{name}", mine[name], f"the model has {said!r}", remedy)
    needed = geometry.limits.max_context_len
    if type(model.rotary_len) is not int:
        limit = "it must be an integer"
        raise GeometryError(f"{side}.rotary_len", model.rotary_len, limit, "use max_position_embeddings")
    if model.rotary_len < needed:
        raise GeometryError(
            f"{side}.rotary_len",
            model.rotary_len,
            f"positions reach max_context_len = {needed}",
            "lower max_context_len, or use a draft model with enough positions",
        )


def _equal(mine: object, said: object) -> bool:
    """Compare two values of a field; two floats may differ by the rounding of two equal formulas."""
    if isinstance(mine, float) and isinstance(said, float):
        return math.isclose(mine, said, rel_tol=1e-6)
    return mine == said
