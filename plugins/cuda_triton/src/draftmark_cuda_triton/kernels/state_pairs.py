"""Products among the rows of a verify, which all value elements of a head share: one matrix for u and one for o.

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
def logs_of(at_decay, row, live, key, k_inside, stride_decay_row, KEY_GATE: tl.constexpr):
    """Return the log decays of 16 rows, ``[16]`` or ``[16, BLOCK_K]``."""
    at = at_decay + row.to(tl.int64) * stride_decay_row
    if KEY_GATE:
        return tl.load(at[:, None] + key[None, :], mask=live[:, None] & k_inside[None, :], other=0.0)
    else:
        return tl.load(at, mask=live, other=0.0)


@inline
def sum_of_logs(seen, logs, KEY_GATE: tl.constexpr, PRECISE: tl.constexpr):
    """Return the sum of the log decays of the ancestors of each row, ``[16]`` or ``[16, BLOCK_K]``."""
    if KEY_GATE:
        return product(seen.to(tl.float32), logs, PRECISE)
    else:
        return total(tl.where(seen != 0, logs[None, :], 0.0), 1)


@inline
def totals_of(
    at_mask,
    at_decay,
    block,
    count,
    tree,
    mask_words,
    key,
    k_inside,
    stride_decay_row,
    BLOCK_K: tl.constexpr,
    KEY_GATE: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Return log G of the rows of a block: the sums of their ancestors' log decays, ``[16]`` or ``[16, BLOCK_K]``."""
    row = tl.arange(0, ROWS) + block * ROWS
    found = tl.full((ROWS, BLOCK_K), 0, tl.float32) if KEY_GATE else tl.full((ROWS,), 0, tl.float32)
    for other in range(0, bound(block + 1)):
        column = tl.arange(0, ROWS) + other * ROWS
        logs = logs_of(at_decay, column, column < count, key, k_inside, stride_decay_row, KEY_GATE)
        seen = sees(at_mask, row, column, count, tree, mask_words)
        found += sum_of_logs(seen, logs, KEY_GATE, PRECISE)
    return found


@inline
def pairs(left_k, left_q, left_total, right_k, right_total, seen):
    """Return ``(G_t/G_j) k_j · k_t`` and ``(G_t/G_j) k_j · q_t`` of two blocks, ``[16, 16]``, with a decay per head.

    Args:
        left_k, left_q, right_k: ``[16, BLOCK_K]``.
        left_total, right_total: ``[16]``, log G of each row.
        seen: rows t of the left block and the ancestors j in the right one.
    """
    ratio = tl.exp(tl.where(seen != 0, left_total[:, None] - right_total[None, :], float("-inf")))
    nothing, right_k = tl.full((ROWS, ROWS), 0, tl.float32), tl.trans(right_k)
    return dot(left_k, right_k, nothing) * ratio, dot(left_q, right_k, nothing) * ratio


