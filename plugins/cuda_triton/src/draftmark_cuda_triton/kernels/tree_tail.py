"""Tree mask, depths and positions of a batch's draft trees, computed from the parents in one launch.

A program computes BLOCK tail tokens of one request. For all tokens at once, it follows the parents up to the root and
sets the mask bit of each ancestor. So the loop runs once for each level of the tree. Example: 256 requests of 64 tail
tokens. 128 KiB of parents are read (from L1 again at each step); 128 KiB of mask, 64 KiB of depths and 128 KiB of
positions are written. That takes 0.1 µs at 4.3 TB/s, so the launch dominates, and in a chain the 64 dependent steps.
"""

import triton
import triton.language as tl

from .reduce import largest


@triton.jit(
    do_not_specialize=[
        "tree",
        "q_len",
        "tail_len",
        "num_words",
        "last_position",
        "stride_parents",
        "stride_mask",
    ],
    do_not_specialize_on_alignment=["parents", "prefix_lens", "mask", "depth", "positions"],
)
def write_tree_tail(
    parents,
    prefix_lens,
    mask,
    depth,
    positions,
    tree,
    q_len,
    tail_len,
    num_words,
    last_position,
    stride_parents,
    stride_mask,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write mask, depths and positions of each request's tail_len tail tokens; the q_len rows are the last tail tokens.

    Args:
        tree: 0 for chains, which have only positions.
        parents: int64 ``[R, tail_len]``: index of each token's parent, less than its own; -1 for a root. Trees only.
        mask: int32 ``[R · q_len, num_words]``, out: bit i is set if tail token i is the row itself or an ancestor.
            Trees only.
        depth: int32 ``[R, tail_len]``, out: distance from the root. Trees only.
        positions: int64 ``[R · q_len]``, out: prefix length + depth, at most last_position. Without a tree the
            depth of a token is its index.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = slot < tail_len
    row = slot - (tail_len - q_len)
    has_row = live & (row >= 0)
    height = slot
    if tree != 0:
        word = tl.arange(0, WORDS)[None, :]
        bits = tl.full((BLOCK, WORDS), 0, tl.int32)
        climbed = tl.full((BLOCK,), 0, tl.int32)
        at = tl.where(live, slot, -1)
        while largest(at, 0) >= 0:
            on_way = at >= 0
            bits |= tl.where((at >> 5)[:, None] == word, (1 << (at & 31))[:, None], 0)
            climbed += on_way.to(tl.int32)
            at = tl.load(parents + request * stride_parents + at, mask=on_way, other=-1).to(tl.int32)
        height = climbed - 1
        tl.store(depth + request * tail_len + slot, height, mask=live)
        line = mask + (request * q_len + row)[:, None] * stride_mask + word
        tl.store(line, bits, mask=has_row[:, None] & (word < num_words))
    position = tl.load(prefix_lens + request) + height
    tl.store(positions + request * q_len + row, tl.minimum(position, last_position).to(tl.int64), mask=has_row)
