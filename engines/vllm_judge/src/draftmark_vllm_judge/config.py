"""Makes a `VllmConfig` for one layer's shape. Its model is only a config file, because no weights are loaded."""

from __future__ import annotations

import inspect
import json
import tempfile
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftmark import AttentionShape, Geometry

LAYER = "model.layers.0.self_attn.attn"
"""Name of the first layer, as in vLLM's Llama."""
SECOND = "model.layers.1.self_attn.attn"
FP8 = "float8_e4m3fn"
HEADS_OF_ROWS = {(512, 64): (128, 128), (256, 64): (64, 128)}
"""Widths of one head before absorption, (key without rope, value), by the parts of a latent row, (value part, rest).

The first model is DeepSeek V3, the second Mistral Small 4. vLLM's prefill kernels take only widths of known models.
"""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="draftmark-judge-")


def _model(heads: int, kv_heads: int, head_dim: int, length: int) -> str:
    """Write the config file of a Llama with these heads, and return its folder. The folder has no weights."""
    path = Path(_folder().name, f"{heads}-{kv_heads}-{head_dim}-{length}")
    if not path.exists():
        path.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": heads * head_dim,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": length,
        }
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def head_widths(shape: AttentionShape) -> tuple[int, int, int]:
    """Return the widths of one head before absorption: key without rope, rope, value."""
    rest = shape.head_dim - shape.value_width
    key, value = HEADS_OF_ROWS[shape.value_width, rest]
    return key, rest, value


def _latent_model(shape: AttentionShape, length: int) -> str:
    """Write the config file of a DeepSeek V3 with rows of these sizes, and return its folder. It has no weights."""
    heads, (key, rest, value) = shape.num_qo_heads, head_widths(shape)
    path = Path(_folder().name, f"mla-{heads}-{shape.head_dim}-{shape.value_width}-{length}")
    if not path.exists():
        path.mkdir()
        config = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": 256,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "kv_lora_rank": shape.value_width,
            "q_lora_rank": None,
            "qk_rope_head_dim": rest,
            "qk_nope_head_dim": key,
            "v_head_dim": value,
            "max_position_embeddings": length,
        }
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def max_model_len(geometry: Geometry) -> int:
    """Return the greatest number of tokens in a request: the longest context and its draft tokens."""
    return geometry.limits.max_context_len + geometry.draft.num_draft_tokens


def max_tokens(geometry: Geometry) -> int:
    """Return the most rows of any step, padding rows included."""
    limits = geometry.limits
    most = max(*limits.capture_batch_sizes, limits.max_num_reqs) * geometry.draft.num_draft_tokens
    return 64 * -(-(max(limits.max_extend_tokens, most) + 64) // 64)


def max_reqs(geometry: Geometry) -> int:
    """Return the most requests of any step, padding requests of captured sizes included."""
    return max(*geometry.limits.capture_batch_sizes, geometry.limits.max_num_reqs)


def vllm_config(geometry: Geometry, **cache: Any) -> Any:
    """Return the configuration of a server with these limits, and full graphs for uniform batches.

    Args:
        cache: more arguments of vLLM's `CacheConfig`.
    """
    from vllm.config import CacheConfig, CompilationConfig, ModelConfig, SchedulerConfig, VllmConfig

    a, length = geometry.attention, max_model_len(geometry)
    model = ModelConfig(
        model=_latent_model(a, length) if a.latent else _model(a.num_qo_heads, a.num_kv_heads, a.head_dim, length),
        skip_tokenizer_init=True,
        dtype=a.q_dtype,
        max_model_len=length,
        seed=0,
    )
    pages = CacheConfig(
        block_size=a.page_size,
        cache_dtype="fp8" if a.kv_dtype == FP8 else "auto",
        **_known(CacheConfig, swap_space=0, **cache),
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=max(max_tokens(geometry), length),
        max_num_seqs=max_reqs(geometry),
        max_model_len=length,
        **_known(SchedulerConfig, is_encoder_decoder=False),
    )
    config = VllmConfig(
        model_config=model, cache_config=pages, scheduler_config=scheduler, compilation_config=CompilationConfig()
    )
    # The constructor lets vLLM's platform change values: on a CPU it disables graphs and enlarges pages. Set them back.
    config.cache_config.block_size = a.page_size
    _capture_in_full(config, geometry)
    return config


def _capture_in_full(config: Any, geometry: Geometry) -> None:
    from vllm.config import CUDAGraphMode

    sizes = sorted({n * rows for n in geometry.limits.capture_batch_sizes for rows in _rows(geometry)})
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]


def _rows(geometry: Geometry) -> tuple[int, ...]:
    return (1, geometry.draft.num_draft_tokens)


def _known(of: Any, **values: Any) -> dict[str, Any]:
    """Return the given keyword arguments, without arguments that class `of` of this vLLM release does not accept."""
    return takes(of, values)


def takes(called: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` with names that `called`, a dataclass or function of this vLLM release, accepts."""
    # dataclasses.fields leaves out InitVar fields, which the constructor accepts too.
    names = called.__dataclass_fields__ if is_dataclass(called) else inspect.signature(called).parameters
    return {name: value for name, value in values.items() if name in names}


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype with this name."""
    found: torch.dtype = getattr(torch, name)
    return found
