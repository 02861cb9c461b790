"""write_metadata of a uniform batch: lengths with the tail, KV slots, and the tree form's mask and indptr. One launch.

Worked size, 256 requests of 64 rows: 1 KiB of lengths, 128 KiB of slots, 128 KiB of mask words written, the tree's
words read once: 0.1 µs of bytes at 4 TB/s, so a launch (about 3 µs) is the floor.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "stride_table"])
def write_uniform(
    prefix_lens,
    page_table,
    tree,
    kv_lens,
    slot_mapping,
    row_indptr,
    mask,
    num_reqs,
    num_rows,
    q_len,
    tail_len,
    lanes,
    words,
    stride_table,
    stride_tree,
    PAGE: tl.constexpr,
    TREE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A batch whose requests all have q_len rows and tail_len tail slots.

    Args:
        prefix_lens: int32 ``[R]``. page_table: int32 ``[R, pages]``. tree: int32 ``[num_rows, stride_tree]``, bit j of
            a row set when it sees tail slot j; read with TREE only, else tails are causal.
        kv_lens: int32 ``[R]``, out: L + T. Written here and nowhere else, so a captured region never finds zeros
            (sglang#26521).
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j.
        row_indptr: int32 ``[R + 1]``, out with MASKED: multiples of `lanes`.
        mask: int32 ``[R · lanes, words]``, out with MASKED: a request's q_len rows first; dummies are left as they are.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = entry < num_reqs
    tl.store(kv_lens + entry, tl.load(prefix_lens + entry, mask=is_request, other=0) + tail_len, mask=is_request)

    live = entry < num_rows
    request = entry // q_len
    position = tl.load(prefix_lens + request, mask=live, other=0) + tail_len - q_len + entry % q_len
    page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
    # 64-bit: page · P passes 2**31 in a large pool (vllm#47671).
    tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE + position % PAGE, mask=live)

    if MASKED:
        tl.store(row_indptr + entry, entry * lanes, mask=entry <= num_reqs)
        has_word = entry < num_rows * words
        row, word = entry // words, entry % words
        if TREE:
            bits = tl.load(tree + row.to(tl.int64) * stride_tree + word, mask=has_word, other=0)
        else:
            ones = tail_len - q_len + row % q_len + 1 - 32 * word
            part = tl.minimum(tl.maximum(ones, 0), 31)
            bits = tl.where(ones >= 32, -1, (1 << part) - 1)
        target = (row // q_len * lanes + row % q_len) * words + word
        tl.store(mask + target, bits, mask=has_word)
