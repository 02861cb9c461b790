"""Checks of values that functions of the core receive: slots, positions, tokens, tree nodes. They read the device."""

from __future__ import annotations

import torch

from draftmark.errors import BatchError, LengthsError


def check_slots(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    """Raise `BatchError` for the first slot outside of a pool with `count` slots."""
    for name, slots in (("source", source), ("target", target)):
        wrong = slots[(slots < 0) | (slots >= count)]
        if len(wrong):
            raise BatchError(
                f"{name} has slot {int(wrong[0])}, but the pool's slots are 0 … {count - 1}; check the page table"
            )


def check_positions(positions: torch.Tensor, limit: int) -> None:
    """Raise `BatchError` for the first position outside of a page table with `limit` positions."""
    wrong = positions[(positions < 0) | (positions >= limit)]
    if len(wrong):
        raise BatchError(
            f"positions has {int(wrong[0])}, but the page table covers 0 … {limit - 1}; size it from the geometry"
        )


def check_advance(lengths: torch.Tensor, request_rows: int, limit: int, rows: torch.Tensor, by: torch.Tensor) -> None:
    """Raise `LengthsError` for the first row or count of `SequenceLengths.advance` that is out of range.

    Args:
        lengths: int32 ``[2 · request_rows]``, the committed lengths before the advance.
        limit: the largest length.
    """
    before: list[int] = lengths.tolist()
    seen: set[int] = set()
    for row, count in zip(rows.tolist(), by.tolist(), strict=True):
        if not 0 <= row < len(before):
            raise LengthsError(f"rows has {row}, but rows are 0 … {len(before) - 1}; take them from this object")
        if row >= request_rows:
            continue
        if row in seen:
            raise LengthsError(f"rows has {row} twice, but request rows are distinct; advance each row once")
        seen.add(row)
        if not 0 <= count <= limit - before[row]:
            raise LengthsError(
                f"row {row} advances by {count} from {before[row]}, but lengths are 0 … {limit} and never shrink; "
                "advance by the tokens that the round committed"
            )


def check_parent_values(parents: torch.Tensor) -> None:
    """Raise `BatchError` for the first parent that is not an earlier slot or -1."""
    slots = torch.arange(parents.shape[1], device=parents.device)
    wrong = ((parents >= slots) | (parents < -1)).nonzero()
    if len(wrong):
        request, slot = wrong[0].tolist()
        raise BatchError(
            f"parents[{request}, {slot}] is {int(parents[request, slot])}, but the parent of slot {slot} is -1 or an "
            f"earlier slot, 0 … {slot - 1}; order the nodes so that parents precede children"
        )


def check_targets(targets: torch.Tensor) -> None:
    """Raise `BatchError` if a target's token is negative."""
    if bool((targets < 0).any()):
        raise BatchError(
            f"targets contains {int(targets.min())}, but a target's token is >= 0; pass the model's choice of each node"
        )


def check_accept_index(path: torch.Tensor) -> None:
    """Raise `BatchError` for the first accepted node with a slot out of range. path: int64 ``[R, D]``."""
    nodes = path.shape[1]
    wrong = ((path < torch.arange(nodes, device=path.device)) | (path >= nodes)).nonzero()
    if len(wrong):
        request, node = wrong[0].tolist()
        raise BatchError(
            f"accept_index[{request}, {node}] is {int(path[request, node])}, but accepted node {node} has a "
            f"slot of {node} … {nodes - 1}; pass the result of verify_tree"
        )
