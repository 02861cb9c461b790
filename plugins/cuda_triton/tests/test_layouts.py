"""`launch.layouts` caches results for each object, and drops them with the object."""

from __future__ import annotations

import weakref

import torch

from draftmark.runtime import KVCache
from draftmark_cuda_triton.launch.layouts import IdentityCache, Layouts


class Thing:
    """An object that supports weak references."""

    def __init__(self, number):
        self.number = number


def test_identity_cache_computes_once_per_object():
    """`IdentityCache` calls its function once for each object; two equal objects count as two."""
    calls = []
    known = IdentityCache(lambda one: calls.append(one.number) or one.number)
    first, second = Thing(1), Thing(1)
    assert [known(one) for one in (first, second, first, second)] == [1] * 4 and calls == [1, 1]


def test_identity_cache_drops_dead_objects():
    """The cache keeps no object alive, and a new object with a reused id is computed again."""
    known, seen = IdentityCache(lambda one: one.number), set()
    for number in range(200):
        one = Thing(number)
        seen.add(id(one))
        assert known(one) == number
        gone = weakref.ref(one)
        del one
        assert gone() is None and not known._cache
    assert len(seen) < 200, "no id was reused, so the test shows nothing"


def test_equal_layouts_are_one_object():
    """Caches of equal layout share one object at any address; a different size, stride or dtype gives another one."""

    def cache(pages=4, size=16, heads=2, dtype=torch.bfloat16, joint=False):
        if joint:
            return KVCache(*torch.zeros(pages, 2, size, heads, 64, dtype=dtype).unbind(1))
        return KVCache(*(torch.zeros(pages, size, heads, 64, dtype=dtype) for _ in "kv"))

    alike = [cache(), cache()]
    others = [cache(5), cache(size=32), cache(heads=4), cache(dtype=torch.float16), cache(joint=True)]
    mixed = KVCache(cache().k, cache(joint=True).v)
    layouts = Layouts()
    found = [layouts.of(one.k, one.v, one) for one in (*alike, *others, mixed)]
    assert found[0] is found[1] and len(set(found)) == 7
