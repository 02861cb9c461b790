"""Commit of a round in every layer at once: states and windows over the accepted paths, and checkpoints.

A program reads its tile of a slot once, adds the updates of the accepted rows, and writes the tile once, and to the
checkpoint's slot too if the path crosses its length. Example: 36 layers, 64 requests, 32 heads, 128 x 128, float32:
4.8 GB read and 4.8 GB written take 2.4 ms at 4.0 TB/s.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import bound, inline
from .state_tile import tile_of


@inline
def lengths_of(
    request, prefix_lens, q_indptr, accept_lens, slots, save_slots, interval, saves, null_slots, PATH: tl.constexpr
):
    """Return the rows that a request commits, the rows up to its checkpoint, whether each is written, and its slots.

    Without a path the slot has moved already. Then the checkpoint is the slot itself, if it ends there.
    """
    length, rows = tl.load(prefix_lens + request), tl.load(q_indptr + request + 1) - tl.load(q_indptr + request)
    slot, save = tl.load(slots + request).to(tl.int64), tl.load(save_slots + request).to(tl.int64)
    moved = rows
    if PATH:
        # verify_tree counts the root of a request without rows too.
        moved = tl.minimum(tl.load(accept_lens + request), rows).to(tl.int32)
    reached = (length + moved) // interval * interval
    is_saved = (saves != 0) & (save >= null_slots) & (reached > length)
    if PATH:
        return moved, reached - length, (moved > 0) & (slot >= null_slots), is_saved, slot, save, length > 0
    else:
        return moved * 0, moved * 0, moved < 0, is_saved & (reached == length + moved), slot, save, length >= 0


@inline
def after_rows(
    held, begin, end, path, keys, updates, decays, heads, key_heads, head, key_head, value, key, v_inside, k_inside,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_GATE: tl.constexpr, CONSTANT: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Return a state tile after rows ``begin … end - 1`` of a path, from the records of one layer and request."""
    for first in range(bound(begin), bound(end), UNROLL):
        for step in tl.static_range(UNROLL):
            live = first + step < end
            row = tl.load(path + first + step, mask=live, other=0)
            row_k = tl.load(keys + (row * key_heads + key_head) * KEY_DIM + key, mask=live & k_inside, other=0.0)
            update = tl.load(updates + (row * heads + head) * VALUE_DIM + value, mask=live & v_inside, other=0.0)
            if CONSTANT:
                decay = tl.load(decays + head, mask=live, other=0.0)
            elif KEY_GATE:
                decay = tl.load(decays + (row * heads + head) * KEY_DIM + key, mask=live & k_inside, other=0.0)
            else:
                decay = tl.load(decays + row * heads + head, mask=live, other=0.0)
            held = held * tl.exp(decay) + update.to(tl.float32)[None, :, None] * row_k.to(tl.float32)
    return held


