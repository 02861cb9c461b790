"""Wrong calls that only guard mode refuses."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.draftmark.tests.bad_calls import LENS, META, Call, Rig, host
from draftmark import Mode
from draftmark.runtime import BatchBuffers, Exact, KVCache, Unknown, UpperBound, slots_of


def lie(name: str, index: int, value: int) -> Call:
    """Return a function that writes a wrong number into a tensor of the filled batch, then runs a forward."""

    def call(rig: Rig) -> object:
        target = {"mask": rig.batch.tail.mask, "depth": rig.batch.tail.depth}.get(name, getattr(rig.batch, name, None))
        target.view(-1)[index] = value
        return rig.forward()

    return call


def forward(**changes) -> Call:
    """Return a function that runs a forward; each entry of `changes` makes a replaced argument from the rig."""
    return lambda rig: rig.forward(**{name: make(rig) for name, make in changes.items()})


def cycle(*parents: int) -> Call:
    """Return a function that calls `write_tail` with these parents for both requests."""
    return lambda rig: rig.fill(torch.tensor([parents, parents]))


def forgotten_tail(rig: Rig) -> object:
    """Run a forward over new buffers, without `write_tail`."""
    batch = BatchBuffers(rig.geometry, "cpu").uniform(Mode.VERIFY, 0, 2, 2, Exact(LENS), tree=True)
    batch.prefix_lens.copy_(rig.batch.prefix_lens)
    batch.page_table.copy_(rig.batch.page_table)
    return rig.forward(batch=batch)


def without(step: str) -> Call:
    """Return a function that runs a forward on a new batch but omits one step, `plan` or `write_metadata`."""

    def call(rig: Rig) -> object:
        later = rig.uniform(Mode.VERIFY, 0, 2, 2, UpperBound(LENS), tree=True)
        rig.forward()
        if step != "plan":
            rig.backend.plan(later)
        if step != "write_metadata":
            rig.backend.write_metadata(later)
        return rig.backend.attend(rig.q, rig.cache, later, rig.out)

    return call


GUARDED: dict[str, tuple[Call, str]] = {
    # -- backend calls in a wrong order
    "plan never called": (lambda rig: rig.backend.write_metadata(rig.batch), "call plan(batch)"),
    "plan forgotten": (without("plan"), "call plan(batch)"),
    "write_metadata forgotten": (without("write_metadata"), "call write_metadata(batch)"),
    "write_metadata never called": (
        lambda rig: (rig.backend.plan(rig.batch), rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out)),
        "call write_metadata(batch)",
    ),
    "write_kv first": (lambda rig: rig.backend.write_kv(rig.k, rig.v, rig.cache, rig.batch), "write_metadata"),
    "another batch planned": (
        forward(planned=lambda rig: rig.uniform(Mode.DECODE, 0, 2, 2, Exact(LENS), tree=False)), "call plan(batch)"
    ),
    "another batch attended": (
        forward(attended=lambda rig: rig.uniform(Mode.DECODE, 0, 2, 2, Exact(LENS), tree=False)), "write_metadata"
    ),
    "plan of nothing": (lambda rig: rig.backend.plan(None), "batch is None"),
    "write_metadata of nothing": (lambda rig: rig.backend.write_metadata(None), "batch is None"),
    "attend of nothing": (lambda rig: rig.ready().backend.attend(rig.q, rig.cache, None, rig.out), "batch is None"),
    "plan of too many rows": (lambda rig: rig.backend.plan(replace(rig.batch, num_rows=9)), "num_rows is 9"),
    # -- draft trees without a written tail or with invalid parents
    "write_tail forgotten": (forgotten_tail, "call write_tail"),
    "a cycle": (cycle(-1, 2, 1, 0), "parents[0, 1] is 2"),
    "a parent past the tree": (cycle(-1, 0, 0, 9), "parents[0, 3] is 9"),
    "its own parent": (cycle(-1, 0, 2, 0), "parents[0, 2] is 2"),
    "a parent below -1": (cycle(-2, 0, 1, 0), "parents[0, 0] is -2"),
    "a later parent": (cycle(-1, 0, 3, 0), "parents[0, 2] is 3"),
    "verify a cycle": (lambda rig: rig.verify(parents=torch.tensor([[-1, 2, 1, 0]] * 2)), "parents[0, 1] is 2"),
    "verify negative targets": (
        lambda rig: rig.verify(targets=torch.full((2, 4), -1, dtype=torch.int64)), "targets contains -1"
    ),
    "a row that does not see itself": (lie("mask", 1, 1), "tail.mask of row 1 of request 0"),
    "a row that sees a later slot": (lie("mask", 1, 0b1011), "tail.mask"),
    "a row without its ancestors": (lie("mask", 2, 0b100), "tail.mask"),
    "a wrong depth": (lie("depth", 2, 5), "positions"),
    "accepted slots that descend": (
        lambda rig: rig.tree_ops.compact(rig.pool, rig.batch, rig.accepted([[0, 0, 2, 3]] * 2)), "accept_index[0, 1]"
    ),
    "accepted slots past the tree": (
        lambda rig: rig.tree_ops.compact(rig.pool, rig.batch, rig.accepted([[0, 1, 2, 9]] * 2)), "accept_index[0, 3]"
    ),
    # -- wrong lengths and rows in device tensors
    "exact lengths too long": (host(Exact, 7, 2), "prefix_lens[0] is 5"),
    "exact lengths too short": (host(Exact, 4, 2), "prefix_lens[0] is 5"),
    "exact lengths swapped": (host(Exact, 2, 5), "prefix_lens[0] is 5"),
    "a bound too short": (host(UpperBound, 5, 1), "prefix_lens[1] is 2"),
    "unknown bound too short": (
        lambda rig: rig.forward(batch=replace(rig.batch, host=Unknown(2, 3))), "prefix_lens[0] is 5"
    ),
    "a prefix below 0": (lie("prefix_lens", 0, -1), "prefix_lens[0] is -1"),
    "a prefix past the limit": (lie("prefix_lens", 0, 99), "prefix_lens[0] is 99"),
    "a prefix changed after write_tail": (
        lambda rig: (rig.batch.prefix_lens.add_(1), rig.forward(batch=replace(rig.batch, host=Exact((6, 3))))),
        "positions[0] is 5",
    ),
    "a padded request with a prefix": (
        lambda rig: rig.forward(batch=replace(rig.batch, num_reqs=1, host=Exact((5,)))), "request 1 is padding"
    ),
    "positions of another step": (lie("positions", 3, 30), "positions[3] is 30"),
    "q_indptr that does not start at 0": (
        lambda rig: rig.forward(batch=replace(rig.batch, q_indptr=torch.tensor([1, 4, 8], dtype=torch.int32))),
        "q_indptr is [1, 4, 8]",
    ),
    "q_indptr of other rows": (
        lambda rig: rig.forward(batch=replace(rig.batch, q_indptr=torch.tensor([0, 5, 8], dtype=torch.int32))),
        "q_indptr is [0, 5, 8]",
    ),
    # -- wrong page ids in the page table
    "a page below 0": (lie("page_table", 0, -1), "page_table[0, 0] is -1"),
    "a page past the pool": (lie("page_table", 0, 32), "page_table has page 32"),
    "a null page of a live request": (lie("page_table", 1, 0), "null pages"),
    "pages never filled": (
        lambda rig: (rig.batch.page_table.zero_(), rig.forward()), "page_table[0, 0] is 0"
    ),
    "two requests on one page": (
        lambda rig: (rig.batch.page_table[1].copy_(rig.batch.page_table[0].roll(-1)), rig.forward()), "both write"
    ),
    "move past the pool": (lambda rig: rig.pool.move(torch.tensor([999]), torch.tensor([1])), "source has slot 999"),
    "move to slot -1": (lambda rig: rig.pool.move(torch.tensor([1]), torch.tensor([-1])), "target has slot -1"),
    "slots_of past the table": (
        lambda rig: slots_of(rig.batch.page_table, torch.full((2, 1), 999), 4), "positions has 999"
    ),
    # -- q, k, v, out or cache that do not match the batch
    "q of 7 rows": (forward(q=lambda rig: rig.q[:7]), "q is a tensor float32 [7, 4, 8], but the batch has 8 rows"),
    "q of two heads": (forward(q=lambda rig: rig.q[:, :2]), "q is"),
    "q of half precision": (forward(q=lambda rig: rig.q.half()), "q is a tensor float16"),
    "q flat": (forward(q=lambda rig: rig.q.flatten(1)), "q is a tensor float32 [8, 32]"),
    "q elsewhere": (forward(q=lambda rig: rig.q.to(META)), "q is on meta"),
    "q a list": (forward(q=lambda rig: [1.0]), "q is [1.0]"),
    "q transposed": (forward(q=lambda rig: rig.q.transpose(1, 2).contiguous().transpose(1, 2)), "q has strides"),
    "k of 7 rows": (forward(k=lambda rig: rig.k[:7]), "k is"),
    "k of query heads": (forward(k=lambda rig: rig.q), "k is"),
    "k of half precision": (forward(k=lambda rig: rig.k.half()), "k is a tensor float16"),
    "v of 64 bits": (forward(v=lambda rig: rig.v.double()), "v is a tensor float64"),
    "v of another width": (forward(v=lambda rig: rig.v[..., :4]), "v is"),
    "v None": (forward(v=lambda rig: None), "v is None"),
    "out of 9 rows": (forward(out=lambda rig: torch.empty(9, 4, 8)), "out is"),
    "out of half precision": (forward(out=lambda rig: rig.out.half()), "out is a tensor float16"),
    "out not contiguous": (forward(out=lambda rig: torch.empty(8, 8, 8)[:, ::2]), "out has strides"),
    "out in q": (forward(out=lambda rig: rig.q), "out shares memory with q"),
    "out in the cache": (
        forward(out=lambda rig: rig.cache.k.view(-1)[64:320].view(8, 4, 8)), "out shares memory with the cache"
    ),
    "out of integers": (forward(out=lambda rig: rig.out.int()), "out is a tensor int32"),
    "cache None": (forward(cache=lambda rig: None), "cache is None"),
    "cache of another page size": (
        forward(cache=lambda rig: KVCache(torch.zeros(32, 8, 2, 8), torch.zeros(32, 8, 2, 8))), "cache.k is"
    ),
    "cache of half precision": (
        forward(cache=lambda rig: KVCache(rig.cache.k.half(), rig.cache.v.half())), "cache.k is a tensor float16"
    ),
    "cache with a short v": (
        forward(cache=lambda rig: KVCache(rig.cache.k, rig.cache.v[:, :2])), "cache.v is"
    ),
    "cache with unwanted sinks": (
        forward(cache=lambda rig: KVCache(rig.cache.k, rig.cache.v, sinks=torch.zeros(4))), "sinks"
    ),
    "all layers as one cache": (
        forward(cache=lambda rig: KVCache(rig.pool.k, rig.pool.v)), "cache.k is a tensor float32 [2, 32"
    ),
    # -- wrong values in SequenceLengths.advance
    "advance past the rows": (
        lambda rig: rig.lengths.advance(torch.tensor([9]), torch.tensor([1])), "rows has 9"
    ),
    "advance a row twice": (
        lambda rig: rig.lengths.advance(torch.tensor([0, 0]), torch.tensor([1, 1])), "rows has 0 twice"
    ),
    "advance by -1": (lambda rig: rig.lengths.advance(torch.tensor([0]), torch.tensor([-1])), "advances by -1"),
    "advance past the limit": (lambda rig: rig.lengths.advance(torch.tensor([0]), torch.tensor([99])), "by 99"),
}  # fmt: skip
