"""Creates SGLang's linear-attention backends and layers on a CPU."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

from draftmark_contract.judge.states.layer import Family, Layer, Weights

from ..probes.bare import member
from .interpreter import bind_late, fit_interpreter
from .pool import StatePools
from .stand_ins import Options, StandIn

CHUNK = 64
"""Chunk of Mamba2's scan, in rows."""
READERS = ("get_spec", "get_memory", "get_exec", "get_server_args", "get_parallel")
"""Functions that return options of the running server."""
CLASSES = {
    Family.GDN: ("srt.layers.attention.linear.gdn_backend", "GDNAttnBackend"),
    Family.KDA: ("srt.layers.attention.linear.kda_backend", "KDAAttnBackend"),
    Family.MAMBA2: ("srt.layers.attention.hybrid_linear_attn_backend", "Mamba2AttnBackend"),
}


def make_backend(layer: Layer, pools: StatePools, tree: bool) -> Any:
    """Create the backend by its own constructor. Its kernels are Triton's, and no other option is on."""
    fit_interpreter()
    module, name = CLASSES[layer.family]
    kind = member(module, name)
    options = Options(
        speculative_eagle_topk=2 if tree else 1,
        mamba_backend="triton",
        mamba_cache_philox_rounds=0,
        enable_mamba_cache_stochastic_rounding=False,
    )
    _give_options(options, layer)
    bind_late("sglang.kernels")
    triton = member("srt.layers.attention.linear.utils", "LinearAttnKernelBackend").TRITON
    runner = StandIn(
        device="cpu",
        server_args=options,
        is_draft_worker=False,
        req_to_token_pool=pools,
        token_to_kv_pool=None,
        model_config=StandIn(hf_text_config=StandIn(mamba_chunk_size=CHUNK)),
        linear_attn_backends=StandIn(decode=triton, prefill=triton, verify=triton),
    )
    return kind(runner)


def make_layer(layer: Layer, weights: Weights) -> Any:
    """Create the layer with its weights."""
    if layer.family is Family.MAMBA2:
        return _mixer(layer, weights)
    made = member("srt.layers.radix_linear_attention", "RadixLinearAttention")(
        layer_id=0,
        num_q_heads=layer.shape.num_key_heads,
        num_k_heads=layer.shape.num_key_heads,
        num_v_heads=layer.shape.num_heads,
        head_q_dim=layer.shape.key_dim,
        head_k_dim=layer.shape.key_dim,
        head_v_dim=layer.shape.value_dim,
        conv_weights=weights.conv,
        bias=weights.bias,
        activation="silu",
        A_log=weights.a_log,
        dt_bias=weights.dt_bias.flatten(),
    )
    return made


def _mixer(layer: Layer, weights: Weights) -> Any:
    """Return a Mamba2 mixer with projections and a norm that change nothing."""
    kind = member("srt.layers.attention.mamba.mamba", "MambaMixer2")
    inner, groups = layer.shape.num_heads * layer.shape.value_dim, layer.shape.num_key_heads * layer.shape.key_dim
    mixer = StandIn(
        in_proj=lambda hidden: (hidden, None),
        out_proj=lambda hidden: (hidden, None),
        norm=lambda hidden, gate: hidden,
        tp_size=1,
        intermediate_size=inner,
        conv_dim=inner + 2 * groups,
        num_heads=layer.shape.num_heads,
        n_groups=layer.shape.num_key_heads,
        groups_ssm_state_size=groups,
        head_dim=layer.shape.value_dim,
        ssm_state_size=layer.shape.key_dim,
        conv1d=StandIn(weight=weights.conv[:, None], bias=weights.bias),
        activation="silu",
        A=-weights.a_log.exp(),
        D=weights.skip,
        dt_bias=weights.dt_bias,
    )
    mixer.forward = partial(kind.forward, mixer)
    return mixer


def _give_options(options: Options, layer: Layer) -> None:
    """Replace what modules read of a running server, and give them Triton functions that they import on CUDA only."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.layers.attention") or name == "sglang.srt.utils.common":
            for reader in READERS:
                if reader in vars(module):
                    setattr(module, reader, lambda: options)
    common: Any = importlib.import_module("sglang.srt.utils.common")
    common.get_eager_max_batch_size = lambda *arguments: arguments[-1]  # It reads the ranks of a running server.
    if layer.family is not Family.MAMBA2:
        return
    triton: Any = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    mixer: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    mixer.causal_conv1d_fn_triton = triton.causal_conv1d_fn
    mixer.causal_conv1d_update_triton = triton.causal_conv1d_update
    dispatch = importlib.import_module("sglang.kernels.ops.mamba.triton_ops.ssu_dispatch")
    dispatch.initialize_mamba_selective_state_update_backend(options)
    hybrid: Any = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
    hybrid.mamba2_config = lambda config: StandIn(mamba_chunk_size=CHUNK)
