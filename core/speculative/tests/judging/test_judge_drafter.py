"""Tests that a drafter equal to its target loses no draft, and that a drafter that reads other data is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import ModelError, load
from draftmark.runtime import ForwardBatch
from draftmark_speculative import EngineConfig
from draftmark_speculative.judging import DraftAttention, judge_drafter

CONFIG = EngineConfig(page_size=4, max_num_reqs=3, max_context_len=64, max_extend_tokens=32)
NEW_TOKENS = 24


class OtherShape(DraftAttention):
    """Attends with another attention shape than the target's."""

    change: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, target) -> None:
        super().__init__(target)
        self.layers = [self._other(layer, target.geometry) for layer in self.layers]

    def _other(self, layer, geometry):
        changes = {name: make(layer.shape) for name, make in self.change.items()}
        shape = replace(layer.shape, **changes)
        backend = load("reference").open(replace(geometry, attention=shape), "cpu")
        return replace(layer, backend=backend, shape=shape)


class OtherScale(OtherShape):
    """Multiplies logits by twice the target's softmax scale."""

    change = {"softmax_scale": lambda shape: 2 * shape.softmax_scale}  # noqa: RUF012


class NarrowWindow(OtherShape):
    """Sees half of the target's window."""

    change = {"window_left": lambda shape: shape.window_left // 2}  # noqa: RUF012


class LatePositions(DraftAttention):
    """Counts model positions from one too many."""

    def positions(self, batch: ForwardBatch):
        """Return positions one too high."""
        return batch.positions + 1


class StaleKV(DraftAttention):
    """Copies the target's KV once, and keeps its own KV from then on, rejected and missing tokens included."""

    _copied = False

    def begin(self, batch: ForwardBatch) -> None:
        """Copy the KV before the first forward."""
        if not self._copied:
            caches = [replace(one.cache, k=one.cache.k.clone(), v=one.cache.v.clone()) for one in self.layers]
            self.layers = [replace(one, cache=cache) for one, cache in zip(self.layers, caches, strict=True)]
            self._copied = True
        super().begin(batch)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(("drafts", "topk"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_target_that_drafts_for_itself_loses_no_draft(make_model, prompts, family, drafts, topk) -> None:
    """With the target's own KV, scales, windows and positions every greedy draft is accepted."""
    starts = prompts(4, 20)
    assert judge_drafter(make_model(family), CONFIG, starts, NEW_TOKENS, drafts=drafts, topk=topk) == []


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize(
    ("attention", "difference", "detail"),
    [
        (OtherScale, "scale", "layer 0"),
        (NarrowWindow, "window", "layer 0, 4 and not 8"),
        (LatePositions, "position", "layer 0"),
        (StaleKV, "KV", "of position"),
    ],
)
def test_wrong_drafter_is_named(make_model, prompts, attention, difference: str, detail: str, topk: int) -> None:
    """Every lost draft names what the drafter reads differently, with the layer and the values."""
    lost = judge_drafter(make_model("mistral"), CONFIG, prompts(4, 20), NEW_TOKENS, topk=topk, attention=attention)
    assert lost
    assert {one.difference for one in lost} == {difference}
    assert detail in lost[0].detail
    chosen = f"the drafter chose {lost[0].draft}, the target {lost[0].target}"
    assert f"position {lost[0].position}: {chosen}" in str(lost[0])
    assert f"it reads another {difference}" in str(lost[0])


def test_model_with_state_is_refused(make_model) -> None:
    """A model with recurrent state cannot draft for itself, and the error says why."""
    with pytest.raises(ModelError, match="has 2 layers with recurrent state, which its own drafts would change; use a"):
        judge_drafter(make_model("lfm2"), CONFIG, [[1, 2, 3]], NEW_TOKENS)