@inline
def pairs_by_key(left_k, left_q, left_total, at_k, at_total, stride_k, stride_total, first, end, key, k_inside, seen):
    """Return the products of `pairs` with a decay per key: one column at a time, so that no factor exceeds 1.

    Args:
        left_total: ``[16, BLOCK_K]``.
        at_k, at_total: addresses of the request's keys and of the written totals, by row.
        first, end: first row of the right block, and rows of the request.
    """
    column = tl.arange(0, ROWS)[None, :]
    among_keys = tl.full((ROWS, ROWS), 0, tl.float32)
    among_queries = tl.full((ROWS, ROWS), 0, tl.float32)
    for j in range(0, bound(tl.minimum(end - first, ROWS))):
        right_k = tl.load(at_k + (first + j) * stride_k + key, mask=k_inside, other=0.0).to(tl.float32)
        right_total = tl.load(at_total + (first + j) * stride_total + key, mask=k_inside, other=0.0)
        # A row that does not see j may have a larger total; its product is masked.
        decayed = tl.exp(tl.minimum(left_total - right_total[None, :], 0.0)) * right_k[None, :]
        of_keys, of_queries = total(left_k * decayed, 1), total(left_q * decayed, 1)
        here = (seen != 0) & (column == j)
        among_keys += tl.where(here, of_keys[:, None], 0.0)
        among_queries += tl.where(here, of_queries[:, None], 0.0)
    return among_keys, among_queries


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
    KEY_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    KEY_GATE: tl.constexpr,
    CONSTANT: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one pair of row blocks of one request and head, and record keys and decays.

    Args:
        q, k, log_decay, beta: as in `StateBackend.recur`; a constant decay has row stride 0.
        q_indptr: field of the batch.
        mask: int32 ``[num_rows, mask_words]``, `Tree.mask`, read if `tree` is 1. Otherwise the rows are a chain.
        keys, decays: records of all layers, ``[num_layers · max_reqs, nodes, heads, elements]``; decays are
            ``[num_layers, heads]`` if CONSTANT.
        totals: ``[max_reqs, nodes, heads (, KEY_DIM)]``, log G of each row.
        matrices: ``[max_reqs, heads, pairs, 2, width, width]``, out. Pair b · (b + 1) / 2 + a has rows of block b and
            columns of block a.
        first_entry: layer · max_reqs, the record entry of request 0.
        nodes, width: D, and min(D, 16).
        PRECISE: see `product`.
        BLOCK_K: KEY_DIM rounded up to a power of two.
    """
    pair, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, key_head = tl.num_programs(1), head // HEADS_PER_KEY
    at_decay = log_decay + head * stride_decay_head
    if CONSTANT and (request == 0) & (pair == 0):
        tl.store(decays + layer * heads + head, tl.load(at_decay))
    block, other = pair * 0, pair
    while other > block:  # pair = block · (block + 1) / 2 + other
        block += 1
        other -= block
    first, last = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    count = (last - first).to(tl.int32)
    if block * ROWS < count:
        key = tl.arange(0, BLOCK_K)
        k_inside = key < KEY_DIM
        row, column = tl.arange(0, ROWS) + block * ROWS, tl.arange(0, ROWS) + other * ROWS
        line, live = row.to(tl.int64)[:, None], row < count
        at_q = q + first * stride_q_row + key_head * stride_q_head + key[None, :]
        at_k = k + first * stride_k_row + key_head * stride_k_head
        at_decay += first * stride_decay_row
        at_mask = mask + first * mask_words
        k_live = live[:, None] & k_inside[None, :]
        row_k = tl.load(at_k + line * stride_k_row + key[None, :], mask=k_live, other=0.0)
        row_q = tl.load(at_q + line * stride_q_row, mask=k_live, other=0.0)
        of_row = totals_of(
            at_mask, at_decay, block, count, tree, mask_words, key, k_inside, stride_decay_row, BLOCK_K, KEY_GATE,
            PRECISE,
        )  # fmt: skip
        entry = (first_entry + request) * nodes
        GATES: tl.constexpr = KEY_DIM if KEY_GATE else 1
        at_total = totals + (request * nodes * heads + head) * GATES
        if block == other:
            if head % HEADS_PER_KEY == 0:
                kept = ((entry + line) * (heads // HEADS_PER_KEY) + key_head) * KEY_DIM + key[None, :]
                tl.store(keys + kept, row_k, mask=k_live)
            logs = logs_of(at_decay, row, live, key, k_inside, stride_decay_row, KEY_GATE)
            if KEY_GATE:
                tl.store(decays + ((entry + line) * heads + head) * KEY_DIM + key[None, :], logs, mask=k_live)
                tl.store(at_total + line * (heads * KEY_DIM) + key[None, :], of_row, mask=k_live)
            else:
                if not CONSTANT:
                    tl.store(decays + (entry + row) * heads + head, logs, mask=live)
                tl.store(at_total + row * heads, of_row, mask=live)
        seen = sees(at_mask, row, column, count, tree, mask_words)
        of_column = totals_of(
            at_mask, at_decay, other, count, tree, mask_words, key, k_inside, stride_decay_row, BLOCK_K, KEY_GATE,
            PRECISE,
        )  # fmt: skip
        across = column.to(tl.int64)[:, None]
        if KEY_GATE:
            # The diagonal program of the columns' block writes the same totals.
            here = (column < count)[:, None] & k_inside[None, :]
            tl.store(at_total + across * (heads * KEY_DIM) + key[None, :], of_column, mask=here)
            tl.debug_barrier()
            among_keys, among_queries = pairs_by_key(
                row_k.to(tl.float32), row_q.to(tl.float32), of_row, at_k, at_total, stride_k_row, heads * KEY_DIM,
                other * ROWS, count, key, k_inside, seen,
            )  # fmt: skip
        else:
            here = (column < count)[:, None] & k_inside[None, :]
            column_k = tl.load(at_k + across * stride_k_row + key[None, :], mask=here, other=0.0)
            among_keys, among_queries = pairs(row_k, row_q, of_row, column_k, of_column, seen)
        if DELTA and block == other:
            strength = tl.load(beta + (first + row) * stride_beta_row + head, mask=live, other=0.0)
            below = tl.where(column[None, :] < row[:, None], among_keys * strength[:, None], 0.0)
            strength = tl.load(beta + (first + column) * stride_beta_row + head, mask=column < count, other=0.0)
            among_keys = inverse(below, PRECISE) * strength[None, :]
        size = width * width
        to_row, to_column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
        at = matrices + ((request * heads + head) * tl.num_programs(0) + pair) * 2 * size + to_row * width + to_column
        inside = (to_row < width) & (to_column < width)
        if DELTA:
            tl.store(at, among_keys, mask=inside)
        tl.store(at + size, among_queries, mask=inside)
