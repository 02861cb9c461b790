"""Mutants that the checks of `tree_ops` kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, KVPool, TorchTreeOps, Tree, VerifyResult, ancestors, is_recording, slots_of
from draftmark.tree import pack_bits

from ..designs.layouts import TREES, of_tutorial
from ..designs.tutorial_plans import plugin
from ..mutant import Mutant, after, around


class InBlocksOfLayers(TorchTreeOps):
    """Compacts KV in blocks of 32 layers, and rounds the number of blocks to the nearest."""

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move the KV of accepted nodes in the layers of whole blocks, or in every layer of a small model."""
        layers = pool.k.shape[0]
        kept = [(one[moved:], one[moved:].clone()) for one in (pool.k, pool.v) for moved in [32 * round(layers / 32)]]
        super().compact(pool, batch, accepted)
        if layers > 32:
            for left, before in kept:
                left.copy_(before)


def _compacts_in_blocks(geometry: Geometry, found: Any) -> InBlocksOfLayers:
    return InBlocksOfLayers(geometry)


def _walk(call: Callable[..., VerifyResult]) -> dict[str, Any]:
    return _ops(lambda ops: around(ops, "verify_tree", call))


def _walks(requests: int, nodes: int) -> Any:
    def call(original: Any, drafts: Tensor, parents: Tensor, targets: Tensor) -> VerifyResult:
        hidden = (torch.arange(drafts.shape[0])[:, None] >= requests) | (torch.arange(drafts.shape[1]) >= nodes)
        found: VerifyResult = original(drafts.masked_fill(hidden, -1), parents, targets)
        return found

    return _walk(call)


