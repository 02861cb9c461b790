"""Shapes of tiny models with recurrent state; `tiny.tiny_model` makes them."""

from __future__ import annotations

from typing import Any

from torch import nn

_MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    **_MIXED,
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 24}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED_EXPERT},
    "qwen3_next": {**_DELTA, **_SHARED_EXPERT, "mlp_only_layers": [0]},
    "olmo_hybrid": {
        **{**_MIXED, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 16},
    },
    "kimi_linear": {
        **{**_MIXED, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
        **{"v_head_dim": 16, "linear_head_dim": 8, "linear_num_heads": 4},
        **{"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 1},
    },
    "granitemoehybrid": {
        **{**_MIXED, **_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96, "attention_multiplier": 0.25}
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "head_dim": 12},
        **{"ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2},
    },
    "falcon_h1": {
        **{**_MAMBA, "num_hidden_layers": 2, "head_dim": 12, "mamba_d_ssm": 96, "mamba_rms_norm": True},
        **{"mamba_norm_before_gate": False, "ssm_in_multiplier": 1.2, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3]},
    },
    "minimax": {**_MIXED, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {**_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        **{"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"], "head_dim": 16},
        **{"sliding_window": 9},
    },
}
"""Model types of transformers, and the fields in which each differs from the shared shape of `tiny`."""


def slow_decays(model: nn.Module) -> None:
    """Draw the decays of all layers with state anew, so that a state outlives tens of tokens.

    transformers draws decays of real models' widths, and a tiny state would forget at once. A wrong state would not
    change the text. The draw comes from torch's random state.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-4.0, 0.0)
