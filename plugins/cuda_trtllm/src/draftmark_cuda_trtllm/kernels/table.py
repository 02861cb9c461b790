"""Page table of a layer with a window, for kernels that also load whole tiles left of the window.

For example, 256 requests of 8,192 pages read and write 8 MiB each, which takes 4 µs at 4 TB/s.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "window_left", "stride_table"])
def write_visible_table(
    prefix_lens, page_table, out, columns, window_left, stride_table, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the page table, with the null page 0 in columns that no row of the request sees.

    A page left of the window may belong to another request and contain NaN. The vendor's kernels load it and multiply
    its V by a weight of zero, so they get the null page, which is finite.

    Args:
        prefix_lens: int32 ``[R]``. page_table: int32 ``[R, columns]``. out: int32 ``[R, columns]``, contiguous.
    """
    request = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = column < columns
    seen = exists & ((column + 1) * PAGE > tl.load(prefix_lens + request) - window_left)
    page = tl.load(page_table + request * stride_table + column, mask=seen, other=0)
    tl.store(out + request * columns + column, page, mask=exists)
