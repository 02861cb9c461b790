"""Recurrence of a verify on Hopper: `kernels.state_verify` with the state tile in shared memory.

A program copies its tile of the state, and the keys and queries of 16 rows, by cp.async, 16 bytes a thread. So no
register holds a byte that is on its way, and four programs of 40 KiB fit on an SM. Matrix products read the tile in the
layout of their operands, 16 bytes a thread; the products of a row with the state are exact (see `state_times`).
Example: 64 requests of 8 rows, 32 heads, 128 x 128, float32: 134 MB of states, 25 MB of rows and records: 39 µs at
4.1 TB/s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .gluon_compat import cp_async, thread_barrier
from .pipeline import grid_dependency_wait
from .state_commit import copy_layout

ROWS = gl.constexpr(16)
"""Rows of a block of a verify."""


@gluon.constexpr_function
def products_layout(warps):
    """Return the layout of ``[16 · warps, 16]`` products: each warp has 16 value elements."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def swizzled(elements):
    """Return a shared layout of rows, copied `elements` at a time, from which operands load without bank conflicts."""
    return gl.SwizzledSharedLayout(16, 1, 2 if elements == 4 else 4, [1, 0])


@gluon.jit
def leading(x):
    """Return float32 numbers cut to the 11 bits that a tf32 product reads."""
    return (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def product(a, b, acc):
    """Return ``a · b + acc`` of float32 operands in three tf32 products; see `kernels.state_products.product`."""
    a_high, b_high = leading(a), leading(b)
    acc = mma_v2(a - a_high, b_high, acc, input_precision="tf32")
    acc = mma_v2(a_high, b - b_high, acc, input_precision="tf32")
    return mma_v2(a_high, b_high, acc, input_precision="tf32")


@gluon.jit
def copy_rows(target, at, stride, block, count, key, row):
    """Start the copy of 16 rows of keys or queries; rows after the last one become zeros."""
    row = row + block * ROWS
    cp_async(target, at + row.to(gl.int64)[:, None] * stride + key[None, :], mask=(row < count)[:, None])


@gluon.jit
def load_rows(at, stride, block, count, key, row):
    """Return 16 rows of `KEY_DIM` elements; rows after the last one are zeros."""
    row = row + block * ROWS
    return gl.load(at + row.to(gl.int64)[:, None] * stride + key[None, :], mask=(row < count)[:, None], other=0.0)


@gluon.jit
def matrix_of(at, width, layout: gl.constexpr):
    """Return a matrix of a pair of blocks, transposed, as an operand."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    column = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    return gl.load(at + row * width + column, mask=(row < width) & (column < width), other=0.0)


@gluon.jit
def parts_times(part, own, found, PARTS: gl.constexpr):
    """Return ``part · own + found``: a state element is PARTS bfloat16 numbers; 0: the rows are float32."""
    if PARTS == 0:
        return product(part.to(gl.float32), own, found)
    elif PARTS == 1:
        return mma_v2(part.to(gl.bfloat16), own, found)
    else:
        part = part.to(gl.float32)
        for _ in gl.static_range(PARTS):
            bits = part.to(gl.int32, bitcast=True)
            found = mma_v2((bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), own, found)
            part -= (bits & -65536).to(gl.float32, bitcast=True)
        return found


@gluon.jit
def times_rows(
    held, keys, queries, DELTA: gl.constexpr, PARTS: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return ``held · keysᵀ`` and ``held · queriesᵀ`` from shared memory, 32 key elements at a time."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    CHUNK: gl.constexpr = 32
    of_keys = gl.zeros([BLOCK_V, ROWS], gl.float32, layout)
    of_queries = gl.zeros([BLOCK_V, ROWS], gl.float32, layout)
    for chunk in gl.static_range(BLOCK_K // CHUNK):
        part = held.slice(chunk * CHUNK, CHUNK, dim=1).load(left)
        if DELTA:
            own = keys.slice(chunk * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right)
            of_keys = parts_times(part, own, of_keys, PARTS)
        own = queries.slice(chunk * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right)
        of_queries = parts_times(part, own, of_queries, PARTS)
    return of_keys, of_queries


@gluon.jit(
    do_not_specialize=["num_rows", "first_entry", "nodes", "width", "pairs"],
    do_not_specialize_on_alignment=["slots", "prefix_lens", "q_indptr"],
)
def recur_verify(
    q,
    k,
    v,
    state,
    slots,
    prefix_lens,
    q_indptr,
    out,
    updates,
    totals,
    matrices,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_slot,
    num_rows,
    first_entry,
    nodes,
    width,
    pairs,
    HEADS_PER_KEY: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    DELTA: gl.constexpr,
    KEY_GATE: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_V: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Compute the rows of one request and head for BLOCK_V value elements, and record their updates.

    The arguments are those of `kernels.state_verify.recur_verify`. KEY_DIM is a power of two from 32 on, VALUE_DIM is a
    multiple of BLOCK_V = 16 · num_warps, and rows are bfloat16. A decay for each key element (KEY_GATE) is multiplied
    into the keys and queries as they are loaded; they are then float32 in shared memory.

    Args:
        BLOCKS: blocks of 16 rows that a request has at most.
        PARTS: see `parts_times`.
    """
    layout: gl.constexpr = products_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    per_state: gl.constexpr = 16 // (state.dtype.element_ty.primitive_bitwidth // 8)
    of_state: gl.constexpr = copy_layout(KEY_DIM, per_state, WARPS)
    of_rows: gl.constexpr = copy_layout(KEY_DIM, 8, WARPS)
    head, request = gl.program_id(1), gl.program_id(2).to(gl.int64)
    heads, key_head = gl.num_programs(1), head // HEADS_PER_KEY
    first, last = gl.load(q_indptr + request).to(gl.int64), gl.load(q_indptr + request + 1).to(gl.int64)
    slot, has_prefix = gl.load(slots + request).to(gl.int64), gl.load(prefix_lens + request) > 0
    count = (last - first).to(gl.int32)
    first_value = gl.program_id(0) * BLOCK_V
    value = first_value + gl.arange(0, BLOCK_V, gl.SliceLayout(1, layout))
    if count > 0:
        held = gl.allocate_shared_memory(state.dtype.element_ty, [BLOCK_V, KEY_DIM], swizzled(per_state))
        row_type: gl.constexpr = gl.float32 if KEY_GATE else k.dtype.element_ty
        of_shared: gl.constexpr = swizzled(4 if KEY_GATE else 8)
        keys = gl.allocate_shared_memory(row_type, [ROWS, KEY_DIM], of_shared)
        queries = gl.allocate_shared_memory(row_type, [ROWS, KEY_DIM], of_shared)
        at_state = state + slot * stride_slot + (head.to(gl.int64) * VALUE_DIM + first_value) * KEY_DIM
        line = gl.arange(0, BLOCK_V, gl.SliceLayout(1, of_state))
        key = gl.arange(0, KEY_DIM, gl.SliceLayout(0, of_state))
        at_state = at_state + line[:, None] * KEY_DIM + key[None, :]
        cp_async(held, at_state, mask=has_prefix & (line < BLOCK_V)[:, None])
        row_key = gl.arange(0, KEY_DIM, gl.SliceLayout(0, of_rows))
        row_line = gl.arange(0, ROWS, gl.SliceLayout(1, of_rows))
        at_q = q + first * stride_q_row + key_head * stride_q_head
        at_k = k + first * stride_k_row + key_head * stride_k_head
        at_v = v + first * stride_v_row + head * stride_v_head + value[:, None]
        at_update = updates + ((first_entry + request) * nodes * heads + head) * VALUE_DIM + value[:, None]
        at_out = out + (first * heads + head) * VALUE_DIM + value[:, None]
        GATES: gl.constexpr = KEY_DIM if KEY_GATE else 1
        at_total = totals + (request * nodes * heads + head) * GATES
        at_matrix = matrices + (request * heads + head) * pairs * 2 * width * width
        if BLOCKS > 1:
            solved = gl.allocate_shared_memory(
                gl.float32, [BLOCKS, BLOCK_V, ROWS], gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
            )
        blocks = count * 0 + 1
        if BLOCKS > 1:
            blocks = (count + ROWS - 1) // ROWS
        for block in range(0, blocks):
            if BLOCKS > 1:
                thread_barrier()  # every thread has read the previous block's rows
            if KEY_GATE:
                own_k = load_rows(at_k, stride_k_row, block, count, row_key, row_line)
                own_q = load_rows(at_q, stride_q_row, block, count, row_key, row_line)
            else:
                if DELTA:
                    copy_rows(keys, at_k, stride_k_row, block, count, row_key, row_line)
                copy_rows(queries, at_q, stride_q_row, block, count, row_key, row_line)
            async_copy.commit_group()
            row = gl.arange(0, ROWS, gl.SliceLayout(0, layout)) + block * ROWS
            across, live = row.to(gl.int64)[None, :], (row < count)[None, :]
            update = gl.load(at_v + across * stride_v_row, mask=live, other=0.0)
            if not DELTA:
                gl.store(at_update + across * (heads * VALUE_DIM), update, mask=live)
            update = update.to(gl.float32)
            grid_dependency_wait()
            if KEY_GATE:
                logs = load_rows(at_total, heads * KEY_DIM, block, count, row_key, row_line)
                keys.store(own_k.to(gl.float32) * gl.exp(logs))
                queries.store(own_q.to(gl.float32) * gl.exp(logs))
            else:
                decay = gl.exp(gl.load(at_total + row * heads, mask=row < count, other=0.0))[None, :]
            pair = at_matrix + block * (block + 1) // 2 * 2 * width * width
            own = pair + block * 2 * width * width
            among_queries = matrix_of(own + width * width, width, right)
            if DELTA:
                solve = matrix_of(own, width, right)
            async_copy.wait_group(0)
            thread_barrier()
            of_keys, found = times_rows(held, keys, queries, DELTA, PARTS, BLOCK_V, KEY_DIM, layout)
            if not KEY_GATE:
                found *= decay
                of_keys *= decay
            if DELTA:
                update -= of_keys
            if BLOCKS > 1:
                for other in range(0, block):
                    earlier = solved.index(other).load(left)
                    at = pair + other * 2 * width * width
                    found = product(earlier, matrix_of(at + width * width, width, right), found)
                    if DELTA:
                        update = product(earlier, -matrix_of(at, width, right), update)
            if DELTA:
                update = product(gl.convert_layout(update, left), solve, gl.zeros([BLOCK_V, ROWS], gl.float32, layout))
                gl.store(at_update + across * (heads * VALUE_DIM), update, mask=live)
            found = product(gl.convert_layout(update, left), among_queries, found)
            gl.store(at_out + across * (heads * VALUE_DIM), found.to(out.dtype.element_ty), mask=live)
            if BLOCKS > 1:
                solved.index(block).store(update)
    # A program without rows waits too: the grid must not end before the grid of the matrices.
    grid_dependency_wait()
    padding = gl.load(q_indptr + gl.num_programs(2)).to(gl.int64) + request
    while padding < num_rows:  # each program writes every R-th padding row
        nothing = gl.zeros([BLOCK_V], out.dtype.element_ty, gl.SliceLayout(1, layout))
        gl.store(out + (padding * heads + head) * VALUE_DIM + value, nothing)
        padding += gl.num_programs(2)
