"""Products among the rows of a verify, which all value elements of a head share: one matrix for u and one for o.

A layer with a decay per key element has kernels of its own, `state_pairs_by_key`.

With G_t the product of the decays of row t and its ancestors, and for ancestors j of row t only::

    K_tj = (G_t/G_j) k_j · k_t, j ≠ t      P_tj = (G_t/G_j) k_j · q_t      T = (I + β K)⁻¹ β

A program computes 16 x 16 of them: rows t of one block, and rows j of the same block or an earlier one. It stores T and
P on the diagonal, K and P below it. Example: 64 requests of 8 rows, 32 heads, 128 keys: 3 MB read, 1 MB written.
"""

import triton
import triton.language as tl

from .inline import bound, inline
from .reduce import total
from .state_products import ROWS, product
from .tile import dot


@inline
def inverse(below, PRECISE: tl.constexpr):
    """Return ``(I + below)⁻¹`` of a strictly lower triangular ``[16, 16]``, from diagonal blocks of 4, 8 and 16.

    A block of 4 is ``I − M + M² − M³``. Two inverted blocks A, B with L below A join to ``−B L A``, as in FLA.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    m = tl.where(row // 4 == column // 4, below, 0.0)
    square = product(m, m, PRECISE)
    found = tl.where(row == column, 1.0, 0.0) - m + square - product(square, m, PRECISE)
    joins = tl.where((row // 8 == column // 8) & (row // 4 != column // 4), below, 0.0)
    found -= product(found, product(joins, found, PRECISE), PRECISE)
    joins = tl.where(row // 8 != column // 8, below, 0.0)
    return found - product(found, product(joins, found, PRECISE), PRECISE)


@inline
def sees(mask, row, column, count, tree, mask_words):
    """Return int32 ``[16, 16]``: 1 where row t of the tail has column j as an ancestor, or is it; else 0.

    It has no boolean: Triton 3.9 cannot move booleans to the layout of a matrix product.

    Args:
        mask: `Tree.mask` from the request's first row on.
        row, column: rows of the tail, int32 ``[16]``; the columns are a block of 16.
        count: rows of the request.
    """
    row, column = row[:, None], column[None, :]
    found = ((row - count) >> 31) & ~((row - column) >> 31) & 1
    if tree != 0:
        at = mask + row.to(tl.int64) * mask_words + column // 32
        found = found & (tl.load(at, mask=(row < count) & (column <= row), other=0) >> (column % 32))
    return found


@inline
def logs_of(at_decay, row, live, stride_decay_row):
    """Return the log decays of 16 rows, ``[16]``."""
    return tl.load(at_decay + row.to(tl.int64) * stride_decay_row, mask=live, other=0.0)


@inline
def totals_of(at_mask, at_decay, block, count, tree, mask_words, stride_decay_row):
    """Return log G of the rows of a block: the sums of their ancestors' log decays, ``[16]``."""
    row = tl.arange(0, ROWS) + block * ROWS
    found = tl.full((ROWS,), 0, tl.float32)
    for other in range(0, bound(block + 1)):
        column = tl.arange(0, ROWS) + other * ROWS
        logs = logs_of(at_decay, column, column < count, stride_decay_row)
        seen = sees(at_mask, row, column, count, tree, mask_words)
        found += total(tl.where(seen != 0, logs[None, :], 0.0), 1)
    return found


@inline
def ratios(left_total, right_total, seen):
    """Return ``G_t/G_j`` for rows t of the left block and their ancestors j in the right one, and 0 for other rows."""
    return tl.exp(tl.where(seen != 0, left_total[:, None] - right_total[None, :], float("-inf")))


@inline
def blocks_of(pair):
    """Return the blocks of rows and columns of a pair: pair = block · (block + 1) / 2 + other."""
    block, other = pair * 0, pair
    while other > block:
        block += 1
        other -= block
    return block, other


