"""Tree operations of the decoding loop (`draftmark.runtime.TreeOps`), one kernel launch each."""

from __future__ import annotations

import torch
import triton

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVPool, Tree, VerifyResult, record_call

from .heuristics.common import next_power_of_two
from .kernel_variants import kernels, select_variant
from .launch.launcher import launch_kernel

TAIL_CELLS = 2048
"""Maximum 4-byte mask words that one program of write_tree_tail holds in registers."""
MOVE_ROWS, MOVE_WORDS, MOVE_WARPS = 4, 512, 4
"""Tile of one compaction step: accepted nodes, 4-byte words of each node (K and V each), and warps of a program."""


class TritonTreeOps:
    """Implements `draftmark.runtime.TreeOps` for one geometry. CPU tensors use Triton's interpreter."""

    def __init__(self, geometry: Geometry) -> None:
        self._last_position = geometry.limits.max_context_len - 1
        self._page_size, self._mask_words = geometry.attention.page_size, int(geometry.mask_words)

    def write_tail(self, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        """Write mask, depths and positions of the tail (each request's draft tokens) in one launch."""
        positions, tail = batch.positions, batch.tail
        mask, depth = (tail.mask, tail.depth) if isinstance(tail, Tree) else (None, None)
        written = (positions,) if mask is None or depth is None else (mask, depth, positions)
        record_call(
            launch_write_tail, batch.padded_reqs, batch.q_lens[0], batch.tail_lens[0], self._last_position,
            self._mask_words, parents, batch.prefix_lens, mask, depth, positions, mutates=written,
        )  # fmt: skip

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        """Return accepted tokens, counts and tree path of each request, in one launch."""
        tokens, path = torch.empty_like(targets), torch.empty_like(targets)
        counts = torch.empty(targets.shape[0], dtype=torch.int64, device=targets.device)
        record_call(launch_verify_tree, drafts, parents, targets, tokens, counts, path, mutates=(tokens, counts, path))
        return VerifyResult(tokens, counts, path)

    def compact(self, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
        """Move the accepted nodes' KV to the front of the tail, for all layers; see `moved_together`."""
        for tensors in moved_together([words_of(one) for one in pool.tensors]):
            record_call(
                launch_compact, self._page_size, tensors[0], tensors[-1], kept.accept_index, kept.accept_lens,
                batch.prefix_lens, batch.page_table, mutates=tuple(tensors),
            )  # fmt: skip


def launch_write_tail(
    requests: int,
    q_len: int,
    tail_len: int,
    last_position: int,
    mask_words: int,
    parents: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    positions: torch.Tensor,
) -> None:
    """Launch `kernels.tree_tail.write_tree_tail`.

    Args:
        mask_words: int32 words of a mask row, in batches without a mask too: they launch the same compiled kernel.
    """
    tree = mask is not None and parents is not None
    columns = next_power_of_two(mask_words)
    block = max(16, min(64, TAIL_CELLS // columns))
    launch_kernel(
        select_variant(kernels.tree_tail.write_tree_tail, positions), (requests, triton.cdiv(tail_len, block)),
        parents if tree else positions, prefix_lens, mask if tree else prefix_lens, depth if tree else prefix_lens,
        positions, int(tree), q_len, tail_len, mask_words, last_position, 0 if parents is None else parents.stride(0),
        0 if mask is None else mask.stride(0), BLOCK=block, WORDS=columns, num_warps=1 if columns <= 4 else 4,
    )  # fmt: skip


def launch_verify_tree(
    drafts: torch.Tensor,
    parents: torch.Tensor,
    targets: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Launch `kernels.verify_tree.verify_tree`."""
    requests, nodes = targets.shape
    block = max(16, next_power_of_two(nodes))
    launch_kernel(
        select_variant(kernels.verify_tree.verify_tree, targets), (requests,),
        drafts, parents, targets, tokens, counts, path, nodes, drafts.stride(0), parents.stride(0),
        BLOCK=block, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip


def launch_compact(
    page_size: int,
    k: torch.Tensor,
    v: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Launch `kernels.compact_kv.compact_kv`; v is k itself if there is only one tensor to move."""
    requests, nodes = path.shape
    if nodes < 2:
        return
    layers, _, _, words = k.shape
    block = min(MOVE_WORDS, next_power_of_two(words))
    launch_kernel(
        select_variant(kernels.compact_kv.compact_kv, k), (requests, layers, triton.cdiv(words, block)), k, v, path,
        counts, prefix_lens, page_table, nodes, words, k.stride(0), page_table.stride(0), PAGE_SIZE=page_size,
        BOTH=v is not k, BLOCK_ROWS=min(MOVE_ROWS, next_power_of_two(nodes - 1)), BLOCK=block, num_warps=MOVE_WARPS,
    )  # fmt: skip


def moved_together(words: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of each launch: one launch for tensors with rows of equal size, as K and V, else one each."""
    alike = len({(one.shape[3], one.dtype) for one in words}) == 1
    return [words] if alike else [[one] for one in words]


def words_of(pool: torch.Tensor) -> torch.Tensor:
    """View ``[layers, pages, P, heads, dim]`` as ``[layers, pages, P, words]``, of 4 bytes each if they fit, else 1."""
    rows = pool.flatten(3)
    return rows.view(torch.int32 if rows.shape[3] * rows.element_size() % 4 == 0 else torch.uint8)
