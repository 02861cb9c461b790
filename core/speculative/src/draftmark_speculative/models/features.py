"""Hidden states of a transformers model, captured by hooks during its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftmark import ModelError

FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")
"""Names of the norm after the last decoder layer: most families, Nemotron-H, Falcon-H1, LFM2."""


class FeatureTaps:
    """Records some hidden states of a model's forward, by hooks.

    `layers` counts as transformers' ``output_hidden_states``: 0 is the embedding, i the output of the first i decoder
    layers, num_hidden_layers the output of the final norm. Hooks exist during one forward only, so a captured forward
    contains only the tensors.

    Attributes:
        layers: the indices, as given.

    Raises:
        ModelError: an index is out of range, or the decoder's layers or final norm cannot be found.
    """

    def __init__(self, hf: Any, layers: Sequence[int], name: str) -> None:
        decoder = hf.get_decoder()
        blocks = getattr(decoder, "layers", None)
        norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
        if blocks is None or norm is None:
            raise ModelError(
                f"model {name!r} has no decoder .layers or no final norm, so its hidden states cannot be read; "
                "use another model, or draft without a head"
            )
        wrong = [layer for layer in layers if not 0 <= layer <= len(blocks)]
        if wrong:
            raise ModelError(
                f"model {name!r} has no hidden state {wrong[0]}, only 0 … {len(blocks)}; "
                "use the head that was trained for this model"
            )
        self.layers = tuple(layers)
        self._blocks = [(index, blocks[layer]) for index, layer in enumerate(layers) if layer < len(blocks)]
        self._norms = [(index, norm) for index, layer in enumerate(layers) if layer == len(blocks)]
        self._found: list[torch.Tensor | None] = [None] * len(layers)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the tapped hidden states of a forward that runs inside the context."""
        handles = [block.register_forward_pre_hook(self._before(i), with_kwargs=True) for i, block in self._blocks]
        handles += [norm.register_forward_hook(self._after(i)) for i, norm in self._norms]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> torch.Tensor:
        """Return the last forward's states ``[rows, len(layers) · hidden_size]`` in the model's dtype."""
        taken = [tensor for tensor in self._found if tensor is not None]
        assert len(taken) == len(self._found), "a forward passes every hidden state"
        self._found = [None] * len(taken)
        return torch.cat([tensor[0] for tensor in taken], -1)

    def _before(self, index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _after(self, index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._found[index] = output

        return hook
