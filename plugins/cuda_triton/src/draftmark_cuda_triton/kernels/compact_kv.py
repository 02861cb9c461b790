"""Compact the KV of accepted draft tokens to contiguous positions, for K and V of all layers in one launch.

A program moves BLOCK words of each token row, for one request in one layer, BLOCK_ROWS accepted tokens at a time.
Accepted slots ascend, and none lies below its target position. So every slot that a later step reads lies above all
written ones. Inside a step, a barrier separates the reads from the writes. A program of a request that accepts only the
root returns at once. Tokens that are already at their target are not moved. Example: 64 requests that each move 4
nodes, 32 layers, 8 heads of 128, bf16. 33 MB read and 33 MB written take 16 µs at 4.3 TB/s.
"""

import triton
import triton.language as tl

from .inline import bound
from .reduce import largest


@triton.jit(
    do_not_specialize=["nodes", "stride_table"],
    do_not_specialize_on_alignment=["path", "counts", "prefix_lens", "page_table"],
)
def compact_kv(
    k,
    v,
    path,
    counts,
    prefix_lens,
    page_table,
    nodes,
    row_words,
    stride_layer: tl.int64,
    stride_table,
    PAGE_SIZE: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy K and V from the slot of position L + path[r, i] to that of L + i, for i < counts[r]; L: prefix length.

    Args:
        k, v: ``[layers, pages, P, row_words]``, the cache viewed as words of 4 bytes, or of 1 byte if 4 do not fit.
        path: int64 ``[R, nodes]``, ascending up to counts[r].
        BOTH: move v too; otherwise v is k.
        counts: int64 ``[R]``, accepted tokens of each request, the root included.
    """
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    if count > 1:
        prefix = tl.load(prefix_lens + request)
        # 64-bit, because offsets in words exceed 2**31 in a large pool (vllm#47671).
        layer = tl.program_id(1).to(tl.int64) * stride_layer
        word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        table = page_table + request * stride_table
        for first in range(1, bound(count), BLOCK_ROWS):
            place = first + tl.arange(0, BLOCK_ROWS)
            node = tl.load(path + request * nodes + place, mask=place < count, other=0).to(tl.int32)
            moves = (place < count) & (node != place)
            if largest(moves.to(tl.int32), 0) > 0:
                origin = prefix + node
                target = prefix + place
                page = tl.load(table + origin // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
                source = layer + (page * PAGE_SIZE + origin % PAGE_SIZE) * row_words
                page = tl.load(table + target // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
                destination = layer + (page * PAGE_SIZE + target % PAGE_SIZE) * row_words
                live = moves[:, None] & (word < row_words)[None, :]
                old_k = tl.load(k + source[:, None] + word[None, :], mask=live)
                if BOTH:
                    old_v = tl.load(v + source[:, None] + word[None, :], mask=live)
                tl.debug_barrier()
                tl.store(k + destination[:, None] + word[None, :], old_k, mask=live)
                if BOTH:
                    tl.store(v + destination[:, None] + word[None, :], old_v, mask=live)
