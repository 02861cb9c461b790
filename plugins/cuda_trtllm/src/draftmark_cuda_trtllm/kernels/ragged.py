"""write_metadata of a ragged causal batch (EXTEND). One launch.

XQA has no causal prefill, so a request's new rows are cut into chunks, and each chunk becomes a request of its own:
as long as its last row's position, with the pages up to there and a causal mask over its own rows. Program v writes
chunk v, after a prefix sum over requests (R words from L2) that says whose it is. Worked size, 8 prompts of 4096 rows
on pages of 64: 512 chunks, 64 KiB of page ids, 256 KiB of slots, 256 KiB of mask words.
"""

import triton
import triton.language as tl

from .bits import causal_word
from .inline import bound
from .reduce import running_total, total


@triton.jit
def write_chunks(
    prefix_lens,
    q_indptr,
    page_table,
    slot_mapping,
    chunk_lens,
    chunk_indptr,
    chunk_table,
    chunk_mask,
    num_reqs,
    num_rows,
    num_chunks,
    stride_table,
    stride_chunk,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Request r brings q_indptr[r+1] - q_indptr[r] rows.

    Args:
        slot_mapping: int64 ``[num_rows]``, out.
        chunk_lens: int32 ``[num_chunks]``, out: keys that the chunk's last row sees; 0 where there is no chunk.
        chunk_indptr: int32 ``[num_chunks + 1]``, out: first row of each chunk; num_rows behind the last.
        chunk_table: int32 ``[num_chunks, stride_chunk]``, out: the pages of those keys; the rest is left as it is.
        chunk_mask: int32 ``[num_rows, CHUNK / 32]``, out: row i of a chunk sees its rows 0 … i.
    """
    chunk = tl.program_id(0)
    index = tl.arange(0, BLOCK_R)
    exists = index < num_reqs
    begin = tl.load(q_indptr + index, mask=exists, other=0)
    count = tl.where(exists, (tl.load(q_indptr + index + 1, mask=exists, other=0) - begin + CHUNK - 1) // CHUNK, 0)
    passed = (running_total(count) <= chunk) & exists
    owner = total(passed.to(tl.int32), 0)
    here = owner < num_reqs
    owner = tl.minimum(owner, num_reqs - 1)
    done = (chunk - total(tl.where(passed, count, 0), 0)) * CHUNK
    start = tl.load(q_indptr + owner)
    size = tl.where(here, tl.minimum(tl.load(q_indptr + owner + 1) - start - done, CHUNK), 0)
    prefix = tl.load(prefix_lens + owner)
    length = tl.where(here, prefix + done + size, 0)
    first = tl.where(here, start + done, num_rows)

    tl.store(chunk_lens + chunk, length)
    tl.store(chunk_indptr + chunk, first)
    if chunk == num_chunks - 1:
        tl.store(chunk_indptr + num_chunks, num_rows)

    row = tl.arange(0, CHUNK)
    live = row < size
    own_table = page_table + owner.to(tl.int64) * stride_table
    position = prefix + done + row
    page = tl.load(own_table + position // PAGE, mask=live, other=0)
    # 64-bit: page · P passes 2**31 in a large pool (vllm#47671).
    tl.store(slot_mapping + first + row, page.to(tl.int64) * PAGE + position % PAGE, mask=live)
    for word in tl.static_range(CHUNK // 32):
        tl.store(chunk_mask + (first + row) * (CHUNK // 32) + word, causal_word(row + 1, word), mask=live)

    pages = (length + PAGE - 1) // PAGE
    target = chunk_table + chunk.to(tl.int64) * stride_chunk
    for at in range(0, bound(pages), BLOCK_P):
        column = at + tl.arange(0, BLOCK_P)
        tl.store(target + column, tl.load(own_table + column, mask=column < pages, other=0), mask=column < pages)


@triton.jit
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
    """The same batch for trtllm-gen's context kernels, which are causal themselves: lengths and their prefix sums.

    Args:
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
        tl.store(kv_indptr + index + 1, running_total(length.to(tl.int64)), mask=exists)

    entry = program * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_rows
    owner = total(((end[None, :] <= entry[:, None]) & exists[None, :]).to(tl.int32), 1)
    owner = tl.minimum(owner, num_reqs - 1)
    position = tl.load(prefix_lens + owner, mask=live, other=0) + entry - tl.load(q_indptr + owner, mask=live, other=0)
    page = tl.load(page_table + owner.to(tl.int64) * stride_table + position // PAGE, mask=live, other=0)
    tl.store(slot_mapping + entry, page.to(tl.int64) * PAGE + position % PAGE, mask=live)
