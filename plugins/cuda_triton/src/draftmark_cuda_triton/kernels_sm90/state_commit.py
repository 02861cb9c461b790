"""Commit of a round on Hopper: `kernels.state_commit` with the records of a path in shared memory.

A program loads its tile of a slot into registers, 16 bytes a thread, and meanwhile copies the keys, updates and decays
of 16 rows of the path by cp.async. So a path of 16 rows costs one round trip to memory, and not one for each row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .gluon_compat import cp_async, reinterpret, thread_barrier

ROWS = gl.constexpr(16)
"""Rows of a path that are in shared memory together."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Shared layouts of the records: as a tile, and as an array of rows."""


@gluon.constexpr_function
def tile_layout(block_v, key_dim, warps):
    """Return the layout of a state tile: a warp has whole rows, and a thread four key elements of each."""
    lanes = min(32, key_dim // 4)
    return gl.BlockedLayout([block_v * lanes // (32 * warps), 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def copy_layout(columns, elements, warps):
    """Return the layout of a copy of rows of `columns` elements, `elements` of them a thread."""
    lanes = min(32, columns // elements)
    return gl.BlockedLayout([1, elements], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def copy_records(target, records, path, rows, width, first, ELEMENTS: gl.constexpr, WARPS: gl.constexpr):
    """Start the copy of the records of up to 16 rows of a path; `width` elements lie between two rows' records."""
    layout: gl.constexpr = copy_layout(target.shape[1], ELEMENTS, WARPS)
    line = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.load(path + line, mask=line < rows, other=0)
    column = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    cp_async(target, records + row[:, None] * width + (first + column)[None, :], mask=(line < rows)[:, None])


@gluon.jit
def column_after(
    window, stride_column, channels, path, count, channel, column, live, has_prefix, NUM_CHANNELS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Return the inputs in a window's columns after `count` rows of a path: old columns first, then rows."""
    source = count + column
    old = live & (source < COLUMNS)
    kept = gl.load(window + source * stride_column, mask=old & has_prefix, other=0.0)
    newer = live & (source >= COLUMNS)
    row = gl.load(path + source - COLUMNS, mask=newer, other=0)
    return gl.where(old, kept, gl.load(channels + row * NUM_CHANNELS + channel, mask=newer, other=0.0))


@gluon.jit(
    do_not_specialize=["null_slots", "max_reqs", "nodes", "interval", "saves"],
    do_not_specialize_on_alignment=[
        "prefix_lens", "q_indptr", "slots", "save_slots", "accept_lens", "accept_index",
    ],
)  # fmt: skip
def commit_rows(
    state,
    conv,
    slots,
    save_slots,
    prefix_lens,
    q_indptr,
    accept_lens,
    accept_index,
    keys,
    updates,
    decays,
    channels,
    stride_layer,
    stride_slot,
    stride_conv_layer,
    stride_conv_slot,
    stride_channel,
    stride_column,
    null_slots,
    max_reqs,
    nodes,
    interval,
    saves,
    HEADS: gl.constexpr,
    HEADS_PER_KEY: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    KEY_GATE: gl.constexpr,
    CONSTANT: gl.constexpr,
    NUM_CHANNELS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_V: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Commit one request in one layer: a tile of one head's state, or the windows of some channels.

    The arguments are those of `kernels.state_commit.commit_rows` with a path. KEY_DIM is a power of two from 32 on, and
    VALUE_DIM a multiple of BLOCK_V.
    """
    V_TILES: gl.constexpr = VALUE_DIM // BLOCK_V
    PER_PROGRAM: gl.constexpr = BLOCK // max(1, COLUMNS)
    part, request, layer = gl.program_id(0), gl.program_id(1).to(gl.int64), gl.program_id(2).to(gl.int64)
    length, rows = gl.load(prefix_lens + request), gl.load(q_indptr + request + 1) - gl.load(q_indptr + request)
    slot, save = gl.load(slots + request).to(gl.int64), gl.load(save_slots + request).to(gl.int64)
    # verify_tree counts the root of a request without rows too.
    count = gl.minimum(gl.load(accept_lens + request), rows).to(gl.int32)
    reached = (length + count) // interval * interval
    is_saved = (saves != 0) & (save >= null_slots) & (reached > length)
    before_save, has_prefix = reached - length, length > 0
    moves = (count > 0) & (slot >= null_slots)
    if moves | is_saved:
        entry = (layer * max_reqs + request) * nodes
        path = accept_index + request * nodes
        if part < HEADS * V_TILES:
            tile: gl.constexpr = tile_layout(BLOCK_V, KEY_DIM, WARPS)
            key_heads: gl.constexpr = HEADS // HEADS_PER_KEY
            head, first_value = part // V_TILES, part % V_TILES * BLOCK_V
            value = first_value + gl.arange(0, BLOCK_V, gl.SliceLayout(1, tile))
            key = gl.arange(0, KEY_DIM, gl.SliceLayout(0, tile))
            place = state + layer * stride_layer + head * (VALUE_DIM * KEY_DIM)
            place += value[:, None] * KEY_DIM + key[None, :]
            held = gl.load(place + slot * stride_slot, mask=has_prefix & (value < VALUE_DIM)[:, None], other=0.0)
            per_key: gl.constexpr = 16 // (keys.dtype.element_ty.primitive_bitwidth // 8)
            per_update: gl.constexpr = 16 // (updates.dtype.element_ty.primitive_bitwidth // 8)
            kept_keys = gl.allocate_shared_memory(keys.dtype.element_ty, [ROWS, KEY_DIM], PLAIN)
            kept_updates = gl.allocate_shared_memory(updates.dtype.element_ty, [ROWS, BLOCK_V], PLAIN)
            DECAYS: gl.constexpr = KEY_DIM if KEY_GATE else BLOCK_V
            kept_decays = gl.allocate_shared_memory(gl.float32, [ROWS, DECAYS], PLAIN)
            at_keys = keys + (entry * key_heads + head // HEADS_PER_KEY) * KEY_DIM
            at_updates = updates + entry * HEADS * VALUE_DIM + head * VALUE_DIM
            at_decays = decays + (layer if CONSTANT else entry) * HEADS * (KEY_DIM if KEY_GATE else 1)
            at_decays += head * (KEY_DIM if KEY_GATE else 1)
            held = held.to(gl.float32)
            for begin in range(0, count, ROWS):
                inside = gl.minimum(count - begin, ROWS)
                if begin > 0:
                    thread_barrier()  # every thread has read the previous rows' records
                copy_records(kept_keys, at_keys, path + begin, inside, key_heads * KEY_DIM, 0, per_key, WARPS)
                copy_records(
                    kept_updates, at_updates, path + begin, inside, HEADS * VALUE_DIM, first_value, per_update, WARPS
                )
                if KEY_GATE:
                    copy_records(kept_decays, at_decays, path + begin, inside, HEADS * KEY_DIM, 0, 4, WARPS)
                else:
                    spread: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
                    line = gl.arange(0, ROWS, gl.SliceLayout(1, spread))
                    if CONSTANT:
                        decay = gl.load(at_decays + line * 0)
                    else:
                        row = gl.load(path + begin + line, mask=line < inside, other=0)
                        decay = gl.load(at_decays + row * HEADS, mask=line < inside, other=0.0)
                    column = gl.arange(0, DECAYS, gl.SliceLayout(0, spread))
                    kept_decays.store(decay[:, None] + (column * 0).to(gl.float32)[None, :])
                async_copy.commit_group()
                async_copy.wait_group(0)
                thread_barrier()
                of_keys = reinterpret(kept_keys, keys.dtype.element_ty, [ROWS, KEY_DIM], LINES)
                of_updates = reinterpret(kept_updates, updates.dtype.element_ty, [ROWS, BLOCK_V], LINES)
                of_decays = reinterpret(kept_decays, gl.float32, [ROWS, DECAYS], LINES)
                for j in range(0, inside):
                    row_k = of_keys.index(j).load(gl.SliceLayout(0, tile)).to(gl.float32)
                    update = of_updates.index(j).load(gl.SliceLayout(1, tile)).to(gl.float32)
                    if KEY_GATE:
                        held *= gl.exp(of_decays.index(j).load(gl.SliceLayout(0, tile)))[None, :]
                    else:
                        held *= gl.exp(of_decays.index(j).load(gl.SliceLayout(1, tile)))[:, None]
                    held += update[:, None] * row_k[None, :]
                    if is_saved & (begin + j + 1 == before_save):
                        gl.store(place + save * stride_slot, held.to(state.dtype.element_ty))
            if moves:
                gl.store(place + slot * stride_slot, held.to(state.dtype.element_ty))
        elif COLUMNS > 0:
            flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            element = gl.arange(0, BLOCK, flat)
            channel = (part - HEADS * V_TILES) * PER_PROGRAM + element // COLUMNS
            column = element % COLUMNS
            live = (element < PER_PROGRAM * COLUMNS) & (channel < NUM_CHANNELS)
            windows = conv + layer * stride_conv_layer + channel.to(gl.int64) * stride_channel
            window, at = windows + slot * stride_conv_slot, column * stride_column
            records = channels + entry * NUM_CHANNELS
            if is_saved:
                new = column_after(
                    window, stride_column, records, path, before_save, channel, column, live, has_prefix,
                    NUM_CHANNELS, COLUMNS,
                )  # fmt: skip
                gl.store(windows + save * stride_conv_slot + at, new, mask=live)
            if moves:
                new = column_after(
                    window, stride_column, records, path, count, channel, column, live, has_prefix, NUM_CHANNELS,
                    COLUMNS,
                )  # fmt: skip
                thread_barrier()  # other threads of this program have read the columns that are written
                gl.store(window + at, new, mask=live)