@inline
def column_after(
    window, stride_column, channels, path, count, channel, column, live, has_prefix, NUM_CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the inputs in a window's columns after `count` rows of a path: old columns first, then rows."""
    source = count + column
    old = live & (source < COLUMNS)
    kept = tl.load(window + source * stride_column, mask=old & has_prefix, other=0.0)
    newer = live & (source >= COLUMNS)
    row = tl.load(path + source - COLUMNS, mask=newer, other=0)
    return tl.where(old, kept, tl.load(channels + row * NUM_CHANNELS + channel, mask=newer, other=0.0))


@triton.jit(
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
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_GATE: tl.constexpr,
    CONSTANT: tl.constexpr,
    PATH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Commit one request in one layer: a tile of one head's state, or the windows of some channels.

    Args:
        state, conv: ``[num_layers, num_slots, …]``, as in `StatePool`; a slot of `state` is contiguous.
        slots, prefix_lens, q_indptr: fields of the batch.
        save_slots: int32 ``[R]``, read if `saves` is 1.
        accept_lens, accept_index: int64 ``[R]`` and ``[R, nodes]``, read if PATH.
        keys, updates, decays, channels: records of all layers.
        null_slots: slots below this number are not written.
        interval: tokens between checkpoints, 1 or more.
        HEADS: 0 for a layer without recurrence.
        COLUMNS: columns of the window, 0 for a layer without convolution.
        BLOCK: elements of the windows that one program moves.
        UNROLL: rows of a path that are loaded together.
    """
    V_TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    count, before_save, moves, is_saved, slot, save, has_prefix = lengths_of(
        request, prefix_lens, q_indptr, accept_lens, slots, save_slots, interval, saves, null_slots, PATH
    )
    if moves | is_saved:
        entry = (layer * max_reqs + request) * nodes
        path = accept_index + request * nodes
        if part < HEADS * V_TILES:
            if HEADS > 0:
                head = part // V_TILES
                key_heads: tl.constexpr = HEADS // HEADS_PER_KEY
                value, key, offsets, inside = tile_of(
                    part % V_TILES * BLOCK_V, VALUE_DIM, KEY_DIM, BLOCK_V, CHUNK, CHUNKS
                )
                of_layer = state + layer * stride_layer + head * (VALUE_DIM * KEY_DIM) + offsets
                held = tl.load(of_layer + slot * stride_slot, mask=inside & has_prefix, other=0.0).to(tl.float32)
                at_keys = keys + entry * key_heads * KEY_DIM
                at_updates = updates + entry * HEADS * VALUE_DIM
                at_decays = decays + (layer if CONSTANT else entry) * HEADS * (KEY_DIM if KEY_GATE else 1)
                begin = count * 0
                if is_saved:
                    if PATH:
                        held = after_rows(
                            held, begin, before_save, path, at_keys, at_updates, at_decays, HEADS, key_heads, head,
                            head // HEADS_PER_KEY, value, key, value < VALUE_DIM, key < KEY_DIM, KEY_DIM, VALUE_DIM,
                            KEY_GATE, CONSTANT, UNROLL,
                        )  # fmt: skip
                        begin = before_save
                    tl.store(of_layer + save * stride_slot, convert(held, state.dtype.element_ty), mask=inside)
                if PATH and moves:
                    held = after_rows(
                        held, begin, count, path, at_keys, at_updates, at_decays, HEADS, key_heads, head,
                        head // HEADS_PER_KEY, value, key, value < VALUE_DIM, key < KEY_DIM, KEY_DIM, VALUE_DIM,
                        KEY_GATE, CONSTANT, UNROLL,
                    )  # fmt: skip
                    tl.store(of_layer + slot * stride_slot, convert(held, state.dtype.element_ty), mask=inside)
        else:
            if COLUMNS > 0:
                PER_PROGRAM: tl.constexpr = BLOCK // COLUMNS
                element = tl.arange(0, BLOCK)
                channel = (part - HEADS * V_TILES) * PER_PROGRAM + element // COLUMNS
                column = element % COLUMNS
                live = (element < PER_PROGRAM * COLUMNS) & (channel < NUM_CHANNELS)
                windows = conv + layer * stride_conv_layer + channel.to(tl.int64) * stride_channel
                window, at = windows + slot * stride_conv_slot, column * stride_column
                records = channels + entry * NUM_CHANNELS
                if is_saved:
                    new = column_after(
                        window,
                        stride_column,
                        records,
                        path,
                        before_save,
                        channel,
                        column,
                        live,
                        has_prefix,
                        NUM_CHANNELS,
                        COLUMNS,
                    )
                    tl.store(windows + save * stride_conv_slot + at, new, mask=live)
                if PATH and moves:
                    new = column_after(
                        window,
                        stride_column,
                        records,
                        path,
                        count,
                        channel,
                        column,
                        live,
                        has_prefix,
                        NUM_CHANNELS,
                        COLUMNS,
                    )
                    tl.debug_barrier()  # other threads of this program have read the columns that are written
                    tl.store(window + at, new, mask=live)
