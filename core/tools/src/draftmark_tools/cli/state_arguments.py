"""Command-line arguments that describe the recurrent layers of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftmark.geometry import STATE_MODES, DeviceProfile, DraftShape, Limits, Mode, StateGeometry

from ..models import StateFacts, state_facts
from .errors import ArgumentError
from .geometry_arguments import check_draft_tokens, dtype
from .state_schemes import SCHEMES, Scheme

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "nemotron-h": {
        "model_type": "nemotron_h", "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "kimi-linear": {
        "model_type": "kimi_linear", "num_hidden_layers": 27,
        "linear_attn_config": {
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
            "kda_layers": [n for n in range(1, 28) if n % 4],
        },
    },
}  # fmt: skip
"""Configuration fields by name: Qwen3-Next-80B-A3B, SGLang's default Nemotron-H, transformers' default Kimi-Linear."""


def add_state_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the recurrent layers of a model."""
    group = parser.add_argument_group("recurrent layers (with --state)")
    add_state_model(group)
    names = ",".join(one.name for one in SCHEMES)
    group.add_argument("--scheme", type=schemes, default=names, metavar="NAME,…", help="rollback schemes to compare")
    group.add_argument("--ranks", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    group.add_argument("--accepted", type=int, default=3, metavar="N", help="accepted rows of a round, for bytes moved")


def add_state_model(group: argparse._ArgumentGroup) -> None:
    """Add --state and the dtypes of the model's recurrent layers."""
    known = ", ".join(MODELS)
    group.add_argument("--state", metavar="MODEL", help=f"a hybrid model: {known}, or the path of its config.json")
    group.add_argument("--state-dtype", type=dtype, metavar="DTYPE", help="dtype of states; default: the model's")
    group.add_argument("--conv-dtype", type=dtype, metavar="DTYPE", help="dtype of windows; default: the model's")


def refuse_without_state(args: argparse.Namespace) -> None:
    """Refuse an argument that only --state reads.

    Raises:
        ArgumentError: an argument of recurrent layers is given without --state.
    """
    usual = (("scheme", SCHEMES), ("ranks", 1), ("accepted", 3), ("state_dtype", None), ("conv_dtype", None))
    for name, default in usual:
        if getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ArgumentError(f"{flag} is given, but only --state reads it; add --state, or leave {flag} out")


def state_geometry_of(
    args: argparse.Namespace, device: DeviceProfile | None = None, modes: tuple[Mode, ...] = STATE_MODES
) -> tuple[StateFacts, StateGeometry]:
    """Return the recurrent layers of --state, and their geometry on one rank of `device`, in the modes of `modes`.

    Raises:
        GeometryError: the configuration has no recurrent layer, or a value is out of range.
        ArgumentError: the model is not known, or its file is no JSON object.
    """
    facts = state_facts(_config(args.state), args.ranks, state_dtype=args.state_dtype, conv_dtype=args.conv_dtype)
    limits = Limits(
        args.max_num_reqs, args.max_context_len, args.max_extend_tokens, args.capture_batch_sizes, args.overlap
    )
    draft = DraftShape(args.topk, args.num_steps, args.num_draft_tokens)
    check_draft_tokens(args.num_draft_tokens, args.max_context_len)
    return facts, StateGeometry.create(
        facts.shape, limits, draft, device, tuple(mode for mode in STATE_MODES if mode in modes), len(facts.layers)
    )


def check_accepted(args: argparse.Namespace) -> None:
    """Raise ArgumentError unless a round can accept --accepted rows."""
    if args.accepted < 0 or args.accepted > args.num_draft_tokens:
        limit = f"0 … {args.num_draft_tokens} (--num-draft-tokens)"
        raise ArgumentError(f"--accepted is {args.accepted}, but a round accepts {limit} rows; change one of them")


def schemes(text: str) -> tuple[Scheme, ...]:
    """Parse ``"snapshots,replay"`` into schemes, for argparse."""
    known = {scheme.name: scheme for scheme in SCHEMES}
    wrong = next((name for name in text.split(",") if name not in known), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong!r} is no scheme; write {', '.join(known)}, separated by commas")
    return tuple(known[name] for name in text.split(","))


def _config(model: str) -> dict[str, Any]:
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    if not path.is_file():
        raise ArgumentError(
            f"--state is {model!r}, but it must be {', '.join(MODELS)} or a config.json; check the path"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArgumentError(f"--state {model}: reading it raised {error}; pass a model's config.json") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"--state {model}: it has no JSON object; pass a model's config.json")
    return found
