"""Tests of the page table that the vendor's kernels read in a layer with a window."""

from __future__ import annotations

import torch

from draftmark_cuda_trtllm import launch


def test_columns_left_of_the_window_name_the_null_page() -> None:
    """A column becomes the null page if all its positions lie before L - window_left; other columns stay."""
    table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    table[0, :2] = 99  # pages that belong to another request now
    out = torch.full((3, 4), -7, dtype=torch.int32)
    prefix_lens = torch.tensor([50, 3, 37], dtype=torch.int32)
    launch.write_visible_table(16, 5, prefix_lens, table, out)
    assert out.tolist() == [[0, 0, 3, 4], [5, 6, 7, 8], [0, 0, 11, 12]]
