"""Layers with state of one transformers model, and the forward in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftmark import ModelError, StateShape

from ..layer_kinds import state_layers
from .block import StateBlock
from .delta import KimiDelta, OlmoDelta, Qwen3NextDelta, Qwen35Delta
from .lightning import MiniMaxLightning
from .mamba2 import FalconH1Mamba2, Mamba2Block
from .short_conv import ShortConvBlock
from .step import StateRun

BLOCKS: dict[str, type[StateBlock]] = {
    "Qwen3NextGatedDeltaNet": Qwen3NextDelta,
    "Qwen3_5GatedDeltaNet": Qwen35Delta,
    "Qwen3_5MoeGatedDeltaNet": Qwen35Delta,
    "OlmoHybridGatedDeltaNet": OlmoDelta,
    "KimiLinearDeltaAttention": KimiDelta,
    "GraniteMoeHybridMambaLayer": Mamba2Block,
    "BambaMixer": Mamba2Block,
    "NemotronHMamba2Mixer": Mamba2Block,
    "FalconH1Mixer": FalconH1Mamba2,
    "MiniMaxLightningAttention": MiniMaxLightning,
    "Lfm2ShortConv": ShortConvBlock,
    "Lfm2MoeShortConv": ShortConvBlock,
    "Lfm3ShortConv": ShortConvBlock,
}
"""Class of a transformers module, and the block that replaces its forward."""


class HybridLayers:
    """Layers with state of one model, in order. Empty for a model that has only attention.

    Attributes:
        blocks: one for each layer with state.
    """

    def __init__(self, hf: Any) -> None:
        modules = [module for module in hf.modules() if type(module).__name__ in BLOCKS]
        blocks = [BLOCKS[type(module).__name__](module, hf.dtype) for module in modules]
        self.blocks = tuple(sorted(blocks, key=lambda block: block.decoder_layer))

    def __bool__(self) -> bool:
        return bool(self.blocks)

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        """Shape of each layer with state."""
        return tuple(block.shape for block in self.blocks)

    @property
    def decodes_alike(self) -> bool:
        """True if transformers computes the same over its own cache as in one forward; see `StateBlock`."""
        return all(block.decodes_alike for block in self.blocks)

    @contextmanager
    def running(self, step: StateRun) -> Iterator[None]:
        """Run the blocks in the place of their modules' forwards inside the context.

        The modules' own forwards are active again afterwards. This does no device work, so a captured region may
        contain the context.
        """
        for layer, block in enumerate(self.blocks):
            block.module.forward = _Forward(block, step, layer)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.module.forward


def open_states(hf: Any, name: str) -> HybridLayers | None:
    """Return the model's layers with state, or None for a model without.

    Raises:
        ModelError: a layer with state has a module that draftmark has no block for.
    """
    config = hf.config.get_text_config()
    wanted = state_layers(config)
    try:
        hybrid = HybridLayers(hf)
        found = [block.decoder_layer for block in hybrid.blocks]
        if found != wanted:
            lacking = next(iter(sorted(set(wanted) ^ set(found))), wanted[0])
            raise ModelError(
                f"its layer {lacking} keeps a state in a module that draftmark has no block for; use transformers 5.20 "
                "or later and the family's own classes"
            )
    except ModelError as error:
        raise ModelError(f"model {name!r} (family {config.model_type}) cannot be decoded: {error}") from None
    return hybrid or None


class _Forward:
    """Forward of a module in one draftmark forward: ``[1, rows, hidden_size]`` → the same shape, or a pair with it."""

    def __init__(self, block: StateBlock, step: StateRun, layer: int) -> None:
        self._block, self._step, self._layer = block, step, layer

    def __call__(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        if attention_mask is not None:
            raise ModelError(
                f"layer {self._block.decoder_layer} with state got a padding mask, but draftmark packs rows without "
                "padding; call CausalLM.forward"
            )
        mixed = self._block(hidden_states[0], self._step, self._layer)[None]
        return (mixed, None) if self._block.returns_pair else mixed
