"""draftmark's draft head as an EAGLE-3 draft model for SGLang. `draftmark_sglang.heads` writes its model folder.

The head differs from SGLang's EAGLE-3 Llama in its input. It normalizes token embedding and feature, projects both
together, and adds the result to the feature. A usual Llama layer follows. Embedding and output rows are the target's.
The layer is defined here, because SGLang's own layer passes the residual differently from release to release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from torch import nn

from draftmark_engines import EngineError

from ..heads import LAST_FEATURE

NAMES = {
    "feature_proj": "fuse",
    "fc": "join",
    "embed_norm": "embed_norm",
    "feature_norm": "feature_norm",
    "attention_norm": "attention_norm",
    "attention.o_proj": "attention.o_proj",
    "mlp_norm": "mlp_norm",
    "mlp.down_proj": "mlp.down_proj",
    "output_norm": "norm",
}
"""Module names in a head's file, and the modules here that load them."""
STACKED: dict[str, tuple[str, str | int]] = {
    "attention.q_proj": ("attention.qkv_proj", "q"),
    "attention.k_proj": ("attention.qkv_proj", "k"),
    "attention.v_proj": ("attention.qkv_proj", "v"),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
"""Modules that SGLang stacks in one weight: the stacked module's name, and the part of it."""


class _Head(nn.Module):
    """Computes the draft head's hidden state: joins embedding and feature, then runs attention and MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size)
        self.fuse = nn.Linear(features * size, size, bias=False)
        self.join = nn.Linear(2 * size, size, bias=False)
        self.embed_norm, self.feature_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.attention_norm, self.mlp_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.attention = LlamaAttention(
            config=config,
            hidden_size=size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            rope_theta=_rope_theta(config),
            max_position_embeddings=config.max_position_embeddings,
        )
        self.mlp = LlamaMLP(size, config.intermediate_size, "silu")
        self.norm = RMSNorm(size, eps=eps)

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the normalized hidden state for the LM head, and the feature for the next draft step."""
        tokens = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        feature = forward_batch.spec_info.hidden_states
        # The target gives several concatenated hidden states, which are fused. A draft step gives a single feature.
        if feature.shape[-1] != tokens.shape[-1]:
            feature = self.fuse(feature)
        if not feature.shape[0]:  # DP attention runs idle batches without rows.
            return feature, [feature]
        hidden = feature + self.join(torch.cat((self.embed_norm(tokens), self.feature_norm(feature)), -1))
        hidden = hidden + self.attention(positions, self.attention_norm(hidden), forward_batch)
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return self.norm(hidden), [hidden]


def _rope_theta(config: Any) -> float:
    """Return the RoPE base, which transformers releases store in different places."""
    return float(getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"])


class DraftmarkHeadForCausalLMEagle3(LlamaForCausalLM):  # type: ignore[misc]  # sglang has no types here
    """Model class of draftmark's draft head, with the interface of SGLang's EAGLE-3 model.

    Raises:
        EngineError: tensor parallelism is on, so no rank has all of the target's output rows.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        from sglang.srt.distributed.parallel_state import get_pp_group

        self.config, self.quant_config, self.pp_group = config, quant_config, get_pp_group()
        self.model = _Head(config)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, config.hidden_size)
        if self.lm_head.weight.shape[0] < config.draft_vocab_size:
            raise EngineError(
                "a draftmark head needs all of the target's output rows, but a TP rank has only a part; use --tp 1"
            )
        scored = type(config)(**(config.to_dict() | dict(vocab_size=config.draft_vocab_size)))
        self.logits_processor = LogitsProcessor(scored)
        self.capture_aux_hidden_states, self.load_lm_head_from_target = True, True
        self.hot_token_id: torch.Tensor | None = None
        LAST_FEATURE.enabled = True

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Use the target's embedding, and the LM head rows of the tokens that this draft head can draft."""
        rows = head if self.hot_token_id is None else head[self.hot_token_id.to(head.device)]
        self.model.embed_tokens.weight, self.lm_head.weight = embed, nn.Parameter(rows, requires_grad=False)

    def get_hot_token_id(self) -> torch.Tensor | None:
        """Return the target's token id of each token that the head can draft; None for the whole vocabulary."""
        return self.hot_token_id

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights that the draft head's own file contains: all except embedding and LM head."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name == "d2t":
                self.hot_token_id = tensor
                continue
            module, _, kind = name.rpartition(".")
            place, part = STACKED.get(module) or (NAMES[module], None)
            parameter = parameters[f"{place}.{kind}"]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor, *([] if part is None else [part]))


EntryClass = DraftmarkHeadForCausalLMEagle3
