"""Regression tests of sglang#27338: the draft graph's `kv_indices` lacks the `topk` factor; silent corruption.

In SGLang each buffer had its own formula, and one formula lacked a factor. Here only `Geometry` multiplies, and plugins
use its properties. The check compares declared sizes with the needs of batches: enough for every batch, and not more
than the largest batch uses.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from draftmark import DRAFT_MODES, Geometry, Mode
from draftmark.buffers import BufferSpec
from draftmark_reference import sizing

SHAPES = list(product((1, 2, 4), (2, 3, 5), (1, 4), (1, 2, 3)))
"""topk, num_steps, page size, requests; includes topk > 1, several steps and pages of several tokens."""


def csr_buffers(geometry):
    """Return metadata buffers like SGLang's (`kv_indptr`, `kv_indices` by token), sized by the geometry only."""
    reqs = geometry.max_reqs
    return [
        BufferSpec("kv_indptr", (reqs + 1,), "int32", "max_reqs + 1"),
        BufferSpec("kv_indices", (reqs * geometry.max_kv_len,), "int64", "max_kv_len"),
        BufferSpec("slot_mapping", (geometry.max_rows_any,), "int64", "max_rows"),
    ]


def needs(topk, steps, reqs, context):
    """Return the entries that the largest draft batch uses, counted from the definition of a draft step."""
    most = {"kv_indptr": 0, "kv_indices": 0, "slot_mapping": 0, "kv_lens": 0}
    for live, step, prefix in product(range(1, reqs + 1), range(steps - 1), range(context + 1)):
        tail = [branch for _ in range(step + 1) for branch in range(topk)]
        tokens = sum(prefix + len(tail) for _ in range(live))
        counted = {"kv_indptr": live + 1, "kv_indices": tokens, "slot_mapping": live * topk, "kv_lens": live}
        most = {name: max(most[name], counted[name]) for name in most}
    return most


def check_sizing(make_geometry, buffers):
    """Assert that every declared buffer is exactly as large as the largest draft batch needs."""
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
    """Return a variant of `csr_buffers` in which `shape_of` computes the shape of buffer `name`."""
    return lambda geometry: [
        replace(spec, shape=shape_of(geometry)) if spec.name == name else spec for spec in csr_buffers(geometry)
    ]


@pytest.mark.parametrize("buffers", [csr_buffers, sizing.buffers], ids=["csr", "reference"])
def test_declared_sizes_equal_the_largest_draft_batch(make_geometry, buffers):
    """For every topk the buffers have exactly the entries that the largest draft batch needs."""
    check_sizing(make_geometry, buffers)


REMOVED = {
    "kv_indices without topk in the tail": resized(
        "kv_indices", lambda g: (g.max_reqs * (g.limits.max_context_len + g.draft.num_steps - 1),)
    ),
    "kv_indices by context only": resized("kv_indices", lambda g: (g.max_reqs * g.limits.max_context_len,)),
    "slot_mapping without topk": resized("slot_mapping", lambda g: (g.max_reqs,)),
    "pages instead of tokens": resized("kv_indices", lambda g: (g.max_reqs * g.max_pages_per_req,)),
    "indptr without its end": resized("kv_indptr", lambda g: (g.max_reqs,)),
    "topk twice": resized("kv_indices", lambda g: (g.max_reqs * g.draft.topk * g.max_kv_len,)),
}


@pytest.mark.parametrize("removed", REMOVED)
def test_a_plugin_without_a_factor_fails_the_check(make_geometry, removed):
    """The check fails for buffers() without topk or another factor, and for a factor used twice."""
    with pytest.raises(AssertionError, match="the largest batch fills"):
        check_sizing(make_geometry, REMOVED[removed])


@pytest.mark.parametrize("buffers", [csr_buffers, sizing.buffers], ids=["csr", "reference"])
def test_a_geometry_without_topk_fails_the_check(monkeypatch, make_geometry, buffers):
    """Without topk in the geometry, the check fails for every plugin's sizes."""
    extent = Geometry.extent

    def without_topk(self, mode, step=0):
        one = replace(self, draft=replace(self.draft, topk=1))
        return extent(one if mode is Mode.DRAFT else self, mode, step)

    monkeypatch.setattr(Geometry, "extent", without_topk)
    monkeypatch.setattr(Geometry, "max_tail", property(lambda self: max(1, self.draft.num_steps - 1)))
    with pytest.raises(AssertionError, match="the largest batch fills"):
        check_sizing(make_geometry, buffers)
