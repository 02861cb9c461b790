"""Test that Triton compiles the plugin's kernels only once, not again for another batch size."""

from __future__ import annotations

import pytest


def test_batch_sizes_are_not_specialised():
    """Batch sizes of 1 or a multiple of 16 do not make Triton compile either metadata kernel again."""
    variants = pytest.importorskip("draftmark_cuda_triton.kernel_variants")
    compiled = variants.load_variant("draftmark_cuda_trtllm.kernels", False)
    kernels = [one for module in (compiled.context, compiled.uniform) for one in vars(module).values()]
    params = [p for kernel in kernels for p in getattr(kernel, "params", ())]
    counts = [p for p in params if p.name in ("num_reqs", "num_rows", "stride_table") and not p.is_constexpr]
    assert len(counts) == 6
    assert all(p.do_not_specialize for p in counts)
