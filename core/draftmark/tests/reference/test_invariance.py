"""The reference backend with `Limits.batch_invariant`: it computes request by request, in products of one width."""

from __future__ import annotations

import pytest
import torch

from draftmark.batch import BatchBuffers
from draftmark.cache import KVCache
from draftmark.geometry import Mode
from draftmark.lengths import Exact
from draftmark_reference import attention

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_product_has_one_request_and_the_full_width(make_geometry, reference, monkeypatch):
    """A batch of three short requests is computed in three products, each over all columns of the page table."""
    geometry = make_geometry(batch_invariant=True, max_num_reqs=3)
    seen = []
    monkeypatch.setattr(
        "draftmark_reference.backend.attend_block",
        lambda q, keys, *rest: (seen.append((len(q), keys.width)), attention.attend_block(q, keys, *rest)),
    )
    backend, buffers, a = reference.open(geometry, "cpu"), BatchBuffers(geometry, "cpu"), geometry.attention
    batch = buffers.uniform(Mode.DECODE, 0, 3, 3, Exact((0, 1, 2)), tree=False)
    pages = torch.zeros(2, a.page_size, a.num_kv_heads, a.head_dim)
    rows = [torch.zeros(3, heads, a.head_dim) for heads in (a.num_qo_heads, a.num_kv_heads)]
    backend.plan(batch)
    backend.write_metadata(batch)
    backend.write_kv(rows[1], rows[1], KVCache(pages, pages.clone()), batch)
    backend.attend(rows[0], KVCache(pages, pages.clone()), batch, torch.empty_like(rows[0]))
    assert seen == [(1, geometry.max_pages_per_req * a.page_size)] * 3
