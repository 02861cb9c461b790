"""Kernels are not compiled again for another batch size; that would stall a step by tenths of a second."""

from __future__ import annotations

COUNTS = ("num_reqs", "num_rows", "num_tiles", "count", "stride_table")
"""Kernel parameters that change from one eager forward to the next. A page table's stride is the engine's choice."""


def test_batch_sizes_are_not_specialized(compiled_kernels):
    """Batch sizes are in do_not_specialize, so that sizes 1 and multiples of 16 need no separate kernels."""
    counted = [
        (kernel, p) for kernel in compiled_kernels for p in kernel.params if p.name in COUNTS and not p.is_constexpr
    ]
    assert len(counted) > 2
    assert not [f"{kernel.__name__}: {p.name}" for kernel, p in counted if not p.do_not_specialize]
