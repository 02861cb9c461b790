"""Tests of the check that a target and its draft model have equal draft shapes, limits and page sizes."""

from __future__ import annotations

import pytest

from draftmark import GeometryError
from draftmark_speculative.geometry_pair import check_pair


@pytest.mark.parametrize(
    ("difference", "field"),
    [
        ({"topk": 2}, "pair.draft"),
        ({"num_draft_tokens": 2}, "pair.draft"),
        ({"max_context_len": 33}, "pair.limits"),
        ({"overlap": True}, "pair.limits"),
        ({"capture_batch_sizes": (1,)}, "pair.limits"),
        ({"page_size": 8}, "pair.page_size"),
    ],
)
def test_a_pair_shares_draft_shape_limits_and_page_size(make_geometry, difference, field):
    """A draft geometry with a different value in a shared field is refused with the field's name."""
    with pytest.raises(GeometryError) as caught:
        check_pair(make_geometry(), make_geometry(**difference))
    assert caught.value.field == field


def test_a_pair_may_differ_in_fields_of_each_model(make_geometry):
    """Heads, head_dim, dtypes and window may differ between target and draft model."""
    target = make_geometry()
    other = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 20, "kv_dtype": "float16", "window_left": 5}
    draft = make_geometry(**other, num_sms=132)
    check_pair(target, draft)
    assert target.max_pages_per_req == draft.max_pages_per_req


def test_capture_sizes_are_compared_without_order(make_geometry):
    """create() sorts and deduplicates, so (4, 8) and (8, 4, 4) are equal limits."""
    check_pair(make_geometry(capture_batch_sizes=(4, 8)), make_geometry(capture_batch_sizes=(8, 4, 4)))


def test_a_latent_target_and_a_gqa_draft_share_pages(make_geometry):
    """The two models of a pair share the page size and page ids; the bytes of a page differ."""
    latent = {"num_kv_heads": 1, "head_dim": 12, "value_dim": 8, "latent": True, "softmax_scale": 0.25}
    target, draft = make_geometry(**latent), make_geometry()
    check_pair(target, draft)
    assert target.max_pages_per_req == draft.max_pages_per_req and target.page_bytes != draft.page_bytes
    with pytest.raises(GeometryError, match=r"pair\.page_size is 8, but the target has 4"):
        check_pair(target, make_geometry(page_size=8))
