"""Mutants of the tree operations that a plugin can implement: write_tail, verify_tree and compact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark import Geometry
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVPool, slots_of
from draftmark.graphs import is_recording
from draftmark.tree import TorchTreeOps, VerifyResult, ancestors, pack_bits

from .mutant import Mutant, after, around

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


def _walk(call: Callable[..., VerifyResult]) -> dict[str, Any]:
    return _ops(lambda ops: around(ops, "verify_tree", call))


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
)
