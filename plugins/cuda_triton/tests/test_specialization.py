"""No kernel is compiled anew for a batch of another size: that would take tenths of a second of somebody's round."""

from __future__ import annotations

COUNTS = ("num_reqs", "num_rows", "num_tiles", "count", "stride_table")
"""What changes from one eager forward to the next. A page table's pitch is its engine's."""


def test_batch_sizes_are_not_specialized(compiled_kernels):
    """Triton compiles one kernel for 1, one for multiples of 16 and one for the rest, unless it is told not to."""
    counted = [
        (kernel, p) for kernel in compiled_kernels for p in kernel.params if p.name in COUNTS and not p.is_constexpr
    ]
    assert len(counted) > 2
    assert not [f"{kernel.__name__}: {p.name}" for kernel, p in counted if not p.do_not_specialize]
