"""Buffer sizes of the trtllm-gen backend (sm_100, sm_103), which was never run on hardware. Integers only.

The kernels are closed binaries. FlashInfer passes them the rest of the workspace as scratch and states no formula, so
WORKSPACE_BYTES is the size that FlashInfer's documentation recommends. The counters have a formula.
"""

from __future__ import annotations

from typing import Any

from draftmark import BufferSpec, Geometry, Mode, ceil_div, maximum

LENS, SLOTS, KV_INDPTR, WORKSPACE, COUNTERS = "kv_lens", "slot_mapping", "kv_indptr", "workspace", "counters"
WORKSPACE_BYTES = 128 << 20


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return the buffers: lengths, slots, prefix sums of lengths for EXTEND, counters, and FlashInfer's workspace."""
    reqs = geometry.max_reqs
    specs = [
        BufferSpec(LENS, (reqs,), "int32", "max_reqs"),
        BufferSpec(SLOTS, (geometry.max_rows_any,), "int64", "max_rows"),
    ]
    if Mode.EXTEND in geometry.modes:
        specs.append(BufferSpec(KV_INDPTR, (reqs + 1,), "int64", "max_reqs + 1"))
    formula = "8 · ceil(max(requests · query heads, SMs) / 8) (getTrtllmGenMultiCtasKvCounterBytes)"
    count = counters(geometry, reqs)
    return [
        *specs,
        BufferSpec(COUNTERS, (count,), "int32", formula, zeros=True),
        BufferSpec(
            WORKSPACE, (WORKSPACE_BYTES,), "uint8", "FlashInfer's recommendation: 128 MiB",
            zeros=True,
        ),
    ]  # fmt: skip


def counters(geometry: Geometry, requests: Any) -> Any:
    """Return the number of int32 counters that FlashInfer needs for a batch of `requests` requests."""
    return 8 * ceil_div(maximum(requests * geometry.attention.num_qo_heads, geometry.device.num_sms), 8)
