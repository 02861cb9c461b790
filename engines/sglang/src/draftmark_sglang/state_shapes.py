"""Recurrent state of a model that SGLang serves: the family of its layers, their shape, and the backend that runs them.

SGLang's `MambaPool` has the layout of draftmark's `StatePool`: states ``[layers, slots, heads, value_dim, key_dim]``,
windows ``[layers, slots, channels, window]``. Windows of KDA layers are ``[…, window, channels]`` and are transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from draftmark import Gate, LoadedBackend, Recurrence, StateShape
from draftmark_engines import choose

from .facts import uses_draftmark
from .options import Options
from .versions import SUPPORTED

RELEASES = ("0.5.17", "0.5.23")
"""Releases in which draftmark's backends ran recurrent layers. In the others SGLang's own run them."""
SGLANG = "sglang"
"""Value of DRAFTMARK_STATE_BACKEND that leaves recurrent layers to SGLang."""


class Family(StrEnum):
    """Kind of recurrent layer. Each kind has its own way to compute gates from projections."""

    GDN = "gdn"
    KDA = "kda"
    MAMBA2 = "mamba2"


RUN_ON_A_GPU = (Family.GDN,)
"""Families that ran on a GPU, with layers and texts compared with float64 (docs/what-was-run.md)."""
ARCHITECTURES = {
    "Qwen3NextForCausalLM": Family.GDN,
    "Qwen3_5ForConditionalGeneration": Family.GDN,
    "Qwen3_5MoeForConditionalGeneration": Family.GDN,
    "KimiLinearForCausalLM": Family.KDA,
    "NemotronHForCausalLM": Family.MAMBA2,
    "FalconH1ForCausalLM": Family.MAMBA2,
    "GraniteMoeHybridForCausalLM": Family.MAMBA2,
}
"""Models with layers that draftmark runs. SGLang's own backends run the recurrent layers of other models."""


@dataclass(frozen=True)
class ServedStates:
    """Recurrent layers of one model on this rank, and the backend that runs them.

    Attributes:
        family: kind of the layers.
        shape: shape of each layer.
        loaded: backend that runs the layers.
    """

    family: Family
    shape: StateShape
    loaded: LoadedBackend


def served_states(model_config: Any, arguments: Any) -> ServedStates | None:
    """Return the recurrent layers that draftmark runs; None if there are none or SGLang runs them.

    Args:
        model_config: SGLang's `ModelConfig` of a target.
        arguments: server arguments with SGLang's own defaults filled in.
    """
    family = ARCHITECTURES.get((model_config.hf_config.architectures or [""])[0])
    if family is None or not uses_draftmark(arguments) or SUPPORTED.installed()[1] not in RELEASES:
        return None
    shape = _shape(family, model_config)
    loaded = None if shape is None else _backend(Options.read(), arguments.device, family, shape.recurrence)
    return None if shape is None or loaded is None else ServedStates(family, shape, loaded)


def _backend(options: Options, device: str, family: Family, recurrence: Recurrence) -> LoadedBackend | None:
    """Return the backend for recurrent layers; None for SGLang's own.

    Without DRAFTMARK_STATE_BACKEND it is the backend that serves attention, if that serves the recurrence. On a GPU it
    is SGLang's own for families that draftmark never ran there.

    Raises:
        EngineError: the named backend is unknown, not installed, or runs on another device.
    """
    untested = device == "cuda" and family not in RUN_ON_A_GPU
    if options.state_backend == SGLANG or (not options.state_backend and untested):
        return None
    loaded = choose(options.state_backend or options.backend, device)
    return loaded if options.state_backend or recurrence in loaded.info.recurrences else None


def _shape(family: Family, model_config: Any) -> StateShape | None:
    """Return the shape of a model's recurrent layers; None if the model has none, as a Granite without Mamba2."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model_config)
    if config is None:
        return None
    params = config.mamba2_cache_params
    heads, value_dim, key_dim = params.shape.temporal
    channels, window = params.shape.conv[0] if family is not Family.KDA else params.shape.conv[0][::-1]
    dtype, state_dtype, conv_dtype = (
        str(one).removeprefix("torch.") for one in (model_config.dtype, params.dtype.temporal, params.dtype.conv)
    )
    return StateShape(
        Recurrence.DECAY if family is Family.MAMBA2 else Recurrence.DELTA,
        Gate.KEY if family is Family.KDA else Gate.HEAD,
        heads,
        params.shape.num_k_heads_per_tp,
        key_dim,
        value_dim,
        channels,
        window + 1,
        dtype,
        state_dtype,
        conv_dtype,
        round_prompts=True,  # SGLang's own prompt kernels round too
    )
