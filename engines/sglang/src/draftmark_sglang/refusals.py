"""Rejection of settings, models, KV pools and call arguments that the adapter does not support, each with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmark_engines import EngineError

from .facts import resolved
from .hooks import missing_hooks
from .layers import attention_layers
from .versions import SUPPORTED

ARGUMENTS = {
    "enable_two_batch_overlap": "two-batch overlap plans two batches at once, and the buffers hold one",
    "enable_pdmux": "PD multiplexing runs two streams over the same buffers",
    "enable_multi_layer_eagle": "multi-layer EAGLE adds front tokens to the drafts",
    "speculative_adaptive": "adaptive speculation changes the draft shape, which determines the size of the buffers",
    "enable_prefill_cp": "context parallelism gives a rank rows that are not one contiguous run of the prompt",
    "enable_unified_memory": "the unified memory pool addresses KV by virtual ids",
    "dllm_algorithm": "diffusion models need attention that is not causal",
}
"""Server arguments of SGLang that must be off, each with its reason."""
STATE_ARGUMENTS = {
    "enable_linear_replayssm": "draftmark's backend of recurrent layers has its own records of the rows",
    "enable_linear_replayssm_spec": "draftmark's backend of recurrent layers has its own records of the rows",
    "enable_page_major_kv_layout": "the states of one layer must lie together",
}
"""Server arguments that must be off if draftmark runs recurrent layers, each with its reason."""
ALGORITHMS = ("", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
ENVIRONMENT = {
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "the plan stream prepares a verification before its tree exists",
    "SGLANG_USE_HND_KVCACHE": "KV pages must be in NHD layout",
}
POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
CALL_ARGUMENTS = {
    "q_rope": "MLA (a query in two parts) is not supported",
    "k_rope": "MLA (a key in two parts) is not supported",
    "idx_q": "sparse attention with an indexer is not supported",
    "score_mod": "score_mod is not supported",
    "rel_bias": "a relative bias is not supported",
}
"""Arguments of SGLang's attention calls that change the result, each with its reason."""
BIDIRECTIONAL = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration")
"""Architectures with a non-causal mask for image tokens, which they request by the class of SGLang's Triton backend."""


def require_served(runner: Any) -> None:
    """Raise an error unless the adapter supports this SGLang release and this runner.

    Raises:
        EngineError: the run is not supported. The error has one line for each reason.
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
            "--attention-backend draftmark does not support this run:\n- "
            + "\n- ".join(reasons)
            + "\nUse another attention backend, or change the settings listed above"
        )


def require_served_states(runner: Any) -> None:
    """Raise an error unless the adapter supports this runner's recurrent layers.

    Raises:
        EngineError: the run is not supported. The error has one line for each reason.
    """
    reasons = state_reasons(resolved(runner))
    if reasons:
        raise EngineError(
            "--attention-backend draftmark does not support the recurrent layers of this run:\n- "
            + "\n- ".join(reasons)
            + "\nChange these settings, or set DRAFTMARK_STATE_BACKEND=sglang to leave the layers to SGLang"
        )


def state_reasons(arguments: Any) -> list[str]:
    """Return the reasons why the server arguments are not supported together with recurrent layers."""
    named = STATE_ARGUMENTS.items()
    found = [f"--{name.replace('_', '-')}: {why}" for name, why in named if getattr(arguments, name, None)]
    if (mode := getattr(arguments, "disaggregation_mode", "null")) not in (None, "null"):
        found.append(f"--disaggregation-mode {mode}: the pools of prefill and decode servers hold states of drafts")
    return found


def hook_reasons(runner: Any) -> list[str]:
    """Return a reason for each hook that this run needs and that SGLang did not apply; SGLang only logs the failure."""
    return [
        f"the hook on {one.installed_target()} is not applied, so {one.why}; SGLang's log has the cause, and "
        "SGLANG_PLUGINS, if set, must contain draftmark"
        for one in missing_hooks(resolved(runner))
    ]


def argument_reasons(arguments: Any) -> list[str]:
    """Return the reasons why the server arguments are not supported."""
    found = [f"--{name.replace('_', '-')}: {why}" for name, why in ARGUMENTS.items() if getattr(arguments, name, None)]
    if (getattr(arguments, "dcp_size", 1) or 1) > 1:
        found.append("--dcp-size: decode context parallelism needs the log-sum-exp of partial attention")
    if (getattr(arguments, "attn_cp_size", 1) or 1) > 1:
        found.append("--attn-cp-size: context parallelism splits a prompt's rows among the ranks")
    if getattr(arguments, "enable_torch_compile", False) and getattr(arguments, "device", None) == "cpu":
        found.append("--enable-torch-compile: on a CPU SGLang captures compiled graphs only for its intel_amx backend")
    algorithm = getattr(arguments, "speculative_algorithm", None) or ""
    if algorithm == "NGRAM" and getattr(arguments, "enable_dp_attention", False):
        found.append("--enable-dp-attention: NGRAM creates no batches for idle ranks in SGLang; use EAGLE or EAGLE3")
    if algorithm not in ALGORITHMS:
        found.append(f"--speculative-algorithm {algorithm}: use one of {', '.join(filter(None, ALGORITHMS))}")
    prefill = getattr(getattr(arguments, "cuda_graph_config", None), "prefill", None)
    if str(getattr(prefill, "backend", "")).rpartition(".")[2].lower() == "full":
        found.append("--cuda-graph-backend-prefill full: prefill is ragged and has no CUDA graph; use disabled")
    return found


def environment_reasons() -> list[str]:
    """Return the reasons why SGLang's environment variables are not supported."""
    from sglang.srt.environ import envs

    return [f"{name}: {why}" for name, why in ENVIRONMENT.items() if getattr(envs, name).get()]


