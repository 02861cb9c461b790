"""Patches of SGLang that shrink its memory and skip prompts, without an effect on decode speed.

Several servers share one GPU, so all layers of a model share the weights and the KV of one layer. The layer weights of
Llama-8B take 436 MB, seven times the L2 of an H200. So each layer still reads its weights from memory and evicts the
previous layer's KV from the L2.
"""

from __future__ import annotations

from typing import Any

UNLIMITED = 1 << 44
"""Bytes; larger than any pool, because `max_total_tokens` of the server is the limit."""


class Prompts:
    """Switch that decides if the layers compute prompts. If skipped, prompts keep the random KV that `fill` wrote."""

    computed = True


def share_layers() -> None:
    """Patch `LlamaDecoderLayer` so that every new layer uses the parameters of the first one."""
    from sglang.srt.models import llama

    original = llama.LlamaDecoderLayer.__init__
    first: dict[str, Any] = {}

    def make(layer: Any, *arguments: Any, **named: Any) -> None:
        original(layer, *arguments, **named)
        for name, parameter in layer.named_parameters():
            parameter.data = first.setdefault(name, parameter.data)

    llama.LlamaDecoderLayer.__init__ = make


def share_kv() -> None:
    """Patch the KV pool so that its layers share one buffer."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    original = MHATokenToKVPool._create_buffers_normal

    def create(pool: Any) -> None:
        layers, pool.layer_num = pool.layer_num, 1
        original(pool)
        pool.layer_num, pool.k_buffer, pool.v_buffer = layers, pool.k_buffer * layers, pool.v_buffer * layers

    MHATokenToKVPool._create_buffers_normal = create


def pools_of_requested_size() -> None:
    """Patch SGLang to allocate pools of the requested size; its own limit depends on other servers' memory."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    KVCacheConfigurator._profile_available_bytes = lambda configurator, before: UNLIMITED


def skip_prompts() -> None:
    """Patch the Llama model so that `Prompts.computed` decides whether prompts run through the target's layers."""
    from sglang.srt.models import llama

    original = llama.LlamaModel.forward

    def forward(
        model: Any, input_ids: Any, positions: Any, batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        mode = batch.forward_mode
        if Prompts.computed or mode.is_target_verify() or mode.name not in ("EXTEND", "MIXED"):
            return original(model, input_ids, positions, batch, input_embeds, pp_proxy_tensors)
        return model.norm(model.embed_tokens(input_ids))

    llama.LlamaModel.forward = forward


def fill(scheduler: Any) -> None:
    """Write random keys and values to every slot of every pool, because zeros would reduce the GPU's power."""
    runners = [scheduler.tp_worker.model_runner]
    drafter = getattr(scheduler.draft_worker, "draft_worker", None)
    if drafter is not None:
        runners.append(drafter.draft_runner)
    for pool in (runner.token_to_kv_pool for runner in runners):
        for buffer in {buffer.data_ptr(): buffer for buffer in (*pool.k_buffer, *pool.v_buffer)}.values():
            buffer.normal_()
