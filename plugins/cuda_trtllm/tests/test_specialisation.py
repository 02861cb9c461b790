"""Specialisation of the plugin's Triton kernels: no kernel is compiled anew for another batch size."""

from __future__ import annotations

import pytest


def test_batch_sizes_are_not_specialised():
    """Both metadata kernels exclude batch sizes from Triton's specialisation for 1 and for multiples of 16."""
    variants = pytest.importorskip("draftmark_cuda_triton.kernel_variants")
    compiled = variants.load_variant("draftmark_cuda_trtllm.kernels", False)
    kernels = [one for module in (compiled.context, compiled.uniform) for one in vars(module).values()]
    params = [p for kernel in kernels for p in getattr(kernel, "params", ())]
    counts = [p for p in params if p.name in ("num_reqs", "num_rows", "stride_table") and not p.is_constexpr]
    assert len(counts) == 6
    assert all(p.do_not_specialize for p in counts)