def model_reasons(runner: Any) -> list[str]:
    """Return the reasons why the model, or the KV pools that SGLang allocated for it, are not supported."""
    found = []
    architectures = runner.model_config.hf_config.architectures or []
    if any(one in BIDIRECTIONAL for one in architectures):
        found.append(f"{architectures[0]}: its image tokens need attention that is not causal")
    found += pool_reasons(runner.token_to_kv_pool)
    layers = attention_layers(runner.model)
    if not layers:
        found.append(f"{type(runner.model).__name__} has no RadixAttention layer, SGLang's class for attention")
    for layer in layers:
        found += [reason for reason in layer_reasons(layer, runner.use_mla_backend) if reason not in found]
    return found + chunk_reasons(runner.model_config, layers)


def chunk_reasons(model_config: Any, layers: list[Any]) -> list[str]:
    """Return a reason if layers attend only within chunks (Llama-4) and a request may be longer than one chunk."""
    chunk, context = getattr(model_config, "attention_chunk_size", None), model_config.context_len
    if not chunk or chunk >= context or not any(getattr(layer, "use_irope", False) for layer in layers):
        return []
    return [
        f"layers attend within chunks of {chunk} positions, and the context length is {context}; use --context-length "
        f"{chunk}"
    ]


def pool_reasons(pool: Any) -> list[str]:
    """Return the reasons why SGLang's KV pool is not supported.

    The class name must match exactly, because each subclass stores KV in another way.
    """
    name = type(pool).__name__
    if name == "SWAKVPool":
        parts = pool_reasons(pool.full_kv_pool) + pool_reasons(pool.swa_kv_pool)
        return list(dict.fromkeys(parts))
    if name == "HybridLinearKVPool":
        return pool_reasons(pool.full_kv_pool)
    if name not in POOLS:
        return [f"KV pool {name}: only {' and '.join(POOLS)} are supported, with pages of whole tokens and heads"]
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        return [f"KV layout {layout}: only nhd is supported"]
    if getattr(pool, "is_quantized_kv_cache", False) or str(pool.dtype) == "torch.float8_e5m2":
        return [f"KV of {pool.dtype} ({name}): only the model's own dtype and fp8_e4m3 are supported"]
    return []


def layer_reasons(layer: Any, latent: bool = False) -> list[str]:
    """Return the reasons why one attention layer is not supported.

    Args:
        latent: whether the model has latent attention (MLA).
    """
    found = []
    if layer.is_cross_attention:
        found.append("cross attention: keys must come from the request's own tokens")
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        found.append(f"attention of type {kind}: only causal decoder attention is supported")
    # A latent layer has one KV head, and a value is the first elements of its key.
    narrow = layer.v_head_dim != layer.head_dim and not latent
    if narrow or layer.qk_head_dim != layer.head_dim:
        found.append(
            f"head_dim is {layer.qk_head_dim} for keys and {layer.v_head_dim} for values, but must be the same"
        )
    if getattr(layer, "xai_temperature_len", -1) > 0:
        found.append("a temperature that depends on the position (xai_temperature_len) is not supported")
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        found.append(f"pos_encoding_mode {layer.pos_encoding_mode}: positions must be encoded before attention")
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        found.append(f"logit_capping_method {layer.logit_capping_method}: only tanh is supported")
    return found


def refuse(arguments: Mapping[str, Any], layer_id: int) -> None:
    """Raise an error if SGLang's attention call has an optional argument that draftmark does not support.

    Args:
        arguments: the call's arguments that `forward_decode` and `forward_extend` do not name.

    Raises:
        NotImplementedError: an argument is neither None nor False. The error states why it is not supported.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            reason = CALL_ARGUMENTS.get(name, f"argument {name} of an attention call is not supported")
            raise NotImplementedError(
                f"layer {layer_id}: {reason} by --attention-backend draftmark; use one of SGLang's own backends"
            )
