"""Triton kernels of this plugin: one writes index buffers, the other stores new keys and values.

`write_indices` runs once per forward. Program (g, b) writes block b of the page ids, masked tokens, mask bytes and
slots of REQS requests. REQS is 1 on a GPU. In the interpreter it is large, because time there grows with the number of
operations. Each program computes the prefix sum over the R requests itself, from R words in L2, which takes less time
than a second launch. For example, a batch has 256 requests of 131072 tokens in pages of 64, with 64 rows each. Then 512
programs read and write 2 MiB of ids and write 128 KiB of mask. That takes a launch (about 3 µs) and one wave.

`write_rows` runs once per layer, with one program per row for K and V. 64 rows of 8 heads of 128 in bf16 are 256 KiB
read and 256 KiB written.

Both are plain functions. `launch` compiles them for a GPU and interprets them for CPU tensors, in one process.
"""

import triton.language as tl


def write_indices(
    batch, tree, slot_mapping, pages_of_prefix, slots_of_tail,
    num_reqs, tail_len, head_len, window_left, stride_table, stride_mask,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr, REQS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Write the metadata of one forward.

    Args:
        batch: prefix_lens, q_indptr and page_table of the batch, int32.
        tree: mask and depth of the batch's tree, int32; not read without TREE.
        slot_mapping: int64 ``[rows]``, out: slot at which each row stores K and V.
        pages_of_prefix: out: indptr, page ids and last page lengths of the prefix if MASKED, else of prefix and new
            tokens.
        slots_of_tail: out, if MASKED: indptr, slots and last page lengths of the KV that the masked pass reads, then
            bit (row · tokens + token) of each request, and the first byte of each request's bits.
        tail_len: new tokens of each request, draft tokens included; with RAGGED a request has one per row.
        head_len: prefix tokens that the masked pass reads.
        REQS: requests per program; 1 on a GPU.
    """
    prefix_lens, q_indptr, page_table = batch
    tree_mask, tree_depth = tree
    kv_indptr, kv_indices, last_page_len = pages_of_prefix
    tail_indptr, tail_slots, tail_last_page_len, tail_mask, mask_indptr = slots_of_tail
    block = tl.program_id(1)
    r = tl.program_id(0) * REQS + tl.arange(0, REQS)[:, None]  # shape [REQS, 1], as of all per-request values below
    real = r < num_reqs
    row0 = tl.load(q_indptr + r, mask=real, other=0)
    rows = tl.load(q_indptr + r + 1, mask=real, other=0) - row0
    tail = rows if RAGGED else tail_len

    # -- page list of the unmasked or causal pass: each request's number of pages, and the sum over earlier requests
    every = tl.arange(0, BLOCK_R)[None, :]
    exists = every < num_reqs
    length = tl.load(prefix_lens + every, mask=exists, other=0)
    if MASKED:
        pages = (length + PAGE - 1) // PAGE
        first = every * 0
        if WINDOW:
            first = tl.minimum((tl.maximum(length + tail_len - window_left, 0) + PAGE - 1) // PAGE, pages)
        count = pages - first
    else:
        tails = every * 0 + tail_len
        if RAGGED:
            begin = tl.load(q_indptr + every, mask=exists, other=0)
            tails = tl.load(q_indptr + every + 1, mask=exists, other=0) - begin
        first = every * 0
        count = (length + tails + PAGE - 1) // PAGE
    before = tl.reduce(tl.where(exists & (every < r), count, 0), 1, tl.standard._sum_combine)[:, None]
    mine = tl.reduce(tl.where(every == r, count, 0), 1, tl.standard._sum_combine)[:, None]
    skip = tl.reduce(tl.where(every == r, first, 0), 1, tl.standard._sum_combine)[:, None]
    prefix = tl.load(prefix_lens + r, mask=real, other=0)
    table = page_table + r.to(tl.int64) * stride_table
    head_program = real & (block + r * 0 == 0)
    last = head_program & (r == num_reqs - 1)
    end = prefix if MASKED else prefix + tail
    tl.store(last_page_len + r, tl.where(end > 0, (end - 1) % PAGE + 1, 1), mask=head_program)
    tl.store(kv_indptr + r, before, mask=head_program)
    tl.store(kv_indptr + r + 1, before + mine, mask=last)
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    paged = real & (at < mine)
    owned = paged
    if WINDOW and not MASKED:
        # FA2 loads whole tiles of keys and multiplies V of hidden keys by zero. A page left of the window may belong to
        # another request and contain NaN, so FA2 gets the null page in its place.
        owned = paged & ((at + 1) * PAGE > prefix - window_left)
    ids = tl.load(table + skip + at, mask=owned, other=0)
    tl.store(kv_indices + before + at, ids, mask=paged)

    # -- the slots at which each request's rows store K and V
    stored = real & (at < rows)
    position = prefix + tail - rows + at
    page = tl.load(table + position // PAGE, mask=stored, other=0).to(tl.int64)
    # The slot is int64, because page · PAGE exceeds 2**31 in a large pool (vllm#47671).
    tl.store(slot_mapping + row0 + at, page * PAGE + position % PAGE, mask=stored)

    if MASKED:
        tokens = head_len + tail_len
        size = (rows * tokens + 7) // 8
        tl.store(tail_indptr + r, r * tokens, mask=head_program)
        tl.store(mask_indptr + r, r * size, mask=head_program)
        tl.store(tail_last_page_len + r, 1, mask=head_program)
        tl.store(tail_indptr + r + 1, (r + 1) * tokens, mask=last)
        tl.store(mask_indptr + r + 1, (r + 1) * size, mask=last)
        # The head is the prefix part of the masked pass: from the window edge of the shallowest row to the first page
        # that all rows see. Entries outside it use the tail's first slot, which already holds keys and values: V of a
        # masked key is multiplied by zero, so it must not be NaN.
        low = tl.maximum(prefix - window_left, 0)
        high = tl.minimum(skip * PAGE, prefix)
        place = tl.where(at < head_len, low + at, prefix + at - head_len)
        inside = (at >= head_len) | (place < high)
        place = tl.where(inside, place, prefix)
        named = real & (at < tokens)
        owner = tl.load(table + place // PAGE, mask=named, other=0)
        tl.store(tail_slots + r * tokens + at, owner * PAGE + place % PAGE, mask=named)

        byte = block * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :, None]
        lane = tl.arange(0, 8)[None, None, :]
        bit = byte * 8 + lane
        live = (real & (rows > 0))[:, :, None] & (bit < (rows * tokens)[:, :, None])  # [REQS, BLOCK_BYTES, 8]
        row, token = bit // tokens, bit % tokens
        slot = token - head_len
        in_tail = slot >= 0
        slot = tl.maximum(slot, 0)
        own = (tail_len - rows)[:, :, None] + row
        if TREE:
            words = tree_mask + (row0[:, :, None] + row).to(tl.int64) * stride_mask
            word = tl.load(words + slot // 32, mask=live & in_tail, other=0)
            seen = ((word >> (slot % 32)) & 1) == 1
            depth = tree_depth + r.to(tl.int64)[:, :, None] * tail_len
            own_depth = tl.load(depth + own, mask=live, other=0)
            slot_depth = tl.load(depth + slot, mask=live & in_tail, other=0)
        else:
            seen = slot <= own
            own_depth, slot_depth = own, slot
        if WINDOW:
            head_place = low[:, :, None] + token
            near = head_place >= prefix[:, :, None] + own_depth - window_left
            in_window = own_depth - slot_depth <= window_left
            seen = tl.where(in_tail, seen & in_window, near & (head_place < high[:, :, None]))
        value = (seen & live).to(tl.int32) << lane
        packed = tl.reduce(value, 2, tl.standard._sum_combine)
        flat = block * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
        tl.store(tail_mask + r * size + flat, packed.to(tl.uint8), mask=real & (flat < size))


def write_rows(
    k, v, k_cache, v_cache, slot_mapping, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy k, v ``[rows, heads, dim]`` into caches ``[slots, heads, dim]`` at slot_mapping, int64 ``[rows]``."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    element = tl.arange(0, BLOCK)
    live = element < NUM_HEADS * HEAD_DIM
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    target = slot * (NUM_HEADS * HEAD_DIM) + element
    new_k = tl.load(k + row * stride_k_row + head * stride_k_head + dim, mask=live)
    new_v = tl.load(v + row * stride_v_row + head * stride_v_head + dim, mask=live)
    tl.store(k_cache + target, new_k, mask=live)
    tl.store(v_cache + target, new_v, mask=live)
