"""Metadata kernel of a uniform batch: KV lengths, KV slots, and mask and indptr of XQA's kernel for trees.

For example, 256 requests of 64 rows write 1 KiB of lengths, 128 KiB of slots and 128 KiB of mask words. They
read the tree's words once. That is 0.1 µs at 4 TB/s, so the launch itself (about 3 µs) dominates.
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
    """Write the metadata of a batch in which every request has q_len rows and tail_len tail slots (draft tokens).

    Args:
        prefix_lens: int32 ``[R]``. page_table: int32 ``[R, pages]``.
        tree: int32 ``[num_rows, stride_tree]``; bit j of a row is set if the row sees tail slot j. Read only with
            TREE; otherwise tails are causal.
        kv_lens: int32 ``[R]``, out: L + T. Only this kernel writes it, so a captured region never reads zeros
            (sglang#26521).
        slot_mapping: int64 ``[num_rows]``, out: page · P + offset of position L + T - q + j.
        row_indptr: int32 ``[R + 1]``, out with MASKED: multiples of `lanes`.
        mask: int32 ``[R · lanes, words]``, out with MASKED: q_len rows of each request; padding rows are not written.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = entry < num_reqs
    tl.store(kv_lens + entry, tl.load(prefix_lens + entry, mask=is_request, other=0) + tail_len, mask=is_request)

    live = entry < num_rows
    request = entry // q_len
    position = tl.load(prefix_lens + request, mask=live, other=0) + tail_len - q_len + entry % q_len
    page = tl.load(page_table + request.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
    # The slot is int64, because page · PAGE exceeds 2**31 in a large pool (vllm#47671).
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
