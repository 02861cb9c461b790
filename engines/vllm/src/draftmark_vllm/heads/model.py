"""Model class by which vLLM runs a converted head. It joins token and feature differently from vLLM's EAGLE-3 Llama.

Token and feature are normalized, joined by one linear layer, and added to the feature. A usual Llama layer follows. The
head may read the last feature after the target's final norm, but vLLM provides it before that norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

STACKED: dict[str, tuple[str, str | int]] = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}
"""Weights that vLLM stacks in one parameter: the name of the parameter, and the weight's part of it."""


class _Head(nn.Module):
    """Holds the head's layers under the parameter names that vLLM uses."""

    def __init__(self, vllm_config: Any, config: Any, first_layer: int, prefix: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.eagle_aux_hidden_state_layer_ids)
        # vLLM reads these attributes from every EAGLE-3 model.
        self.use_aux_hidden_state, self.norm_before_fc, self.fc_norm = True, False, None
        self.num_aux_hidden_states, self.fc_input_size = features, features * size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, prefix=maybe_prefix(prefix, "embed_tokens"))
        self.fc = ReplicatedLinear(features * size, size, bias=False, return_bias=False)
        self.input_fc = ReplicatedLinear(2 * size, size, bias=False, return_bias=False)
        self.embed_norm, self.feature_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.target_norm = RMSNorm(size, eps=eps)
        # The draft layer's number follows the target's layer numbers, so that vLLM allocates separate KV for it.
        name = maybe_prefix(prefix, f"layers.{first_layer}")
        self.layers = nn.ModuleList([LlamaDecoderLayer(vllm_config, prefix=name, config=config)])
        self.norm = RMSNorm(size, eps=eps)
        self._normed_feature = config.draftmark_normed_feature

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse the target's features, concatenated, ``[rows, n · hidden_size]``, to ``[rows, hidden_size]``."""
        if self._normed_feature:
            *others, last = features.chunk(self.num_aux_hidden_states, -1)
            features = torch.cat([*others, self.target_norm(last.contiguous())], -1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (hidden states for the logits, hidden states that the next draft step takes as `fused`)."""
        joined = torch.cat((self.embed_norm(self.embed_tokens(input_ids)), self.feature_norm(fused)), -1)
        hidden, residual = self.layers[0](positions, fused + self.input_fc(joined), None)
        scored, taken = self.norm(hidden, residual)
        return scored, taken


class DraftmarkHeadForCausalLM(Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """Runs a draft head under vLLM's EAGLE-3 interface. Logits and vocabulary mapping are inherited from vLLM."""

    packed_modules_mapping = Eagle3LlamaForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = config = vllm_config.speculative_config.draft_model_config.hf_config
        first_layer = vllm_config.model_config.get_total_num_hidden_layers()
        config.target_layer_count = first_layer
        self.model = _Head(vllm_config, config, first_layer, maybe_prefix(prefix, "model"))
        size = config.draft_vocab_size
        self.lm_head = ParallelLMHead(size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(size)
        self.draft_id_to_target_id = None
        if size != vllm_config.model_config.get_vocab_size():
            self.draft_id_to_target_id = nn.Parameter(torch.zeros(size, dtype=torch.long), requires_grad=False)
        self.use_parallel_drafting = False

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Embed tokens with the target's embedding, ``[rows]`` to ``[rows, hidden_size]``."""
        found: torch.Tensor = self.model.embed_tokens(input_ids)
        return found

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuse the target's features. vLLM calls this once a step."""
        return self.model.fuse(hidden_states)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one draft step. `hidden_states` are fused features, or the second result of the previous draft step."""
        scored, taken = self.model(input_ids, positions, hidden_states)
        return scored, taken

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights that `convert` wrote. They contain no embedding: the head uses the target's embedding."""
        self.has_own_embed_tokens, self.has_own_lm_head = False, True
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            to, part = _place(name)
            parameter = parameters[to]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor, *([] if part is None else [part]))
        return set(parameters)


def _place(name: str) -> tuple[str, str | int | None]:
    """Return (parameter, shard) for a weight's name. shard is its part of a stacked parameter (qkv, gate and up)."""
    if name == "d2t":
        return "draft_id_to_target_id", None
    if not name.startswith("lm_head."):
        name = f"model.{name}"
    for own, (stacked, part) in STACKED.items():
        if own in name:
            return name.replace(own, stacked), part
    return name, None
