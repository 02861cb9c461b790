"""Check that draftmark's attention reproduces an MTP layer's own attention, as `models.probe` checks a model's."""

from __future__ import annotations

from typing import Any

import torch

from ..models.attention import RUN, attention_of
from ..models.latent import absorb
from ..models.probe import REQUESTS, TOKENS, ProbeAttention, Probed, compare, differs, probed_by, rows_of
from ..models.refusals import is_latent, verify
from ..models.routing import Routing


def probe_mtp(module: Any, hf: Any, name: str) -> Probed:
    """Return the arguments with which each layer of an MtpModel calls attention.

    Args:
        module: transformers' MtpModel.
        hf: its target.

    Raises:
        ModelError: the layer bypasses the attention registry, or its output would differ from transformers' own.
    """
    probed = probed_by(lambda: _probe(module, hf), hf, name, range(len(module.layers)))
    return Probed(verify(module.config, probed.layers, name), probed.sinks)


def _probe(module: Any, hf: Any) -> ProbeAttention:
    if is_latent(module.config):
        absorb(module)
    tokens, positions = rows_of(hf)
    embeddings = hf.get_input_embeddings()(tokens)
    states = embeddings.flip(0)  # hidden states of another row, so that swapped inputs change the output
    routing, attention = Routing(module, hf), ProbeAttention()
    with routing.recorded():
        own = _batched(module, embeddings, states, positions)
    ours = _packed(module, embeddings, states, positions, attention)
    if routing and differs(hf.dtype, ours, own):
        with routing.repeated():
            ours = _packed(module, embeddings, states, positions, ProbeAttention())
    compare(hf.dtype, ours, own, "its MTP layer differs from transformers' own by {}, so a part of it is not supported")
    return attention


def _batched(module: Any, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run the layers, one after another, with their own attention over a batch of requests."""
    embeddings, states = (one.view(REQUESTS, TOKENS, -1) for one in (embeddings, states))
    places = positions.view(REQUESTS, TOKENS)
    for layer in range(len(module.layers)):
        states = module.forward_layer(layer, states, places, None, inputs_embeds=embeddings)
    return states.float().flatten(0, 1)


def _packed(
    module: Any, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: ProbeAttention
) -> torch.Tensor:
    states = states[None]
    with attention_of(module.config):
        for layer in range(len(module.layers)):
            states = module.forward_layer(
                layer, states, positions[None], None, inputs_embeds=embeddings[None], **{RUN: attention}
            )
    return states[0].float()
