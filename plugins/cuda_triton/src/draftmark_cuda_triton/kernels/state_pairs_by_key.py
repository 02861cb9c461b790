"""Products among the rows of a verify, as in `state_pairs`, for a decay per key element.

Then ``G_t / G_j`` is a vector over the keys. It is the product of ``G_t / M`` and ``M / G_j``, where M lies between the
smallest and the largest G of the rows. So the sums over keys are products of matrices, as long as no factor overflows.
Otherwise the program takes one column after another.
"""

import triton
import triton.language as tl

from .inline import bound, inline
from .reduce import largest, smallest, total
from .state_pairs import blocks_of, sees, store_matrices
from .state_products import ROWS, product

MAX_SPREAD = tl.constexpr(64.0)
"""Largest distance of the logarithms of G of two rows for which the products are products of matrices."""


@inline
def logs_of(at_logs, row, live, k_inside, stride_decay_row):
    """Return the log decays of 16 rows, ``[16, CHUNK]``; `at_logs` has the addresses of row 0."""
    at = at_logs[None, :] + row.to(tl.int64)[:, None] * stride_decay_row
    return tl.load(at, mask=live[:, None] & k_inside[None, :], other=0.0)


@inline
def totals_of(
    at_mask, at_logs, block, count, tree, mask_words, k_inside, stride_decay_row, CHUNK: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Return log G of the rows of a block: the sums of their ancestors' log decays, ``[16, CHUNK]``."""
    row = tl.arange(0, ROWS) + block * ROWS
    found = tl.full((ROWS, CHUNK), 0, tl.float32)
    for other in range(0, bound(block + 1)):
        column = tl.arange(0, ROWS) + other * ROWS
        logs = logs_of(at_logs, column, column < count, k_inside, stride_decay_row)
        seen = sees(at_mask, row, column, count, tree, mask_words)
        found += product(seen.to(tl.float32), logs, PRECISE)
    return found


@inline
def middle_of(left_total, right_total, left_live, right_live):
    """Return the middle of the live rows' totals by key, and the largest distance of two totals."""
    nothing = float("inf")
    left, right = left_live[:, None], right_live[:, None]
    high = tl.maximum(
        largest(tl.where(left, left_total, -nothing), 0), largest(tl.where(right, right_total, -nothing), 0)
    )
    low = tl.minimum(
        smallest(tl.where(left, left_total, nothing), 0), smallest(tl.where(right, right_total, nothing), 0)
    )
    return 0.5 * (high + low), largest(high - low, 0)


@inline
def one_by_one(left_k, left_q, left_total, at_k, at_total, stride_k, stride_total, first, end, k_inside):
    """Return the products of all rows and columns, one column at a time, so that no factor exceeds 1.

    Args:
        left_k, left_q, left_total: ``[16, CHUNK]``.
        at_k, at_total: addresses of the keys and of the written totals of row 0, ``[CHUNK]``.
        first, end: first row of the right block, and rows of the request.
    """
    column = tl.arange(0, ROWS)[None, :]
    among_keys = tl.full((ROWS, ROWS), 0, tl.float32)
    among_queries = tl.full((ROWS, ROWS), 0, tl.float32)
    for j in range(0, bound(tl.minimum(end - first, ROWS))):
        right_k = tl.load(at_k + (first + j) * stride_k, mask=k_inside, other=0.0).to(tl.float32)
        right_total = tl.load(at_total + (first + j) * stride_total, mask=k_inside, other=0.0)
        # A row that does not see j may have a larger total; its product is masked.
        decayed = tl.exp(tl.minimum(left_total - right_total[None, :], 0.0)) * right_k[None, :]
        of_keys, of_queries = total(left_k * decayed, 1), total(left_q * decayed, 1)
        among_keys += tl.where(column == j, of_keys[:, None], 0.0)
        among_queries += tl.where(column == j, of_queries[:, None], 0.0)
    return among_keys, among_queries


@triton.jit(
    do_not_specialize=["first_entry", "nodes", "width", "mask_words", "tree", "layer"],
    do_not_specialize_on_alignment=["log_decay", "beta", "q_indptr", "mask"],
)
def verify_pairs_by_key(
    q,
    k,
    log_decay,
    beta,
    q_indptr,
    mask,
    keys,
    decays,
    totals,
    matrices,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_decay_row,
    stride_decay_head,
    stride_beta_row,
    first_entry,
    nodes,
    width,
    mask_words,
    tree,
    layer,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one pair of row blocks of one request and head, and record keys and decays.

    The arguments are those of `state_pairs.verify_pairs`; decays, and `totals` of each layer, have KEY_DIM elements a
    head.

    Args:
        CHUNK: key elements that a program computes together, so that a warp has registers for them.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, key_head = tl.num_programs(1), head // HEADS_PER_KEY
    block, other = blocks_of(pair)
    first, last = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    count = (last - first).to(tl.int32)
    if block * ROWS < count:
        row, column = tl.arange(0, ROWS) + block * ROWS, tl.arange(0, ROWS) + other * ROWS
        line, across = row.to(tl.int64)[:, None], column.to(tl.int64)[:, None]
        live, column_live = row < count, column < count
        at_mask, entry = mask + first * mask_words, (first_entry + request) * nodes
        stride_total = heads * KEY_DIM
        seen = sees(at_mask, row, column, count, tree, mask_words)
        among_keys = tl.full((ROWS, ROWS), 0, tl.float32)
        among_queries = tl.full((ROWS, ROWS), 0, tl.float32)
        for begin in range(0, BLOCK_K, CHUNK):
            key = tl.arange(0, CHUNK) + begin
            k_inside = key < KEY_DIM
            at_k = k + first * stride_k_row + key_head * stride_k_head + key
            at_q = q + first * stride_q_row + key_head * stride_q_head + key
            at_logs = log_decay + first * stride_decay_row + head * stride_decay_head + key
            at_total = totals + (request * nodes * heads + head) * KEY_DIM + key
            k_live, here = live[:, None] & k_inside[None, :], column_live[:, None] & k_inside[None, :]
            row_k = tl.load(at_k[None, :] + line * stride_k_row, mask=k_live, other=0.0)
            row_q = tl.load(at_q[None, :] + line * stride_q_row, mask=k_live, other=0.0)
            of_row = totals_of(
                at_mask, at_logs, block, count, tree, mask_words, k_inside, stride_decay_row, CHUNK, PRECISE
            )
            if block == other:
                if head % HEADS_PER_KEY == 0:
                    kept = ((entry + line) * (heads // HEADS_PER_KEY) + key_head) * KEY_DIM + key[None, :]
                    tl.store(keys + kept, row_k, mask=k_live)
                logs = logs_of(at_logs, row, live, k_inside, stride_decay_row)
                tl.store(decays + ((entry + line) * heads + head) * KEY_DIM + key[None, :], logs, mask=k_live)
            if ONE_BLOCK:
                of_column, column_k = of_row, row_k
            else:
                of_column = totals_of(
                    at_mask, at_logs, other, count, tree, mask_words, k_inside, stride_decay_row, CHUNK, PRECISE
                )
                column_k = tl.load(at_k[None, :] + across * stride_k_row, mask=here, other=0.0)
            # Every program of the columns' block writes the same totals.
            tl.store(at_total[None, :] + across * stride_total, of_column, mask=here)
            middle, spread = middle_of(of_row, of_column, live, column_live)
            row_k, row_q = row_k.to(tl.float32), row_q.to(tl.float32)
            if spread <= MAX_SPREAD:
                left = tl.where(live[:, None], tl.exp(of_row - middle[None, :]), 0.0)
                right = tl.where(column_live[:, None], tl.exp(middle[None, :] - of_column), 0.0)
                right = tl.trans(right * column_k.to(tl.float32))
                among_keys += product(row_k * left, right, PRECISE)
                among_queries += product(row_q * left, right, PRECISE)
            else:
                tl.debug_barrier()  # the totals are read back
                of_keys, of_queries = one_by_one(
                    row_k, row_q, of_row, at_k, at_total, stride_k_row, stride_total, other * ROWS, count, k_inside
                )
                among_keys += of_keys
                among_queries += of_queries
        among_keys = tl.where(seen != 0, among_keys, 0.0)
        among_queries = tl.where(seen != 0, among_queries, 0.0)
        at = matrices + ((request * heads + head) * tl.num_programs(0) + pair) * 2 * width * width
        store_matrices(
            at, among_keys, among_queries, beta + first * stride_beta_row + head, stride_beta_row, block, other, row,
            column, count, width, DELTA, PRECISE,
        )  # fmt: skip