@inline
def store_matrices(
    at, among_keys, among_queries, at_beta, stride_beta_row, block, other, row, column, count, width,
    DELTA: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Store the matrices of a pair of blocks; on the diagonal the first one is ``(I + β K)⁻¹ β``."""
    if DELTA and block == other:
        strength = tl.load(at_beta + row * stride_beta_row, mask=row < count, other=0.0)
        below = tl.where(column[None, :] < row[:, None], among_keys * strength[:, None], 0.0)
        strength = tl.load(at_beta + column * stride_beta_row, mask=column < count, other=0.0)
        among_keys = inverse(below, PRECISE) * strength[None, :]
    to_row, to_column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    inside = (to_row < width) & (to_column < width)
    if DELTA:
        tl.store(at + to_row * width + to_column, among_keys, mask=inside)
    tl.store(at + width * width + to_row * width + to_column, among_queries, mask=inside)


@triton.jit(
    do_not_specialize=["first_entry", "nodes", "width", "mask_words", "tree", "layer"],
    do_not_specialize_on_alignment=["log_decay", "beta", "q_indptr", "mask"],
)
def verify_pairs(
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
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    CONSTANT: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one pair of row blocks of one request, for HEADS heads of one key head, and record keys and decays.

    Args:
        q, k, log_decay, beta: as in `StateBackend.recur`; a constant decay has row stride 0.
        q_indptr: field of the batch.
        mask: int32 ``[num_rows, mask_words]``, `Tree.mask`, read if `tree` is 1. Otherwise the rows are a chain.
        keys, decays: records of all layers, ``[num_layers · max_reqs, nodes, heads, elements]``; decays are
            ``[num_layers, heads]`` if CONSTANT.
        totals: ``[max_reqs, nodes, heads]``, log G of each row.
        matrices: ``[max_reqs, heads, pairs, 2, width, width]``, out. Pair b · (b + 1) / 2 + a has rows of block b and
            columns of block a.
        first_entry: layer · max_reqs, the record entry of request 0.
        nodes, width: D, and min(D, 16).
        HEADS: heads of a program, a divisor of HEADS_PER_KEY; they share the products of keys and queries.
        PRECISE: see `product`.
        BLOCK_K: KEY_DIM rounded up to a power of two.
        ONE_BLOCK: no request has more than 16 rows.
        PDL: the next launch is a programmatic dependent, which waits for this grid before it reads what it writes.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair, first_head, request = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    heads, key_head = tl.num_programs(1) * HEADS, first_head // HEADS_PER_KEY
    if CONSTANT and (request == 0) & (pair == 0):
        for each in tl.static_range(HEADS):
            at_decay = log_decay + (first_head + each) * stride_decay_head
            tl.store(decays + layer * heads + first_head + each, tl.load(at_decay))
    block, other = blocks_of(pair)
    first, last = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    count = (last - first).to(tl.int32)
    if block * ROWS < count:
        key = tl.arange(0, BLOCK_K)
        k_inside = key < KEY_DIM
        row, column = tl.arange(0, ROWS) + block * ROWS, tl.arange(0, ROWS) + other * ROWS
        line, live = row.to(tl.int64)[:, None], row < count
        at_q = q + first * stride_q_row + key_head * stride_q_head + key[None, :]
        at_k = k + first * stride_k_row + key_head * stride_k_head
        at_mask, entry = mask + first * mask_words, (first_entry + request) * nodes
        k_live = live[:, None] & k_inside[None, :]
        row_k = tl.load(at_k + line * stride_k_row + key[None, :], mask=k_live, other=0.0)
        row_q = tl.load(at_q + line * stride_q_row, mask=k_live, other=0.0)
        column_k = row_k
        if (block == other) & (first_head % HEADS_PER_KEY == 0):
            kept = ((entry + line) * (heads // HEADS_PER_KEY) + key_head) * KEY_DIM + key[None, :]
            tl.store(keys + kept, row_k, mask=k_live)
        if not ONE_BLOCK:
            here = (column < count)[:, None] & k_inside[None, :]
            column_k = tl.load(at_k + column.to(tl.int64)[:, None] * stride_k_row + key[None, :], mask=here, other=0.0)
        seen, nothing = sees(at_mask, row, column, count, tree, mask_words), tl.full((ROWS, ROWS), 0, tl.float32)
        column_k = tl.trans(column_k)
        all_keys, all_queries = dot(row_k, column_k, nothing), dot(row_q, column_k, nothing)
        for each in tl.static_range(HEADS):
            head = first_head + each
            at_decay = log_decay + head * stride_decay_head + first * stride_decay_row
            of_row = totals_of(at_mask, at_decay, block, count, tree, mask_words, stride_decay_row)
            of_column = of_row
            if not ONE_BLOCK:
                of_column = totals_of(at_mask, at_decay, other, count, tree, mask_words, stride_decay_row)
            if block == other:
                if not CONSTANT:
                    logs = logs_of(at_decay, row, live, stride_decay_row)
                    tl.store(decays + (entry + row) * heads + head, logs, mask=live)
                tl.store(totals + (request * nodes + row) * heads + head, of_row, mask=live)
            ratio = ratios(of_row, of_column, seen)
            at = matrices + ((request * heads + head) * tl.num_programs(0) + pair) * 2 * width * width
            store_matrices(
                at, all_keys * ratio, all_queries * ratio, beta + first * stride_beta_row + head, stride_beta_row,
                block, other, row, column, count, width, DELTA, PRECISE,
            )  # fmt: skip
