"""Short causal convolution: decode with the window in place, and rows of a prompt or of a draft tree.

The convolution of a row reads its own channels and those of its ancestors: rows of the tail first, then the columns of
the slot's window. Example: 64 requests, 8 rows, 8192 channels, bfloat16: 8 MiB read, 8 MiB written and 8 MiB recorded
take 6 µs at 4.0 TB/s.
"""

import triton
import triton.language as tl

from .convert import convert
from .inline import inline


@inline
def activate(x, SILU: tl.constexpr):
    """Apply SiLU if the layer has it."""
    return x / (1.0 + tl.exp(-x)) if SILU else x


@inline
def bias_of(bias, channel, inside, has_bias):
    """Return the bias of each channel in float32, or 0."""
    return tl.load(bias + channel, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["has_bias"],
    do_not_specialize_on_alignment=["bias", "slots", "prefix_lens"],
)
def convolve_one(
    x,
    weight,
    bias,
    conv,
    slots,
    prefix_lens,
    out,
    stride_x_row,
    stride_slot,
    stride_channel,
    stride_column,
    has_bias,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve the one row of a request for BLOCK channels, and shift the slot's window by one column.

    Args:
        x, weight, bias, out: as in `StateBackend.convolve`.
        conv: ``[num_slots, NUM_CHANNELS, TAPS - 1]`` of one layer, with any strides.
        slots, prefix_lens: fields of the batch.
    """
    request = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < NUM_CHANNELS
    slot = tl.load(slots + request).to(tl.int64)
    old = inside & (tl.load(prefix_lens + request) > 0)
    columns = conv + slot * stride_slot + channel.to(tl.int64) * stride_channel
    own = tl.load(x + request * stride_x_row + channel, mask=inside, other=0.0)
    taps = weight + channel * TAPS
    found = bias_of(bias, channel, inside, has_bias)
    found += own.to(tl.float32) * tl.load(taps + (TAPS - 1), mask=inside, other=0.0).to(tl.float32)
    for column in tl.static_range(TAPS - 1):
        value = tl.load(columns + column * stride_column, mask=old, other=0.0)
        if column > 0:
            # Each thread stores a column after it has loaded it: a column's load and store have one layout.
            tl.store(columns + (column - 1) * stride_column, value, mask=inside)
        value = convert(value.to(tl.float32), x.dtype.element_ty).to(tl.float32)
        found += value * tl.load(taps + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(columns + (TAPS - 2) * stride_column, convert(own.to(tl.float32), conv.dtype.element_ty), mask=inside)
    found = activate(found, SILU)
    tl.store(out + request * NUM_CHANNELS + channel, convert(found, out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "first_entry", "nodes", "tree", "has_bias"],
    do_not_specialize_on_alignment=["bias", "slots", "prefix_lens", "q_indptr", "parents"],
)
def convolve_rows(
    x,
    weight,
    bias,
    conv,
    slots,
    prefix_lens,
    q_indptr,
    parents,
    channels,
    out,
    stride_x_row,
    stride_slot,
    stride_channel,
    stride_column,
    num_rows,
    first_entry,
    nodes,
    tree,
    has_bias,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    EXTEND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Convolve BLOCK_ROWS rows of one request for BLOCK channels; record them, or write the window after a prompt.

    Args:
        x, weight, bias, out: as in `StateBackend.convolve`.
        conv: ``[num_slots, NUM_CHANNELS, TAPS - 1]`` of one layer, with any strides.
        slots, prefix_lens, q_indptr: fields of the batch.
        parents: int32 ``[num_rows]``, `Tree.parents`, read if `tree` is 1. Otherwise the rows are a chain.
        channels: ``[num_layers · max_reqs, nodes, NUM_CHANNELS]``, records of a verify's rows.
        first_entry: layer · max_reqs, the record entry of request 0.
        EXTEND: a prompt: the window is written and no row is recorded. The program of a request's first rows writes the
            window, because it is the only one that reads it; so BLOCK_ROWS >= TAPS - 1.
        COLUMNS: power of two, at least TAPS - 1.
    """
    request, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < NUM_CHANNELS
    first, end = tl.load(q_indptr + request).to(tl.int64), tl.load(q_indptr + request + 1).to(tl.int64)
    count = (end - first).to(tl.int32)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if block * BLOCK_ROWS < count:
        slot = tl.load(slots + request).to(tl.int64)
        has_prefix = tl.load(prefix_lens + request) > 0
        window = conv + slot * stride_slot + channel.to(tl.int64)[None, :] * stride_channel
        live = row < count
        at = row
        found = tl.full((BLOCK_ROWS, BLOCK), 0, tl.float32) + bias_of(bias, channel, inside, has_bias)[None, :]
        for tap in tl.static_range(TAPS):
            in_tail, column = live & (at >= 0), at + (TAPS - 1)
            in_window = live & (at < 0) & (column >= 0) & has_prefix
            from_rows = x + (first + at)[:, None] * stride_x_row + channel[None, :]
            value = tl.load(from_rows, mask=in_tail[:, None] & inside[None, :], other=0.0)
            if not EXTEND and tap == 0:
                entry = ((first_entry + request) * nodes + row)[:, None] * NUM_CHANNELS + channel[None, :]
                kept = convert(value.to(tl.float32), channels.dtype.element_ty)
                tl.store(channels + entry, kept, mask=live[:, None] & inside[None, :])
            value = value.to(tl.float32)
            if (block == 0) | (tree != 0):  # later rows of a chain do not reach the window
                from_window = window + column[:, None] * stride_column
                old = tl.load(from_window, mask=in_window[:, None] & inside[None, :], other=0.0)
                value += convert(old.to(tl.float32), x.dtype.element_ty).to(tl.float32)
            factor = tl.load(weight + channel * TAPS + (TAPS - 1 - tap), mask=inside, other=0.0).to(tl.float32)
            found += value * factor[None, :]
            above = at - 1
            if not EXTEND and tree != 0:
                parent = tl.load(parents + first + at, mask=in_tail, other=-1)
                # Slots of padding may hold stale parents; a later slot is no ancestor.
                above = tl.where(at >= 0, tl.minimum(tl.maximum(parent, -1), at - 1), at - 1)
            at = above
        found = activate(found, SILU)
        at_out = out + (first + row)[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(at_out, convert(found, out.dtype.element_ty), mask=live[:, None] & inside[None, :])
        if EXTEND and block == 0:
            # Column c of the new window is input count + c of the old window and the rows.
            target = tl.arange(0, COLUMNS)
            source = count + target
            here = (target < TAPS - 1)[:, None] & inside[None, :]
            is_row = (source >= TAPS - 1)[:, None]
            at_row = x + (first + source - (TAPS - 1))[:, None] * stride_x_row + channel[None, :]
            new = tl.load(at_row, mask=here & is_row, other=0.0).to(tl.float32)
            moved = tl.load(window + source[:, None] * stride_column, mask=here & (is_row == 0) & has_prefix, other=0.0)
            tl.debug_barrier()  # other threads of this program have read the columns that are written
            new = convert(new + moved.to(tl.float32), conv.dtype.element_ty)
            tl.store(window + target[:, None] * stride_column, new, mask=here)
    if block == 0:
        # Padding rows after the last request: each program writes every R-th of them.
        padding = tl.load(q_indptr + tl.num_programs(2)).to(tl.int64) + request
        while padding < num_rows:
            nothing = tl.full((BLOCK,), 0, out.dtype.element_ty)
            tl.store(out + padding * NUM_CHANNELS + channel, nothing, mask=inside)
            padding += tl.num_programs(2)
