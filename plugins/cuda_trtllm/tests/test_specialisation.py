"""No kernel of its own is compiled anew for a batch of another size."""

from __future__ import annotations

import pytest


def test_counts_of_a_batch_are_not_specialised_on():
    """Of the two kernels that write metadata: Triton would compile one for 1, one for multiples of 16, one beside."""
    variants = pytest.importorskip("draftmark_cuda_triton.kernel_variants")
    compiled = variants.load_variant("draftmark_cuda_trtllm.kernels", False)
    kernels = [one for module in (compiled.context, compiled.uniform) for one in vars(module).values()]
    params = [p for kernel in kernels for p in getattr(kernel, "params", ())]
    counts = [p for p in params if p.name in ("num_reqs", "num_rows", "stride_table") and not p.is_constexpr]
    assert len(counts) == 6
    assert all(p.do_not_specialize for p in counts)
