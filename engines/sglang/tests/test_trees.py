"""Tests of draft tree parents that are computed from SGLang's tree masks and candidate numbers."""

from __future__ import annotations

import pytest
import torch

from draftmark_sglang.trees import TreeMasks, write_parents_by_branch, write_parents_of_step


def _mask(parents: list[int]) -> torch.Tensor:
    """Return a tree's visibility mask as SGLang's kernels write it: each node sees itself and its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen = node
        while seen >= 0:
            mask[node, seen] = True
            seen = parents[seen]
    return mask


def _parents(masks: torch.Tensor) -> list[list[int]]:
    """Return the parents that `TreeMasks` reads from masks ``[R, D, D]``, in a buffer for more requests."""
    read = TreeMasks(len(masks) + 2, masks.shape[1], "cpu")
    read.cells[: len(masks)] = masks
    return read.parents(len(masks)).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_random_tree_is_read_back(seed: int) -> None:
    """The parents of a random tree are recovered from its visibility mask."""
    make = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, node, (), generator=make)) for node in range(1, 40)]
    assert _parents(_mask(parents)[None]) == [parents]


def test_chains_and_forests() -> None:
    """In a chain, each node's parent is the previous node; a node that sees only itself is a root."""
    masks = torch.stack([torch.ones(4, 4, dtype=torch.bool).tril(), torch.eye(4, dtype=torch.bool)])
    assert _parents(masks) == [[-1, 0, 1, 2], [-1, -1, -1, -1]]


def test_upper_triangle_is_not_read() -> None:
    """Mask elements above the diagonal are ignored, because SGLang fills the buffer with ones beforehand."""
    parents = [-1, 0, 0, 2]
    assert _parents((_mask(parents) | torch.ones(4, 4, dtype=torch.bool).triu())[None]) == [parents]


@pytest.mark.parametrize("topk", [2, 3, 8])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_candidate_continues_its_branch(topk: int, step: int) -> None:
    """The parent of candidate c is the token that branch c // topk drafted in the previous step."""
    candidates = torch.randperm(topk * topk, generator=torch.Generator().manual_seed(topk))[None, :topk]
    reported = candidates + topk * topk * (step - 1) + topk
    parents = torch.full((1, topk * 6), -9)
    write_parents_of_step(parents[:, topk : 2 * topk], reported, topk)
    assert torch.equal(parents[:, topk : 2 * topk], topk * (step - 1) + candidates // topk)
    assert (parents[:, :topk] == -9).all() and (parents[:, 2 * topk :] == -9).all()


def test_branch_order() -> None:
    """With branch order, the parent of branch t is branch t of the previous step."""
    parents = torch.empty(2, 3, dtype=torch.int64)
    write_parents_by_branch(parents, 2)
    assert parents.tolist() == [[3, 4, 5], [3, 4, 5]]
