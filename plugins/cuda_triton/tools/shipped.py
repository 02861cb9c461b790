"""Geometries with shipped kernels: common GPUs, models, page sizes and drafts. One table, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from draftmark import LAYOUT_FORMS, AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode

GPUS = {
    80: (108,),  # A100
    86: (72, 84),  # A10, A40
    89: (58, 142),  # L4, L40S
    90: (114, 132),  # H100 PCIe, H100 and H200
    100: (148,),  # B200
    120: (170, 188),  # RTX 5090, RTX PRO 6000
}
"""Numbers of SMs of common GPUs, by architecture."""
HEADS = {
    "llama-8b, qwen3-8b": (32, 8, 128),
    "llama-70b, qwen3-32b": (64, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-1.7b": (16, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "qwen2.5-7b": (28, 4, 128),
    "llama-3b": (24, 8, 128),
    "llama-1b": (32, 8, 64),
}
"""Query heads, KV heads and head_dim of common models, without tensor parallelism."""
LATENT = {
    "deepseek-v3 (8 ranks)": 16,
    "deepseek-v3 (16 ranks), kimi-k2 (8 ranks)": 8,
}
"""Query heads of one rank of common models with latent rows of 512 + 64 elements."""
LATENT_FORMS = (Form.ENGINE_STORES, Form.ENGINE_TABLE, Form.STRIDED_KV)
"""Forms in which the engines' adapters open latent layers. The engine stores the rows."""
TENSOR_PARALLEL = (1, 2, 4, 8)
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
PAGE_SIZES = (16, 64)
"""Tokens of a page: vLLM's, and SGLang's with --page-size 64."""
DRAFT_TOKENS = (1, 5)
"""Rows of a request in a verify step: without drafts, and with chains of four drafts."""
LIMITS = Limits(max_num_reqs=256, max_context_len=32768, max_extend_tokens=8192, overshoot=False, max_kv_len=32768)
FP8_ARCH = 89
"""First architecture that converts e4m3."""


def geometries(archs: list[int], models: list[str]) -> Iterator[Geometry]:
    """Yield two geometries of each shape: EXTEND and decode without drafts, and decode and verify with drafts.

    Args:
        archs: keys of GPUS.
        models: keys of HEADS and LATENT.
    """
    for arch, shape in product(archs, _shapes(models)):
        if shape.kv_dtype != "bfloat16" and arch < FP8_ARCH:
            continue
        forms = LATENT_FORMS if shape.latent else LAYOUT_FORMS
        for sms, tokens in product(GPUS[arch], DRAFT_TOKENS):
            modes = (Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY) if tokens > 1 else (Mode.EXTEND, Mode.DECODE)
            draft, device = DraftShape(num_draft_tokens=tokens), DeviceProfile("cuda", arch, sms)
            yield Geometry.create(shape, LIMITS, draft, device, modes, forms)


def _shapes(models: list[str]) -> Iterator[AttentionShape]:
    """Yield the attention shapes of the models, with each number of ranks, KV dtype and page size."""
    for model, ranks, dtype, page in product(models, TENSOR_PARALLEL, KV_DTYPES, PAGE_SIZES):
        query, kv, dim = HEADS.get(model, (0, 1, 0))
        if query and not kv % ranks and not query % ranks:
            yield AttentionShape(query // ranks, kv // ranks, dim, page, kv_dtype=dtype)
    for model, dtype, page in product(models, KV_DTYPES, PAGE_SIZES):
        if model in LATENT:  # kernels take the scale as an argument, so any value gives the same kernels
            yield AttentionShape(
                LATENT[model], 1, 576, page, kv_dtype=dtype, softmax_scale=192**-0.5, value_dim=512, latent=True
            )
