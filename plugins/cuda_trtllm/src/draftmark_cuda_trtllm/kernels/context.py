"""Metadata kernel of EXTEND for trtllm-gen. Its context kernels apply the causal mask, so no mask is written.

It is one launch, because each program computes the prefix sum over the R requests itself, from R words in L2. For
example, 8 prompts of 4096 rows write 256 KiB of slots.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "stride_table"])
def write_context(
    prefix_lens,
    q_indptr,
    page_table,
    slot_mapping,
    kv_lens,
    kv_indptr,
    num_reqs,
    num_rows,
    stride_table,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write KV lengths, their prefix sums, and slots of a ragged batch.

    Args:
        prefix_lens: int32 ``[R]``. page_table: int32 ``[R, pages]``.
        q_indptr: int32 ``[R + 1]``; request r has q_indptr[r+1] - q_indptr[r] new rows.
        slot_mapping: int64 ``[num_rows]``, out. kv_lens: int32 ``[R]``, out: L + n.
        kv_indptr: int64 ``[R + 1]``, out: running sums of kv_lens.
    """
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    end = tl.load(q_indptr + index + 1, mask=exists, other=0)
    rows = tl.where(exists, end - tl.load(q_indptr + index, mask=exists, other=0), 0)
    length = tl.load(prefix_lens + index, mask=exists, other=0) + rows
    if program == 0:
        tl.store(kv_lens + index, length, mask=exists)
        tl.store(kv_indptr + index, index.to(tl.int64) * 0, mask=index == 0)
        sums = tl.associative_scan(length.to(tl.int64), 0, tl.standard._sum_combine)
        tl.store(kv_indptr + index + 1, sums, mask=exists)

    entry = program * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_rows
    passed = ((end[None, :] <= entry[:, None]) & exists[None, :]).to(tl.int32)
    # This is `tl.sum`, which Triton fixes as compiled or interpreted at import. `tl.reduce` works in both modes.
    owner = tl.reduce(passed, 1, tl.standard._sum_combine)
    owner = tl.minimum(owner, num_reqs - 1)
    position = tl.load(prefix_lens + owner, mask=live, other=0) + entry - tl.load(q_indptr + owner, mask=live, other=0)
    page = tl.load(page_table + owner.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
    tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE + position % PAGE, mask=live)
