"""MTP layers as a draft head: transformers' own module, with draftmark's attention.

A row at position p reads the target's final hidden state of p and the embedding of token p + 1::

    x = eh_proj(concat(enorm(embedding), hnorm(hidden state)))
    hidden state of p + 1 = shared_head.norm(decoder layer(x))

and predicts token p + 2 with the target's output layer (DeepSeek-V3, arXiv:2412.19437, section 2.2). While drafting,
the layer reads its own hidden states instead. A latent layer keeps latent rows of its own under the target's page ids.

In a model with several layers (modules), module i reads the hidden state of module i - 1 at the same position, and the
embedding of token p + i. It predicts token p + i + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..eagle.layer import Attend
from ..models import CausalLM, LayerAttention
from ..models.attention import RUN, attention_of, checked
from .probe import probe_mtp


class MtpHead:
    """Draft head over the MTP layers of a model; implements `eagle.drafter.Head` with the first. Capturable.

    Attributes:
        feature_layers: the target's final hidden state, after its last norm.
        layers, sinks: attention of each layer, as in `CausalLM`.
        module: transformers' MtpModel, which shares embedding, output layer and rotary positions with the target.

    Args:
        module: an MtpModel made for `model.hf`, on its device and in its dtype.
        model: the target.

    Raises:
        ModelError: the layer would run incorrectly on paged attention.
    """

    def __init__(self, module: Any, model: CausalLM) -> None:
        self.module = module.requires_grad_(False).eval()
        self.dtype, self.device, self.hidden_size = model.dtype, model.device, model.hidden_size
        self.feature_layers = (int(model.hf.config.get_text_config().num_hidden_layers),)
        probed = probe_mtp(module, model.hf, model.name)
        self.layers: tuple[LayerAttention, ...] = probed.layers
        self.sinks = probed.sinks

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged: the layer projects them itself."""
        return features

    def __call__(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Run a layer over packed rows.

        Args:
            embeddings: ``[rows, hidden_size]``, embedding of the token `module` + 1 positions after each row's.
            fused: ``[rows, hidden_size]``, the target's final hidden states, or this function's result.
            positions: int64 ``[rows]``, positions of the hidden states.
            attend: the attention; called once.
            module: index of the layer.

        Returns:
            ``[rows, hidden_size]``: the input of `logits`, and `fused` of the next draft step.
        """
        run = checked(_One(attend), self.layers)
        with torch.no_grad(), attention_of(self.module.config):
            hidden: torch.Tensor = self.module.forward_layer(
                module, fused[None], positions[None], None, inputs_embeds=embeddings[None], **{RUN: run}
            )
        return hidden[0]

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """Score the token after the one that a row embeds: ``[…, hidden_size]`` → ``[…, vocab_size]``."""
        return F.linear(hidden, lm_head)

    def output_rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        """Return the target's output weight: the layer scores the whole vocabulary."""
        return lm_head

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens unchanged."""
        return draft_tokens


class _One:
    """`AttentionStep` of a model with one layer."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        return self._attend(q, k, v)
