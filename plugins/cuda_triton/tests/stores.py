"""A decode geometry with kernels that compile in less than a second, and entries of a kernel store."""

from __future__ import annotations

from pathlib import Path

from draftmark import AttentionShape, DeviceProfile, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.compiled.source import KernelSource
from draftmark_cuda_triton.compiled.store import Store

QUICK = ("write_kv_rows", "write_metadata_decode_verify")
"""Kernels that compile in less than a second."""

SMALL = Geometry.create(
    AttentionShape(8, 2, 64, 16), Limits(4, 512), device=DeviceProfile("cuda", 90, 132), modes=(Mode.DECODE,)
)
"""Decode geometry of few kernels."""


def quick_calls():
    """Return calls of two kernels of a decode geometry that compile quickly, by kernel."""
    calls = kernel_list.calls_of(SMALL, trees=False).items()
    found = {spec.kernel.__name__: (spec, call) for spec, call in calls}
    return dict(found[name] for name in QUICK)


def source_of(spec) -> KernelSource:
    return KernelSource.of(spec.source(), spec.target, dict(spec.options))


def entries_of(store: Store) -> list[Path]:
    return sorted(path.parent for path in store.root.rglob("sums.json"))