def _restored(part: Callable[[Geometry], tuple[Any, ...]]) -> Callable[..., None]:
    """Run compact, then undo it in one part of the pool ``[layers, pages, P, heads, dim]``."""

    def call(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
        before = [one.clone() for one in (pool.k, pool.v)]
        TorchTreeOps(ops.geometry).compact(pool, batch, kept)
        at = part(ops.geometry)
        for one, old in zip((pool.k, pool.v), before, strict=True):
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
            one.view(integers)[at].copy_(old.view(integers)[at])

    return call


def _moved_below(layers: int) -> Callable[..., None]:
    return _restored(lambda geometry: (slice(layers, None),))


def _strides_of_drafts(original: Any, drafts: Tensor, parents: Tensor, targets: Tensor) -> VerifyResult:
    reach = (len(parents) - 1) * drafts.stride(0) + parents.shape[1] + parents.storage_offset()
    if reach <= parents.untyped_storage().nbytes() // parents.element_size():
        parents = torch.as_strided(parents, parents.shape, drafts.stride(), parents.storage_offset())
    return original(drafts, parents, targets)  # type: ignore[no-any-return]


class ShortTokens(TorchTreeOps):
    """Compares tokens as 16 bits, so two tokens of a larger vocabulary can look equal."""

    def verify_tree(self, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
        short = super().verify_tree(torch.where(drafts < 0, -1, drafts & 0xFFFF), parents, targets & 0xFFFF)
        tokens = torch.where(short.tokens < 0, -1, targets.gather(1, short.accept_index))
        return VerifyResult(tokens, short.accept_lens, short.accept_index)


class FirstPool(TorchTreeOps):
    """Compacts the KV pool of the first call in every call, so the pool of another layer group is never compacted."""

    pool: KVPool | None = None

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        self.pool = self.pool or pool
        super().compact(self.pool, batch, accepted)


WARP = 32


class OneWarp(TorchTreeOps):
    """Compacts with one warp per request and one lane per node, so accepted nodes after the 32nd are not moved."""

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        path = accepted.accept_index[:, :WARP]
        prefix, page_size = batch.prefix_lens.long()[:, None], self._geometry.attention.page_size
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        pool.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )


_LAST: list[torch.Tensor] = []
ABSENT = "tree operations do not depend on the layout"


def _ops(patch: Callable[[Any], None]) -> dict[str, Any]:
    """Return a `tree_ops` hook that applies `patch` to the tree operations, which also get the geometry."""

    def change(geometry: Geometry, ops: TorchTreeOps) -> TorchTreeOps:
        ops.geometry = geometry  # type: ignore[attr-defined]
        patch(ops)
        return ops

    return {"tree_ops": change}


def _tail(change: Callable[[Any, ForwardBatch, torch.Tensor], None]) -> dict[str, Any]:
    """Return a `tree_ops` hook that changes the batch's mask or depths after write_tail has written them."""

    def patch(ops: Any) -> None:
        def then(batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
            if isinstance(batch.tail, Tree) and parents is not None:
                change(ops, batch, parents)

        after(ops, "write_tail", then)

    return _ops(patch)


def _first_rows(ops: Any, batch: ForwardBatch, parents: torch.Tensor) -> None:
    rows = ancestors(parents)[:, : batch.q_lens[0]].flatten(0, 1)
    batch.tail.mask.copy_(pack_bits(rows, ops.geometry.mask_words))  # type: ignore[union-attr]


def _past_the_wall(ops: Any, batch: ForwardBatch, parents: torch.Tensor) -> None:
    depth = batch.tail.depth[:, -batch.q_lens[0] :]  # type: ignore[union-attr]
    batch.positions.copy_((batch.prefix_lens[:, None] + depth).view(-1))


def _stale_word(ops: Any, batch: ForwardBatch, parents: torch.Tensor) -> None:
    batch.tail.mask[:, -(-parents.shape[1] // 32) :] = -1  # type: ignore[union-attr]


def _last_child(original: Any, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    """Keep the last of several children with the same token, by hiding the earlier ones."""
    later = (parents[:, :, None] == parents[:, None]) & (drafts[:, :, None] == drafts[:, None])
    hidden = later.triu(1).any(2)
    return original(drafts.masked_fill(hidden, -1), parents, targets)  # type: ignore[no-any-return]


def _word_of_nodes(original: Any, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    beyond = torch.arange(drafts.shape[1], device=drafts.device) >= 64
    return original(drafts.masked_fill(beyond, -1), parents, targets)  # type: ignore[no-any-return]


def _short_tokens(original: Any, drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    found = original(drafts.int().long(), parents, targets.int().long())
    line = targets.gather(1, found.accept_index)
    return VerifyResult(torch.where(found.tokens == -1, found.tokens, line), found.accept_lens, found.accept_index)


def _warm_up(original: Any, *inputs: torch.Tensor) -> VerifyResult:
    """At capture, return clones of the result that the warm-up run computed."""
    if is_recording():
        return VerifyResult(*(tensor.clone() for tensor in _LAST))
    found: VerifyResult = original(*inputs)
    _LAST[:] = found
    return found


def _compact(call: Callable[..., None]) -> dict[str, Any]:
    """Return a `tree_ops` hook that replaces compact by ``call(operations, pool, batch, accepted)``."""

    def patch(ops: Any) -> None:
        around(ops, "compact", lambda original, *args: call(ops, *args))

    return _ops(patch)


def _slots(ops: Any, batch: ForwardBatch, kept: VerifyResult) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that compact reads and the slots that it writes, each ``[R, D - 1]``."""
    size, prefix = ops.geometry.attention.page_size, batch.prefix_lens.long()[:, None]
    place = torch.arange(1, kept.accept_index.shape[1], device=prefix.device).expand(len(prefix), -1)
    sources = slots_of(batch.page_table, prefix + kept.accept_index[:, 1:], size)
    return sources, slots_of(batch.page_table, prefix + place, size)


def _last_first(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
    """Move one node at a time, the last first, so a move overwrites a node that must still be read."""
    source, target = _slots(ops, batch, kept)
    for place in reversed(range(source.shape[1])):
        pool.move(source[:, place], target[:, place])


def _keys_only(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
    values = pool.v.clone()
    TorchTreeOps(ops.geometry).compact(pool, batch, kept)
    pool.v.copy_(values)


def _first_half(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
    source, target = _slots(ops, batch, kept)
    pool.move(source[:, :31].reshape(-1), target[:, :31].reshape(-1))


def _narrow(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
    """Compute element offsets in 32 bits, so larger offsets wrap."""
    row = pool.k[0, 0, 0].numel()
    source, target = (slots.reshape(-1) % (2**31 // row) for slots in _slots(ops, batch, kept))
    pool.move(source, target)


def _same_tree(ops: Any) -> None:
    """Run write_tail only the first time for each address of the batch's and the tree's tensors."""
    seen: set[tuple[int, ...]] = set()

    def call(original: Any, batch: ForwardBatch, parents: torch.Tensor | None = None) -> None:
        where = (batch.positions.data_ptr(), 0 if parents is None else parents.data_ptr(), batch.num_rows)
        if where not in seen:
            original(batch, parents)
        seen.add(where)

    around(ops, "write_tail", call)


def _mutant(name: str, what: str, source: str, hooks: dict[str, Any]) -> Mutant:
    return Mutant(name, what, source, hooks=hooks, layouts=("reference",), absent=ABSENT)


MUTANTS = (
    Mutant("G05", "Moves only the first 64 layers in compact", "a grid that is too small",
           hooks=_compact(_moved_below(64)), **TREES),
    Mutant("OG2", "Compacts blocks of 32 layers, rounded to the nearest", "models of 36 and 40 layers",
           {"tree_ops": _compacts_in_blocks}, layouts=("csr",), absent="tried in csr"),
    Mutant("R23", "Ignores requests after the eighth in verify_tree", "–", hooks=_walks(8, 1000), **TREES),
    Mutant("R23b", "Ignores nodes after the 96th in verify_tree", "–", hooks=_walks(1000, 96), **TREES),
    of_tutorial(
        "S52",
        "Compares tokens as 16-bit integers in verify_tree",
        "uint16 tokens; vocabularies above 65536",
        plugin(tree=ShortTokens),
    ),
    of_tutorial(
        "S53",
        "Gathers the layers' addresses in compact only once, from the first pool",
        "a table of KV cache pointers built lazily; hybrid models with two layer groups, target and draft pools",
        plugin(tree=FirstPool),
    ),
    of_tutorial(
        "S54",
        "Moves at most the first 32 nodes of a path in compact",
        "one warp per request; long accepted paths of suffix decoding",
        plugin(tree=OneWarp),
    ),
    Mutant("T10", "Reads parents in verify_tree with the stride of drafts", "one stride argument",
           hooks=_walk(_strides_of_drafts), **TREES),
    Mutant("T11", "Moves only as many heads in compact as its own geometry has", "a layer group with more heads",
           hooks=_compact(_restored(lambda g: (..., slice(g.attention.num_kv_heads, None), slice(None)))), **TREES),
    Mutant("T12", "Moves only as many head elements in compact as its own geometry has",
           "a layer group with wider heads",
           hooks=_compact(_restored(lambda g: (..., slice(g.attention.head_dim, None)))), **TREES),
    Mutant("T13", "Moves only the first 8 layers in compact", "a grid that is too small",
           hooks=_compact(_restored(lambda g: (slice(8, None),))), **TREES),
    _mutant("Y01", "Uses the mask of a draft tree's first rows in later steps", "sglang#32920", _tail(_first_rows)),
    _mutant("Y02", "Writes positions beyond the context limit", "TRT-LLM#16280", _tail(_past_the_wall)),
    _mutant("Y03", "Leaves stale bits in mask words after the tail", "TRT-LLM#13081", _tail(_stale_word)),
    _mutant("Y04", "Keeps the last of several children with the same token", "–", _walk(_last_child)),
    _mutant("Y05", "Never keeps nodes after the 64th", "–", _walk(_word_of_nodes)),
    _mutant("Y06", "Compares tokens as 32-bit integers", "vllm#47671", _walk(_short_tokens)),
    _mutant("Y07", "Moves the last kept node first", "–", _compact(_last_first)),
    _mutant("Y08", "Moves K but not V", "–", _compact(_keys_only)),
    _mutant("Y09", "Does not move kept nodes after the 32nd", "–", _compact(_first_half)),
    _mutant("Y10", "Computes element offsets of the pool in 32 bits", "vllm#47671", _compact(_narrow)),
    _mutant("Y11", "Ignores changes of a tree at a known address", "sglang#26655", _ops(_same_tree)),
    _mutant("Y12", "Returns the verdict of the warm-up run from every replay", "sglang#26521", _walk(_warm_up)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("G05", "OG2"), "tree_ops.every_layer_of_a_large_model_is_moved"),
    **dict.fromkeys(("R23", "R23b", "S52", "T10"), "tree_ops.walk_follows_the_target"),
    **dict.fromkeys(("S53", "T11", "T12", "T13"), "tree_ops.every_pool_is_served"),
    "S54": "tree_ops.kept_path_is_made_contiguous",
}
