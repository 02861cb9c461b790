"""Tests of the check of FlashAttention 3's calls for trees over latent rows: its stand-ins and its answer."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import ContractViolation
from draftmark_sglang_judge.probes.latent_trees import (
    DRAFTS,
    HEADS,
    LENGTH,
    SCALE,
    VALUE,
    _Scene,
    flash_attention,
    merge,
)


def composed(scene: _Scene, suffix_pages: int) -> torch.Tensor:
    """Return attention as a right composition calls the kernels: the prefix, each row's ancestors, then a merge.

    Args:
        suffix_pages: page size of the second call's view of the pool. Its table has token slots.
    """
    q, qv = scene.q[..., VALUE:], scene.q[..., :VALUE]

    def call(table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        pages = scene.pool.view(-1, size, 1, scene.pool.shape[-1])
        return flash_attention(q, pages[..., VALUE:], pages[..., :VALUE], table, lens, starts, qv, SCALE)

    prefix = scene.table[1:2, : LENGTH : scene.page_size] // scene.page_size
    one, one_lse = call(prefix, torch.tensor([LENGTH]), torch.tensor([0, DRAFTS]), scene.page_size)
    tree = scene.visible[:, LENGTH:]
    slots = torch.zeros(DRAFTS, DRAFTS, dtype=torch.int32)
    for row in range(DRAFTS):
        own = scene.table[1, LENGTH : LENGTH + DRAFTS][tree[row]]
        slots[row, : len(own)] = own
    other, other_lse = call(slots, tree.sum(1), torch.arange(DRAFTS + 1), suffix_pages)
    out, _ = merge(one, one_lse.T, other, other_lse.T)
    return out.view(DRAFTS, HEADS, VALUE)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_right_composition_equals_the_answer(page_size: int) -> None:
    """Calls with page ids, and with token slots over pages of one token, equal dense attention at every page size."""
    scene = _Scene(page_size)
    assert (composed(scene, 1) - scene.answer()).abs().max() < 1e-6


def test_token_slots_as_page_ids_are_found() -> None:
    """A call with token slots over pages of 16 tokens raises, because the pool has no such page."""
    with pytest.raises(ContractViolation, match="token slots as page ids"):
        composed(_Scene(16), 16)
