"""Seed (c), sglang#27338: the draft graph's `kv_indices` lacks the `topk` factor; silent corruption.

There each buffer re-derived its own formula, and one forgot a factor. Here `Geometry` is the one place that
multiplies, plugins name its dimensions, and declared sizes are compared with what batches can need: enough for
every batch (coverage), and not more than the largest takes (tightness).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from draftmark import DRAFT_MODES, Geometry, Mode
from draftmark.buffers import BufferSpec, Role, Unit
from draftmark.reference import sizing

SHAPES = list(product((1, 2, 4), (2, 3, 5), (1, 4), (1, 2, 3)))
"""topk, num_steps, page size, requests: topk > 1, several steps and pages of more than a token among them."""


def csr_buffers(geometry):
    """A token-indexed layout as an engine of today has, sized by the geometry's names only."""
    reqs = geometry.max_reqs
    return [
        BufferSpec("kv_indptr", Role.KV_INDPTR, (reqs + 1,), "int32", Unit.ROWS, "max_reqs + 1"),
        BufferSpec("kv_indices", Role.KV_INDICES, (reqs * geometry.max_kv_len,), "int64", Unit.TOKENS, "max_kv_len"),
        BufferSpec("slot_mapping", Role.SLOT_MAPPING, (geometry.max_rows_any,), "int64", Unit.TOKENS, "max_rows"),
    ]


def needs(topk, steps, reqs, context):
    """Entries that the largest draft batch fills, counted batch by batch from the definition of a draft step."""
    most = {"kv_indptr": 0, "kv_indices": 0, "slot_mapping": 0, "kv_lens": 0}
    for live, step, prefix in product(range(1, reqs + 1), range(steps - 1), range(context + 1)):
        tail = [branch for _ in range(step + 1) for branch in range(topk)]
        tokens = sum(prefix + len(tail) for _ in range(live))
        counted = {"kv_indptr": live + 1, "kv_indices": tokens, "slot_mapping": live * topk, "kv_lens": live}
        most = {name: max(most[name], counted[name]) for name in most}
    return most


def check_sizing(make_geometry, buffers):
    """Every declared buffer holds what the largest draft batch needs, and no more than that."""
    for topk, steps, page_size, reqs in SHAPES:
        context = 9
        fields = {"topk": topk, "num_steps": steps, "page_size": page_size, "max_num_reqs": reqs}
        geometry = make_geometry(**fields, max_context_len=context, max_extend_tokens=1, modes=DRAFT_MODES)
        need = needs(topk, steps, reqs, context)
        for spec in buffers(geometry):
            shape = f"{spec.name} declares {spec.numel}, the largest batch fills {need[spec.name]}: {fields}"
            assert spec.numel >= need[spec.name], shape
            assert spec.numel <= need[spec.name], shape


def resized(name, shape_of):
    """csr_buffers with one shape replaced."""
    return lambda geometry: [
        replace(spec, shape=shape_of(geometry)) if spec.name == name else spec for spec in csr_buffers(geometry)
    ]


@pytest.mark.parametrize("buffers", [csr_buffers, sizing.buffers], ids=["csr", "reference"])
def test_declared_sizes_are_exactly_what_draft_batches_need(make_geometry, buffers):
    """The geometry's dimensions give buffers that are neither an entry short nor an entry long, for every topk."""
    check_sizing(make_geometry, buffers)


REMOVED = {
    "kv_indices without topk in the tail": resized(
        "kv_indices", lambda g: (g.max_reqs * (g.limits.max_context_len + g.draft.num_steps - 1),)
    ),
    "kv_indices by context alone": resized("kv_indices", lambda g: (g.max_reqs * g.limits.max_context_len,)),
    "slot_mapping without topk": resized("slot_mapping", lambda g: (g.max_reqs,)),
    "pages where tokens are counted": resized("kv_indices", lambda g: (g.max_reqs * g.max_pages_per_req,)),
    "indptr without its end": resized("kv_indptr", lambda g: (g.max_reqs,)),
    "topk times too much": resized("kv_indices", lambda g: (g.max_reqs * g.draft.topk * g.max_kv_len,)),
}


@pytest.mark.parametrize("removed", REMOVED)
def test_a_plugin_that_drops_a_factor_fails_the_check(make_geometry, removed):
    """A backend whose buffers() forgets topk, or any other factor, or takes one twice, is red in the same check."""
    with pytest.raises(AssertionError, match="the largest batch fills"):
        check_sizing(make_geometry, REMOVED[removed])


@pytest.mark.parametrize("buffers", [csr_buffers, sizing.buffers], ids=["csr", "reference"])
def test_a_geometry_that_drops_topk_fails_the_check(monkeypatch, make_geometry, buffers):
    """The factor has one home: remove it there, and every plugin's sizing is red."""
    extent = Geometry.extent

    def without_topk(self, mode, step=0):
        one = replace(self, draft=replace(self.draft, topk=1))
        return extent(one if mode is Mode.DRAFT else self, mode, step)

    monkeypatch.setattr(Geometry, "extent", without_topk)
    monkeypatch.setattr(Geometry, "max_tail", property(lambda self: max(1, self.draft.num_steps - 1)))
    with pytest.raises(AssertionError, match="the largest batch fills"):
        check_sizing(make_geometry, buffers)
