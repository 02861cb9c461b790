"""Stand-ins for what a measurement of decoding does not depend on: the layers' weights and the prompt's.

Several servers wait in one GPU for their turn, so a model's layers share one layer's weights, and its KV: the weights
are 436 MB for Llama-8B, seven times the L2 of an H200, so each layer's are read from memory as they would be, and push
out of the L2 what the layer before has read of the KV.
"""

from __future__ import annotations

from typing import Any

UNLIMITED = 1 << 44
"""Bytes; a server's own `max_total_tokens` is the limit."""


class Prompts:
    """Whether prompts run through the layers, or are passed by with their KV left at what `fill` put there."""

    earnest = True


def share_layers() -> None:
    """From now on every `LlamaDecoderLayer` takes the parameters of the first one that was made."""
    from sglang.srt.models import llama

    original = llama.LlamaDecoderLayer.__init__
    first: dict[str, Any] = {}

    def make(layer: Any, *arguments: Any, **named: Any) -> None:
        original(layer, *arguments, **named)
        for name, parameter in layer.named_parameters():
            parameter.data = first.setdefault(name, parameter.data)

    llama.LlamaDecoderLayer.__init__ = make


def share_kv() -> None:
    """From now on the layers of a pool have one buffer."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    original = MHATokenToKVPool._create_buffers_normal

    def create(pool: Any) -> None:
        layers, pool.layer_num = pool.layer_num, 1
        original(pool)
        pool.layer_num, pool.k_buffer, pool.v_buffer = layers, pool.k_buffer * layers, pool.v_buffer * layers

    MHATokenToKVPool._create_buffers_normal = create


def pools_as_asked() -> None:
    """From now on a pool is as large as is asked for: what SGLang would let it have is what other servers leave."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    KVCacheConfigurator._profile_available_bytes = lambda configurator, before: UNLIMITED


def pass_prompts_by() -> None:
    """Let `Prompts.earnest` decide whether a prompt runs through the target's layers."""
    from sglang.srt.models import llama

    original = llama.LlamaModel.forward

    def forward(
        model: Any, input_ids: Any, positions: Any, batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        mode = batch.forward_mode
        if Prompts.earnest or mode.is_target_verify() or mode.name not in ("EXTEND", "MIXED"):
            return original(model, input_ids, positions, batch, input_embeds, pp_proxy_tensors)
        return model.norm(model.embed_tokens(input_ids))

    llama.LlamaModel.forward = forward


def fill(scheduler: Any) -> None:
    """Random keys and values in every slot of every pool: zeros cost a GPU less power."""
    runners = [scheduler.tp_worker.model_runner]
    drafter = getattr(scheduler.draft_worker, "draft_worker", None)
    if drafter is not None:
        runners.append(drafter.draft_runner)
    for pool in (runner.token_to_kv_pool for runner in runners):
        for buffer in {buffer.data_ptr(): buffer for buffer in (*pool.k_buffer, *pool.v_buffer)}.values():
            buffer.normal_()
