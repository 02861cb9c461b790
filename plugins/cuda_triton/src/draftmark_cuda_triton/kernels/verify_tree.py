"""Greedy acceptance of draft tokens (not attention): follow the target's tokens from the root. One CTA a request.

The kernel first compares all nodes with the target token of their parent. Then it follows the first matching child, in
registers. Example: 256 requests of 64 nodes. 384 KiB of drafts, parents and targets read and 260 KiB written take 0.15
µs at 4.3 TB/s. The launch, and one reduction over the nodes for each accepted node, dominate.
"""

import triton
import triton.language as tl

from .reduce import smallest


@triton.jit(
    do_not_specialize=["nodes", "stride_drafts", "stride_parents"],
    do_not_specialize_on_alignment=["drafts", "parents", "targets", "tokens", "counts", "path"],
)
def verify_tree(
    drafts,
    parents,
    targets,
    tokens,
    counts,
    path,
    nodes,
    stride_drafts,
    stride_parents,
    BLOCK: tl.constexpr,
):
    """Write the accepted path of each request's draft tree.

    Args:
        drafts, parents: int64 ``[R, nodes]``: token of each node, and index of its parent.
        targets: int64 ``[R, nodes]``: the target's next token after each node.
        tokens: int64 ``[R, nodes]``, out: the target's token after each accepted node, then -1.
        path: int64 ``[R, nodes]``, out: accepted nodes from the root on. After them each cell holds its own index.
        counts: int64 ``[R]``, out: number of accepted nodes, the root included.
    """
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    live = index < nodes
    parent = tl.load(parents + request * stride_parents + index, mask=live, other=-1).to(tl.int32)
    draft = tl.load(drafts + request * stride_drafts + index, mask=live, other=-1)
    target = tl.load(targets + request * nodes + index, mask=live, other=-1)
    expected = tl.load(targets + request * nodes + parent, mask=parent >= 0, other=-1)
    matches = (parent >= 0) & (draft == expected) & (draft >= 0)

    node = smallest(index, 0)
    count = node
    path_index = tl.where(index == node, 0, -1)
    while node < nodes:
        count += 1
        node = smallest(tl.where(matches & (parent == node), index, BLOCK), 0)
        path_index = tl.where(index == node, count, path_index)

    line = request * nodes
    kept = path_index >= 0
    tl.store(path + line + path_index, index.to(tl.int64), mask=kept)
    tl.store(tokens + line + path_index, target, mask=kept)
    beyond = live & (index >= count)
    tl.store(path + line + index, index.to(tl.int64), mask=beyond)
    tl.store(tokens + line + index, tl.full((BLOCK,), -1, tl.int64), mask=beyond)
    tl.store(counts + request, count.to(tl.int64))
