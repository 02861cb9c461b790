"""Parents are read from what SGLang says of trees: masks of who sees whom, and the numbers of candidates."""

from __future__ import annotations

import pytest
import torch

from draftmark_sglang.trees import TreeMasks, write_parents_by_branch, write_parents_of_step


def _mask(parents: list[int]) -> torch.Tensor:
    """Who sees whom, as SGLang's tree kernels write it: each node, its ancestors and the root."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen = node
        while seen >= 0:
            mask[node, seen] = True
            seen = parents[seen]
    return mask


def _parents(masks: torch.Tensor) -> list[list[int]]:
    """What is read of masks, ``[R, D, D]``, in a buffer for more requests."""
    read = TreeMasks(len(masks) + 2, masks.shape[1], "cpu")
    read.cells[: len(masks)] = masks
    return read.parents(len(masks)).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_random_tree_is_read_back(seed: int) -> None:
    """The last of a node's ancestors is its parent."""
    make = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, node, (), generator=make)) for node in range(1, 40)]
    assert _parents(_mask(parents)[None]) == [parents]


def test_chains_and_forests() -> None:
    """A chain's parents precede it; a node that sees only itself is a root."""
    masks = torch.stack([torch.ones(4, 4, dtype=torch.bool).tril(), torch.eye(4, dtype=torch.bool)])
    assert _parents(masks) == [[-1, 0, 1, 2], [-1, -1, -1, -1]]


def test_what_lies_above_the_diagonal_is_not_read() -> None:
    """SGLang fills a mask's buffer with ones before its kernel writes it."""
    parents = [-1, 0, 0, 2]
    assert _parents((_mask(parents) | torch.ones(4, 4, dtype=torch.bool).triu())[None]) == [parents]


@pytest.mark.parametrize("topk", [2, 3, 8])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_candidate_continues_the_branch_that_it_was_made_from(topk: int, step: int) -> None:
    """Candidate c of a step comes from branch c // topk of the step before, at the tail slots of that step."""
    candidates = torch.randperm(topk * topk, generator=torch.Generator().manual_seed(topk))[None, :topk]
    reported = candidates + topk * topk * (step - 1) + topk
    parents = torch.full((1, topk * 6), -9)
    write_parents_of_step(parents[:, topk : 2 * topk], reported, topk)
    assert torch.equal(parents[:, topk : 2 * topk], topk * (step - 1) + candidates // topk)
    assert (parents[:, :topk] == -9).all() and (parents[:, 2 * topk :] == -9).all()


def test_branch_order() -> None:
    """SGLang's own backends read branch t's slots for branch t, whomever it continues."""
    parents = torch.empty(2, 3, dtype=torch.int64)
    write_parents_by_branch(parents, 2)
    assert parents.tolist() == [[3, 4, 5], [3, 4, 5]]
