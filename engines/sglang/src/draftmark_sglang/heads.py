"""python -m draftmark_sglang.heads HEAD TARGET OUT: write a draft head as a folder for SGLang.

HEAD is a folder with head.json and head.safetensors, TARGET the target's folder with its config.json. Then
``--speculative-algorithm EAGLE3 --speculative-draft-model-path OUT``. Neither SGLang nor torch is needed here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from draftmark_engines import EngineError
from draftmark_engines.heads import said_of, write_from_command_line

ARCHITECTURE = "DraftmarkHeadForCausalLMEagle3"
PACKAGE = "draftmark_sglang.models"
"""Where SGLang finds the class of that name."""


class LastFeature:
    """Whether this process drafts with a head of draftmark's, for the hook on the target: other heads are left alone.

    Attributes:
        asked: set by the model class.
    """

    asked = False


LAST_FEATURE = LastFeature()


def write_folder(head: Path, target: Path, out: Path) -> None:
    """Write `out`: config.json, and the head's weights as they are.

    Raises:
        EngineError: a file is absent, or the head and the target do not fit.
    """
    said, of_target = said_of(head, target)
    for name in ("hidden_size", "vocab_size"):
        if said[name] != of_target[name]:
            raise EngineError(
                f"the head is for a target of {name} {said[name]}, but {target} has {of_target[name]}; name the head's "
                "own target"
            )
    if len(said["feature_layers"]) < 2:
        raise EngineError(
            "the head reads one hidden state of the target, but EAGLE-3 in SGLang fuses several; train one"
        )
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(head / "head.safetensors", out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config_of(said, of_target), indent=2) + "\n")


def config_of(said: dict[str, Any], of_target: dict[str, Any]) -> dict[str, Any]:
    """The draft model's config.json.

    Hidden states are counted as transformers does: number n lies behind n layers. SGLang counts from the layer that
    makes it, so its number is one less.
    """
    shape = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    layers = [number - 1 for number in said["feature_layers"]]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: said[name] for name in shape},
        "num_hidden_layers": 1,
        "draft_vocab_size": said.get("draft_vocab_size") or said["vocab_size"],
        "rms_norm_eps": said["rms_norm_eps"],
        "rope_theta": said["rope_theta"],
        "max_position_embeddings": of_target["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": of_target.get("torch_dtype") or of_target.get("dtype") or "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }


def main() -> None:
    """Write what the command line names."""
    write_from_command_line(__doc__, write_folder)


if __name__ == "__main__":
    main()
