"""Creates vLLM's own layers with recurrent state (GDN, Mamba2), with their metadata builders and state memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import Refused
from draftmark_contract.judge.states.layer import Family, Layer, Weights

from .config import takes
from .layer import REFUSALS

PREFIX = {Family.GDN: "model.layers.0.linear_attn", Family.MAMBA2: "backbone.layers.0.mixer"}
"""Names of the layer, as in vLLM's Qwen3-Next and Nemotron-H."""
LENGTH = 1024
POISON = float("nan")


class StateLayer:
    """Holds one of vLLM's layers with recurrent state.

    Attributes:
        layer: the layer. builder: its metadata builder. conv, state: views of its memory by block.

    Raises:
        Refused: the constructors of vLLM's classes refuse the layer.
    """

    def __init__(self, layer: Layer, weights: Weights, drafts: int, requests: int) -> None:
        self.dtype = getattr(torch, layer.shape.dtype)
        self.prefix = PREFIX[layer.family]
        self.config = _config(layer, drafts, requests)
        with self.current(), torch.inference_mode(False), torch.no_grad():
            _one_rank()
            try:
                made = _gdn(layer, self) if layer.family is Family.GDN else _mamba2(layer, self)
                self.layer = made
                _load(made, layer, weights, self.dtype)
                self.spec = made.get_kv_cache_spec(self.config)
                builder = made.get_attn_backend().get_builder_cls()
                _choose_kernels(self.config, self.spec)
                self.builder = builder(self.spec, [self.prefix], self.config, torch.device("cpu"))
            except REFUSALS as error:
                raise Refused(f"its constructor refuses: {' '.join(str(error).split())[:160]}") from error
        blocks = 1 + requests * drafts
        raw = torch.zeros(blocks, 1, 1, self.spec.page_size_bytes, dtype=torch.int8)
        made.bind_kv_cache(raw)
        self.raw = raw.view(blocks, -1)
        self.conv, self.state = made.kv_cache[0], made.kv_cache[1]
        if self.conv.shape[-1] == layer.shape.conv_channels:  # [blocks, columns, channels], vLLM's default
            self.conv = self.conv.transpose(1, 2)
        # Block 0 is vLLM's null block. All others hold old contents of other requests.
        self.conv[1:], self.state[1:] = POISON, POISON

    @contextmanager
    def current(self) -> Iterator[None]:
        """Set vLLM's current configuration, and torch's default dtype to the dtype of the rows."""
        from vllm.config import set_current_vllm_config

        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(self.config), torch.inference_mode():
                yield
        finally:
            torch.set_default_dtype(before)

    @contextmanager
    def forward(self, metadata: Any, rows: int) -> Iterator[None]:
        """Enter vLLM's forward context."""
        from vllm.forward_context import set_forward_context

        with self.current(), set_forward_context({self.prefix: metadata}, self.config, num_tokens=rows):
            yield


def _gdn(layer: Layer, home: StateLayer) -> Any:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    return QwenGatedDeltaNetAttention(
        home.config.model_config.hf_text_config, home.config, prefix=home.prefix, gqa_interleaved_layout=False
    )


def _mamba2(layer: Layer, home: StateLayer) -> Any:
    from vllm.config import CacheConfig
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    assert isinstance(home.config.cache_config, CacheConfig)
    return MambaMixer2(
        hidden_size=64,
        ssm_state_size=layer.shape.key_dim,
        conv_kernel_size=layer.shape.conv_kernel,
        intermediate_size=layer.shape.num_heads * layer.shape.value_dim,
        use_conv_bias=layer.conv_bias,
        use_bias=False,
        n_groups=layer.shape.num_key_heads,
        num_heads=layer.shape.num_heads,
        head_dim=layer.shape.value_dim,
        model_config=home.config.model_config,
        cache_config=home.config.cache_config,
        prefix=home.prefix,
    )


def _load(made: Any, layer: Layer, weights: Weights, dtype: torch.dtype) -> None:
    """Give the layer its weights, and prepare them as vLLM does after loading."""
    made.conv1d.weight.data = weights.conv[:, None].to(dtype).contiguous()
    if weights.bias is not None:
        made.conv1d.bias.data = weights.bias.to(dtype)
    made.dt_bias.data = weights.dt_bias.to(made.dt_bias.dtype)
    if layer.family is Family.MAMBA2:
        made.A.data = -weights.a_log.exp()
        made.D.data = weights.skip.to(made.D.dtype)
        made.conv_weights = made.conv1d.weight.view(layer.shape.conv_channels, layer.shape.conv_kernel)
        return
    made.A_log.data = weights.a_log.clone()
    made.conv1d.quant_method.process_weights_after_loading(made.conv1d)


def _choose_kernels(config: Any, spec: Any) -> None:
    """Choose Mamba2's kernels as vLLM's runner does when it allocates states."""
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend

    group = SimpleNamespace(kv_cache_spec=spec)
    initialize_mamba_ssu_backend(config.mamba_config, SimpleNamespace(kv_cache_groups=[group]))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="draftmark-judge-")


def _model(layer: Layer) -> str:
    """Write the config file of a model with such layers, and return its folder. It has no weights."""
    path = Path(_folder().name, layer.name)
    if path.exists():
        return str(path)
    common = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": LENGTH,
    }
    if layer.family is Family.GDN:
        own: dict[str, Any] = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": layer.shape.num_key_heads,
            "linear_num_value_heads": layer.shape.num_heads,
            "linear_key_head_dim": layer.shape.key_dim,
            "linear_value_head_dim": layer.shape.value_dim,
            "linear_conv_kernel_dim": layer.shape.conv_kernel,
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
        }
    else:
        own = {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "num_hidden_layers": 2,
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": layer.shape.num_heads,
            "mamba_head_dim": layer.shape.value_dim,
            "n_groups": layer.shape.num_key_heads,
            "ssm_state_size": layer.shape.key_dim,
            "conv_kernel": layer.shape.conv_kernel,
            "chunk_size": 64,
        }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(common | own))
    return str(path)


def _config(layer: Layer, drafts: int, requests: int) -> Any:
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    model = ModelConfig(
        model=_model(layer), skip_tokenizer_init=True, dtype=layer.shape.dtype, max_model_len=LENGTH, seed=0
    )
    # float32 states, as the platform sets them for its accelerated GDN, and as Nemotron-H's configuration has them.
    cache = CacheConfig(mamba_ssm_cache_dtype="float32", mamba_block_size=LENGTH, enable_prefix_caching=False)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=2 * LENGTH,
        max_num_seqs=2 * requests,
        max_model_len=LENGTH,
        **takes(SchedulerConfig, {"is_encoder_decoder": False}),
    )
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, compilation_config=CompilationConfig()
    )
    config.cache_config.mamba_block_size = LENGTH
    if drafts > 1:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts - 1,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=model,
            target_parallel_config=config.parallel_config,
        )
        object.__setattr__(config, "speculative_config", speculative)
    return config


@cache
def _one_rank() -> None:
    """Make vLLM's process groups of one rank, which its linear layers read, unless the process has groups."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        path = Path(_folder().name, "rendezvous")
        parallel_state.init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        parallel_state.initialize_model_parallel()
