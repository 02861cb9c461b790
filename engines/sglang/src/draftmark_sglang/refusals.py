"""What is not served, and why: found when SGLang starts, not when a request meets it."""

from __future__ import annotations

from typing import Any

from draftmark_engines import EngineError

from .facts import resolved
from .hooks import missing_hooks
from .layers import attention_layers
from .versions import SUPPORTED

ARGUMENTS = {
    "enable_two_batch_overlap": "two-batch overlap plans two batches at once, and buffers hold one",
    "enable_pdmux": "PD multiplexing runs two streams over the same buffers",
    "enable_multi_layer_eagle": "multi-layer EAGLE widens drafts by front tokens",
    "speculative_adaptive": "adaptive speculation changes the draft shape that buffers were sized for",
    "enable_prefill_cp": "context parallelism gives a rank a part of a prompt's rows, which are not one causal run",
    "enable_unified_memory": "the unified memory pool names KV by virtual ids",
    "dllm_algorithm": "diffusion models need attention that is not causal",
}
"""SGLang's arguments that may not be on."""
ALGORITHMS = ("", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
ENVIRONMENT = {
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "the plan stream prepares a verification before its tree is known",
    "SGLANG_USE_HND_KVCACHE": "KV pages are read token by token, not head by head",
}
BIDIRECTIONAL = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration")
"""Architectures that give images their own mask where SGLang's Triton backend serves, and ask for it by its class."""


def require_served(runner: Any) -> None:
    """Raise unless the adapter serves this SGLang and this runner.

    Raises:
        EngineError: all reasons, one a line.
    """
    SUPPORTED.require()
    reasons = [
        *hook_reasons(runner),
        *argument_reasons(resolved(runner)),
        *environment_reasons(),
        *model_reasons(runner),
    ]
    if reasons:
        raise EngineError(
            "--attention-backend draftmark does not serve this run:\n- "
            + "\n- ".join(reasons)
            + "\nUse another attention backend, or change what is named"
        )


def hook_reasons(runner: Any) -> list[str]:
    """Hooks that this run needs and that did not take hold: SGLang logs a failed hook and goes on."""
    return [
        f"the hook on {one.here()} did not take hold, without which {one.why}; SGLang's log says why, and "
        "SGLANG_PLUGINS, if set, must name draftmark"
        for one in missing_hooks(resolved(runner))
    ]


def argument_reasons(arguments: Any) -> list[str]:
    """What of the server's arguments is not served."""
    found = [f"--{name.replace('_', '-')}: {why}" for name, why in ARGUMENTS.items() if getattr(arguments, name, None)]
    if (getattr(arguments, "dcp_size", 1) or 1) > 1:
        found.append("--dcp-size: decode context parallelism needs the log-sum-exp of a part")
    if (getattr(arguments, "attn_cp_size", 1) or 1) > 1:
        found.append("--attn-cp-size: context parallelism gives a rank a part of a prompt's rows")
    if getattr(arguments, "enable_torch_compile", False) and getattr(arguments, "device", None) == "cpu":
        found.append(
            "--enable-torch-compile: on a CPU SGLang captures what it compiles for its intel_amx backend alone"
        )
    algorithm = getattr(arguments, "speculative_algorithm", None) or ""
    if algorithm == "NGRAM" and getattr(arguments, "enable_dp_attention", False):
        found.append("--enable-dp-attention: SGLang's n-gram trees have no batches for idle ranks; use EAGLE or EAGLE3")
    if algorithm not in ALGORITHMS:
        found.append(f"--speculative-algorithm {algorithm}: served are {', '.join(filter(None, ALGORITHMS))}")
    prefill = getattr(getattr(arguments, "cuda_graph_config", None), "prefill", None)
    if str(getattr(prefill, "backend", "")).rpartition(".")[2].lower() == "full":
        found.append("--cuda-graph-backend-prefill full: prefill is ragged here, and has no graph; use disabled")
    return found


def environment_reasons() -> list[str]:
    """What of SGLang's environment variables is not served."""
    from sglang.srt.environ import envs

    return [f"{name}: {why}" for name, why in ENVIRONMENT.items() if getattr(envs, name).get()]


def model_reasons(runner: Any) -> list[str]:
    """What of the model, and of the pools SGLang made for it, is not served."""
    found = []
    if runner.use_mla_backend:
        found.append("the model's attention is MLA: keys and values are one latent, which has no geometry here")
    architectures = runner.model_config.hf_config.architectures or []
    if any(one in BIDIRECTIONAL for one in architectures):
        found.append(f"{architectures[0]}: its image tokens see each other")
    found += pool_reasons(runner.token_to_kv_pool)
    layers = attention_layers(runner.model)
    if not layers:
        found.append(f"{type(runner.model).__name__} has no attention layer of SGLang's RadixAttention")
    for layer in layers:
        found += [reason for reason in layer_reasons(layer) if reason not in found]
    return found + chunk_reasons(runner.model_config, layers)


def chunk_reasons(model_config: Any, layers: list[Any]) -> list[str]:
    """Llama-4's layers with positions see their own chunk of the text alone: all of it, where the text is no longer."""
    chunk, context = getattr(model_config, "attention_chunk_size", None), model_config.context_len
    if not chunk or chunk >= context or not any(getattr(layer, "use_irope", False) for layer in layers):
        return []
    return [
        f"layers attend within chunks of {chunk} positions, and texts have up to {context}: use --context-length "
        f"{chunk}"
    ]


def pool_reasons(pool: Any) -> list[str]:
    """What of SGLang's KV pool is not served. Subclasses are not: each exists because something is stored otherwise."""
    name = type(pool).__name__
    if name == "SWAKVPool":
        parts = pool_reasons(pool.full_kv_pool) + pool_reasons(pool.swa_kv_pool)
        return list(dict.fromkeys(parts))
    if name == "HybridLinearKVPool":
        return pool_reasons(pool.full_kv_pool)
    if name != "MHATokenToKVPool":
        return [f"KV pool {name}: served is MHATokenToKVPool, pages of whole tokens and heads"]
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        return [f"KV layout {layout}: served is nhd"]
    if getattr(pool, "is_quantized_kv_cache", False) or str(pool.dtype) == "torch.float8_e5m2":
        return [f"KV of {pool.dtype} ({name}): served are the model's own type and fp8_e4m3"]
    return []


def layer_reasons(layer: Any) -> list[str]:
    """What of one attention layer is not served."""
    found = []
    if layer.is_cross_attention:
        found.append("cross attention: its keys are not the text's")
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        found.append(f"attention of type {kind}: rows see what comes behind them")
    if layer.v_head_dim != layer.head_dim or layer.qk_head_dim != layer.head_dim:
        found.append(f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} numbers a head: both must be equal")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        found.append("a temperature that depends on the position (xai_temperature_len)")
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        found.append(f"pos_encoding_mode {layer.pos_encoding_mode}: positions are encoded before attention here")
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        found.append(f"logit_capping_method {layer.logit_capping_method}: served is tanh")
    return found
