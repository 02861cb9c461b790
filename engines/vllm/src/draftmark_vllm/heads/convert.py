"""python -m draftmark_vllm.heads.convert HEAD TARGET OUT: write a draft head as a folder for vLLM.

HEAD is a folder with head.json and head.safetensors. TARGET is the target model's folder with its safetensors. Pass the
result to vLLM as ``"model": "OUT"`` in an EAGLE-3 ``--speculative-config``, as docs/vllm.md shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftmark_engines import EngineError
from draftmark_engines.heads import read_configs, write_from_command_line

from . import model_name

NAMES = {
    "feature_proj": "fc",
    "fc": "input_fc",
    "embed_norm": "embed_norm",
    "feature_norm": "feature_norm",
    "attention_norm": "layers.0.input_layernorm",
    "attention.q_proj": "layers.0.self_attn.q_proj",
    "attention.k_proj": "layers.0.self_attn.k_proj",
    "attention.v_proj": "layers.0.self_attn.v_proj",
    "attention.o_proj": "layers.0.self_attn.o_proj",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "mlp.gate_proj": "layers.0.mlp.gate_proj",
    "mlp.up_proj": "layers.0.mlp.up_proj",
    "mlp.down_proj": "layers.0.mlp.down_proj",
    "output_norm": "norm",
}
"""vLLM's name for each module of the head. These are names of a Llama's modules where it has the module."""


def convert(head: Path, target: Path, out: Path) -> None:
    """Write config.json and model.safetensors to `out`. The weights are the head's and some of the target's.

    The target's final norm, and its output rows for the head's vocabulary, are copied.

    Raises:
        EngineError: a file is absent, or the head does not fit the target.
    """
    from safetensors.torch import load_file, save_file  # only vLLM requires it; this package does not

    head_config, target_config = read_configs(head, target)
    weights = load_file(head / "head.safetensors")
    d2t = weights.pop("d2t", None)
    if (head_config["hidden_size"], head_config["vocab_size"]) != (
        target_config["hidden_size"],
        target_config["vocab_size"],
    ):
        raise EngineError(
            f"the head is for a target of hidden_size {head_config['hidden_size']} and vocab_size "
            f"{head_config['vocab_size']}, but {target} has {target_config['hidden_size']} and "
            f"{target_config['vocab_size']}; name the head's own target"
        )
    if len(head_config["feature_layers"]) < 2:
        raise EngineError("the head reads one hidden state, but vLLM's EAGLE-3 needs several; train such a head")
    tensors = {_renamed(name): tensor for name, tensor in weights.items()}
    output = _target_tensor(target, "lm_head.weight", "model.embed_tokens.weight")
    if d2t is not None:
        output, first = output[d2t], torch.arange(len(d2t))
        tensors["d2t"] = d2t - first  # in vLLM, target token = draft token + d2t
    tensors["lm_head.weight"] = output.contiguous()
    tensors["target_norm.weight"] = _target_tensor(target, "model.norm.weight")
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(_config(head_config, target_config, len(output)), indent=2) + "\n")


def _config(head_config: dict[str, Any], target_config: dict[str, Any], draft_vocab_size: int) -> dict[str, Any]:
    shape = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return {
        "architectures": [model_name.ARCHITECTURE],
        "model_type": "llama",
        **{name: head_config[name] for name in shape},
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": head_config["rms_norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": head_config["rope_theta"]},
        "rope_theta": head_config["rope_theta"],
        "max_position_embeddings": target_config["max_position_embeddings"],
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": head_config["feature_layers"],
        # feature_layers has indices of transformers' hidden states. The last state follows the target's final norm.
        "draftmark_normed_feature": head_config["feature_layers"][-1] == target_config["num_hidden_layers"],
    }


def _renamed(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{NAMES[module]}.{parameter}"


def _target_tensor(target: Path, *names: str) -> torch.Tensor:
    """Return the first of these tensors that the target's files contain.

    Raises:
        EngineError: the files contain none of the tensors.
    """
    from safetensors import safe_open

    for name in names:
        for file in sorted(target.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                if name in opened.keys():  # noqa: SIM118  # it is no mapping
                    found: torch.Tensor = opened.get_tensor(name)
                    return found
    raise EngineError(f"{target} holds no tensor {' or '.join(names)}; name a folder of a Llama's safetensors")


def main() -> None:
    """Convert the draft head in the folder that the command line names."""
    write_from_command_line(__doc__, convert)


if __name__ == "__main__":
    main()
