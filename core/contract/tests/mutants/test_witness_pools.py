"""Tests that the mutants OG…, OI… and OW… are wrong, and that the backends that they change are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftmark import Form, Geometry, Mode
from draftmark.loaded import LoadedBackend
from draftmark.runtime import KVCache, KVPool, VerifyResult

from . import catalog
from .mutant import Mutant
from .witness_world import CLOSE, Forward, Request, geometry, pools, requests, right, run


def layers_that_skip_one(loaded: LoadedBackend) -> float:
    """A geometry with layers 0, 1 and 3 of the model's pool."""
    shape = geometry()
    every = pools(shape, 40, layers=4)
    return run(loaded, shape, Mode.DECODE, requests(shape, (9, 21)), caches=[every[i] for i in (0, 1, 3)])


def compaction_of_36_layers(loaded: LoadedBackend) -> float:
    """Compaction of an accepted path in a pool of 36 layers."""
    shape = geometry(nodes=4)
    pool = KVPool(shape, 36, 20, 1, "cpu")
    for one in (pool.k, pool.v):
        one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(3)))
    live = requests(shape, (9, 5), 4)
    batch = Forward(shape, Mode.VERIFY, live, pools(shape, 20), (-1, 0, 0, 2)).batch
    index = torch.tensor([[0, 2, 3, 3], [0, 1, 2, 3]])
    expected = [pool.k.clone(), pool.v.clone()]
    size = shape.attention.page_size
    for one, old in zip(expected, (pool.k, pool.v), strict=True):
        for request, path in zip(live, index.tolist(), strict=True):
            for target, source in enumerate(path):
                at, of = request.prefix + target, request.prefix + source
                one[:, request.pages[at // size], at % size] = old[:, request.pages[of // size], of % size]
    result = VerifyResult(torch.tensor([[5, 6, 7, -1], [5, -1, -1, -1]]), torch.tensor([3, 1]), index)
    loaded.tree_ops(shape, torch.device("cpu")).compact(pool, batch, result)
    return max((got - want).abs().max().item() for got, want in zip((pool.k, pool.v), expected, strict=True))


def layers_of_two_packings(loaded: LoadedBackend) -> float:
    """A contiguous layer and a layer with K and V interleaved in each token."""
    shape = geometry(modes=(Mode.DECODE, Mode.EXTEND), forms=(Form.STRIDED_KV,))
    first, second = pools(shape, 40, layers=2)
    packed = torch.cat((second.k, second.v), -1)
    dim = shape.attention.head_dim
    return run(
        loaded, shape, Mode.DECODE, requests(shape, (9, 21)),
        caches=[first, KVCache(packed[..., :dim], packed[..., dim:])],
    )  # fmt: skip


def scattered_pages(loaded: LoadedBackend) -> float:
    """A request with the first and last page of a contiguous run, and other pages between them."""
    shape = geometry()
    return run(loaded, shape, Mode.DECODE, [Request(14, (3, 8, 7, 6)), Request(9, (11, 9, 10))])


def forks(shape: Geometry, prefixes: tuple[int, ...], rows: int, shared: int) -> list[Request]:
    """Return samples of one prompt: the first `shared` pages are the same, all other pages are their own."""
    found = requests(shape, prefixes, rows)
    first = found[0].pages[:shared]
    return [replace(one, pages=(*first, *one.pages[shared:])) for one in found]


def forks_of_equal_length(loaded: LoadedBackend) -> float:
    """Three samples of one prompt with equal lengths and other last pages, and a request of its own."""
    shape = geometry()
    live = forks(shape, (14, 14, 14), 1, 2)
    return run(loaded, shape, Mode.DECODE, [*live, Request(7, (30, 31))])


def forks_at_a_page_end(loaded: LoadedBackend) -> float:
    """Three samples that share all pages of the prompt and verify chains of their own."""
    shape = geometry(nodes=4)
    return run(loaded, shape, Mode.VERIFY, forks(shape, (12, 12, 12), 4, 3))


def forks_of_other_lengths(loaded: LoadedBackend) -> float:
    """Three samples of one prompt that have accepted different numbers of tokens."""
    shape = geometry()
    return run(loaded, shape, Mode.DECODE, forks(shape, (14, 17, 10), 1, 2))


def freed(shape: Geometry, prefix: int, pages: tuple[int, ...], left: int, rows: int = 1) -> Request:
    """Return a request that gave back its pages left of the window: `left` stands in their columns."""
    gone = (prefix - shape.attention.window_left) // shape.attention.page_size
    return Request(prefix, (*(left,) * gone, *pages[gone:]), rows)


def null_pages_left(loaded: LoadedBackend) -> float:
    """Requests longer than the window, with the null page in the columns left of it."""
    shape = geometry(window_left=6, nodes=4)
    ids = tuple(range(1, 12))
    return run(
        loaded, shape, Mode.DECODE,
        [freed(shape, 30, ids, 0), freed(shape, 23, tuple(i + 20 for i in ids), 0), Request(3, (40,))],
    )  # fmt: skip


def stale_page_left(loaded: LoadedBackend) -> float:
    """A request with a page in its columns left of the window that now has another request's large keys."""
    shape = geometry(window_left=6)
    caches = pools(shape, 40)
    caches[0].k[35] *= 1e4
    return run(loaded, shape, Mode.DECODE, [freed(shape, 30, tuple(range(1, 12)), 35)], caches=caches)


WITNESSES: dict[str, Callable[[LoadedBackend], float]] = {
    "OG1": layers_that_skip_one,
    "OG2": compaction_of_36_layers,
    "OG3": layers_of_two_packings,
    "OG4": scattered_pages,
    "OI1": forks_of_equal_length,
    "OI2": forks_at_a_page_end,
    "OI3": forks_of_other_lengths,
    **dict.fromkeys(("OW1", "OW2", "OW3"), null_pages_left),
    "OW4": stale_page_left,
}
"""For each mutant a batch that shows it; the result is the largest difference from the right one."""


@pytest.mark.parametrize("mutant", catalog.named(WITNESSES), ids=lambda one: one.id)
def test_pool_is_read_wrongly_only_by_the_mutant(mutant: Mutant) -> None:
    """The batch gives a wrong result on the mutant and a right one on the backend without the defect."""
    witness = WITNESSES[mutant.id]
    for layout in mutant.layouts:
        assert witness(right(layout)) < CLOSE
        found = witness(mutant.build(layout))
        assert not found < CLOSE
