"""Tiny hybrid models for CPU tests, and their output tokens by transformers. Its code shares nothing with SGLang's.

SGLang itself has no kernels for recurrent layers on a CPU, so transformers is the reference for its plain decoding.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.sglang.guessable_hybrid import write_hybrid

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=1024,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4)


def tiny_qwen3_next(folder: Path) -> Path:
    """Write a Qwen3-Next of two Gated DeltaNet and two attention layers with experts, and its MTP layer."""
    return write_hybrid(folder, "float32", **SIZES, **LINEAR)


def tiny_falcon_h1(folder: Path) -> Path:
    """Write a Falcon-H1 of two layers, each with Mamba2, its gated norm, and attention."""
    import transformers

    own = dict(num_hidden_layers=2, mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=False)
    model = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SIZES, **MAMBA2, **own)).float()
    make = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=make)
        if parameter.dim() > 1:
            parameter.data.copy_(drawn if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5 * drawn)
        elif name.endswith(("A_log", "dt_bias")):
            parameter.data.copy_(0.5 * drawn)
    model.save_pretrained(folder)
    return folder


def tiny_kimi_linear(folder: Path) -> str:
    """Write the configuration of a Kimi-Linear of two KDA and two MLA layers, for `use_random_weights`."""
    from any_model import any_model

    kda = dict(num_heads=4, head_dim=16, short_conv_kernel_size=4, kda_layers=[1, 3], full_attn_layers=[2, 4])
    latent = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, mla_use_nope=True)
    experts = dict(num_experts=4, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=32)
    layers = dict(num_hidden_layers=4, first_k_dense_replace=1, head_dim=16, linear_attn_config=kda)
    return any_model(folder, "KimiLinearForCausalLM", "kimi_linear", **layers, **latent, **experts)


def decoded(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy output tokens of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [model.generate(torch.tensor([one]), **greedy)[0, len(one) :].tolist() for one in prompts]


def stand_in_for_a_gpu() -> None:
    """Replace what SGLang's hybrid models need of a GPU, in this process: gated norms, gates, streams and waits."""
    from gated_norms import use_torch_gates, use_torch_norms

    use_torch_norms()
    use_torch_gates()
    torch.cuda.synchronize = torch.cuda.Stream = lambda *_, **__: None


def allow_prefix_caches() -> None:
    """Let SGLang keep checkpoints of recurrent states on a CPU, in this process; it pins host memory for them."""
    from sglang.srt.server_args import ServerArgs

    new_tensor = torch.tensor
    ServerArgs._validate_mamba_extra_buffer = lambda *_: None
    with contextlib.suppress(ImportError):  # since SGLang 0.5.20 a function of another module checks this
        from sglang.srt.arg_groups import mamba_hook

        mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.tensor = lambda *values, pin_memory=False, **named: new_tensor(*values, **named)
