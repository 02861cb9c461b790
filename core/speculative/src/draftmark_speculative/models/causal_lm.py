"""CausalLM: a transformers model that runs on draftmark's attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from draftmark import StateShape

from .attention import RUN, AttentionStep, LayerAttention, Run, attention_of, checked
from .features import FeatureTaps
from .fused import FusedDecoder
from .states import HybridLayers, StateStep


class CausalLM:
    """Decoder-only model, verified to run correctly on paged attention. Made by `load_model` or `wrap_model`.

    Attributes:
        layers: attention parameters of each layer with attention, equal as configured and as called.
        sinks: attention sinks of each of `layers`; see `Layered.sinks`. In float32 the model's own tensors, else
            copies.
        states: shape of each layer with recurrent state, in order; empty for a model without such layers.
        vocab_size: width of the logits.
        max_context_len: number of positions that the model was made for (``max_position_embeddings``).
        dtype, device: of the weights; q, k and v have this dtype.
        stop_token_ids: end-of-sequence ids, as transformers' own `generate` uses them; may be empty.
        hf: the transformers model. Its own attention is active except during a draftmark forward, so ``hf.generate``
            works on the same weights.
        tokenizer: a transformers tokenizer, or None if the model came without one.
        name: for messages.

    Args:
        fused: a faster forward over the same weights, or None.
        hybrid: layers with state; None for a model without.
        decoder_layers: decoder layer of each of `layers`; None if every decoder layer has attention.
    """

    def __init__(
        self,
        hf: Any,
        layers: tuple[LayerAttention, ...],
        sinks: tuple[torch.Tensor | None, ...],
        tokenizer: Any,
        name: str,
        fused: FusedDecoder | None = None,
        hybrid: HybridLayers | None = None,
        decoder_layers: Sequence[int] | None = None,
    ) -> None:
        self.hf = hf
        self._fused, self._hybrid, self._decoder_layers = fused, hybrid, decoder_layers
        self.states: tuple[StateShape, ...] = () if hybrid is None else hybrid.shapes
        self.layers = layers
        self.sinks = sinks
        self.tokenizer = tokenizer
        self.name = name
        self._text_config = hf.config.get_text_config()
        self.vocab_size = int(self._text_config.vocab_size)
        self.max_context_len = int(self._text_config.max_position_embeddings)
        self.dtype: torch.dtype = hf.dtype
        self.device: torch.device = hf.device
        self.stop_token_ids = _stop_token_ids(hf)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep | StateStep,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one forward over packed rows of any number of requests. Reads nothing on the host; capturable.

        Args:
            token_ids: int64 ``[rows]``.
            positions: int64 ``[rows]``, below max_context_len.
            step: this forward's attention; called once per layer, in order. A model with `states` needs a `StateStep`.
            logits_rows: int64 ``[n]``, rows that need logits, in this order; None means all.

        Returns:
            Logits, float32 ``[rows or n, vocab_size]``.

        Raises:
            ModelError: a layer calls attention with other parameters than verified.
        """
        run = checked(step, self.layers, self._decoder_layers)
        if self._fused is not None:
            return self._fused(token_ids, positions, run, logits_rows)[0]
        with nullcontext() if self._hybrid is None else self._hybrid.running(cast(StateStep, step)):
            return packed_forward(self.hf, token_ids, positions, run, logits_rows)

    def tap(self, feature_layers: Sequence[int]) -> FeatureTaps:
        """Create taps for `forward_features`. Call it once and reuse the result.

        Raises:
            ModelError: the model has no such hidden state.
        """
        return FeatureTaps(self.hf, feature_layers, self.name)

    def forward_features(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep | StateStep,
        taps: FeatureTaps | None,
        logits_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `forward` and also return the tapped hidden states of every row.

        Returns:
            Logits, and hidden states ``[rows, len(feature_layers) · hidden_size]``, or None without taps.
        """
        if taps is None:
            return self.forward(token_ids, positions, step, logits_rows), None
        if self._fused is not None:
            logits, states = self._fused(token_ids, positions, checked(step, self.layers), logits_rows, taps.layers)
            return logits, torch.cat(states, -1)
        with taps.listening():
            logits = self.forward(token_ids, positions, step, logits_rows)
        return logits, taps.take()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the model's input embedding with its scaling: int64 ``[…]`` → ``[…, hidden_size]``."""
        embedded: torch.Tensor = self.hf.get_input_embeddings()(token_ids)
        return embedded

    @property
    def decodes_alike(self) -> bool:
        """True if transformers computes the same over its own cache as in one forward; False for Nemotron-H.

        Text of such a model is compared with transformers' ``generate(use_cache=False)``.
        """
        return self._hybrid is None or self._hybrid.decodes_alike

    @property
    def lm_head(self) -> torch.Tensor:
        """Weight of the output layer, ``[vocab_size, hidden_size]``; the model's own tensor, not a copy."""
        weight: torch.Tensor = self.hf.get_output_embeddings().weight
        return weight

    @property
    def hidden_size(self) -> int:
        """Width of hidden states and embeddings."""
        return int(self._text_config.hidden_size)


def packed_forward(
    hf: Any, token_ids: torch.Tensor, positions: torch.Tensor, run: Run, logits_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the model with `run` as its attention; for arguments and result see `CausalLM.forward`.

    ``use_cache`` and ``position_ids`` must be explicit. Otherwise transformers would make its own cache, and positions
    that ignore packed rows.
    """
    keep: Any = 0 if logits_rows is None else logits_rows
    with torch.no_grad(), attention_of(hf.config.get_text_config()):
        output = hf(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep,
            **{RUN: run},
        )
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _stop_token_ids(hf: Any) -> tuple[int, ...]:
    ids = getattr(getattr(hf, "generation_config", None), "eos_token_id", None)
    ids = hf.config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)
