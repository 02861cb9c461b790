"""python -m draftmark_sglang.heads HEAD TARGET OUT: convert a draftmark draft head to a model folder for SGLang.

HEAD is a folder with head.json and head.safetensors. TARGET is the target model's folder with config.json. Start
SGLang with ``--speculative-algorithm EAGLE3 --speculative-draft-model-path OUT``. Neither SGLang nor torch is needed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from draftmark_engines import EngineError
from draftmark_engines.heads import read_configs, write_from_command_line

ARCHITECTURE = "DraftmarkHeadForCausalLMEagle3"
PACKAGE = "draftmark_sglang.models"
"""Python package in which SGLang finds the model class `ARCHITECTURE`."""


class LastFeature:
    """Process-wide switch of the hook that returns the target's last hidden state.

    Attributes:
        enabled: True after this process has created a draftmark draft head; other draft heads do not need the hook.
    """

    enabled = False


LAST_FEATURE = LastFeature()


def write_folder(head: Path, target: Path, out: Path) -> None:
    """Write `out`/config.json, and copy the head's weights to `out`/model.safetensors.

    Raises:
        EngineError: a file is absent, the head fits another target, or the head reads fewer than two hidden states.
    """
    head_config, target_config = read_configs(head, target)
    for name in ("hidden_size", "vocab_size"):
        if head_config[name] != target_config[name]:
            raise EngineError(
                f"the head needs a target with {name} {head_config[name]}, but {target} has {target_config[name]}; "
                "pass the folder of the head's own target"
            )
    if len(head_config["feature_layers"]) < 2:
        raise EngineError(
            "the head reads one hidden state of the target, but EAGLE-3 in SGLang needs at least two; train one that "
            "reads several"
        )
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(head / "head.safetensors", out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config_of(head_config, target_config), indent=2) + "\n")


def config_of(head_config: dict[str, Any], target_config: dict[str, Any]) -> dict[str, Any]:
    """Return the draft model's config.json.

    head.json numbers hidden states as transformers does: state n is the output of n layers. SGLang numbers a state by
    the layer that computes it, which is one less.
    """
    shape = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    layers = [number - 1 for number in head_config["feature_layers"]]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: head_config[name] for name in shape},
        "num_hidden_layers": 1,
        "draft_vocab_size": head_config.get("draft_vocab_size") or head_config["vocab_size"],
        "rms_norm_eps": head_config["rms_norm_eps"],
        "rope_theta": head_config["rope_theta"],
        "max_position_embeddings": target_config["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": target_config.get("torch_dtype") or target_config.get("dtype") or "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }


def main() -> None:
    """Convert the folders that the command line names."""
    write_from_command_line(__doc__, write_folder)


if __name__ == "__main__":
    main()
