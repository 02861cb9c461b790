"""A small correct forward. `free_calls` and `guarded_calls` list wrong calls of the engine API around it.

Calls of `free_calls` are always refused, those of `guarded_calls` with DRAFTMARK_GUARD=1. Each entry has a name, a
function that makes the call on a `Rig` (the correct forward), and words that the error must contain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    KVPool,
    SequenceLengths,
    VerifyResult,
    commit_round,
    ragged,
    validate,
    verify_tree,
    write_tail,
)

PARENTS = (-1, 0, 1, 0)
LENS = (5, 2)
ALL = tuple(Mode)


def geometry(**more) -> Geometry:
    """Return a geometry with every mode, draft trees of four nodes, and up to three requests."""
    shape = AttentionShape(4, 2, 8, 4, "float32", "float32", sinks=more.pop("sinks", False))
    limits = Limits(max_num_reqs=3, max_context_len=32, max_extend_tokens=16, row_budgets=(8,))
    return Geometry.create(shape, limits, DraftShape(2, 3, 4, 4), modes=more.pop("modes", ALL), **more)


class Rig:
    """Holds a correct forward: backend, KV pool, q, k, v, and a VERIFY batch with a draft tree for each request.

    Two requests have 5 and 2 committed tokens in pages of 4 tokens.
    """

    def __init__(self, guard: bool | None = None) -> None:
        self.geometry = geometry()
        self.loaded = load("reference")
        self.backend = self.loaded.open(self.geometry, "cpu", guard=guard)
        self.buffers = BatchBuffers(self.geometry, "cpu")
        self.pool = KVPool(self.geometry, 2, 32, 1, "cpu")
        self.pool.k.zero_(), self.pool.v.zero_()
        self.lengths = SequenceLengths(3, self.geometry.max_prefix_len, "cpu")
        self.cache, a = self.pool.layers[0], self.geometry.attention
        self.tree_ops = self.loaded.tree_ops(self.geometry, torch.device("cpu"))
        self.parents = torch.tensor([PARENTS, PARENTS])
        self.batch = self.uniform(Mode.VERIFY, 0, 2, 2, Exact(LENS), tree=True)
        self.fill()
        self.q = torch.randn(8, a.num_qo_heads, a.head_dim)
        self.k, self.v = (torch.randn(8, a.num_kv_heads, a.head_dim) for _ in range(2))
        self.out = torch.empty_like(self.q)

    @property
    def uniform(self):
        """`BatchBuffers.uniform` of this rig's buffers."""
        return self.buffers.uniform

    def fill(self, parents=None) -> None:
        """Fill the static tensors of the batch; `parents` replaces the parents of the draft trees."""
        self.batch.prefix_lens.copy_(torch.tensor(LENS))
        columns = self.geometry.max_pages_per_req
        self.batch.page_table.copy_(1 + torch.arange(2 * columns).view(2, columns))
        write_tail(self.batch, self.geometry, self.parents if parents is None else parents)

    def ready(self) -> Rig:
        """Plan the batch and write its metadata."""
        self.backend.plan(self.batch)
        self.backend.write_metadata(self.batch)
        return self

    def forward(self, **changes) -> torch.Tensor:
        """Run one layer and return its output. `changes` replaces q, k, v, out, cache, or the batch of one call."""
        batch = changes.get("batch", self.batch)
        self.backend.plan(changes.get("planned", batch))
        self.backend.write_metadata(changes.get("written", batch))
        cache = changes.get("cache", self.cache)
        self.backend.write_kv(changes.get("k", self.k), changes.get("v", self.v), cache, batch)
        out = changes.get("out", self.out)
        self.backend.attend(changes.get("q", self.q), cache, changes.get("attended", batch), out)
        return out

    def with_field(self, **fields):
        """Replace fields of the batch, and return the result of `validate`."""
        return validate(replace(self.batch, **fields), self.geometry)

    def extend(self, **changes):
        """Call `ragged` for two prompts of 3 and 2 tokens; `changes` replaces arguments."""
        arguments = {
            "geometry": self.geometry,
            "prefix_lens": torch.zeros(2, dtype=torch.int32),
            "page_table": self.batch.page_table.clone(),
            "q_lens": (3, 2),
            "host": Exact((0, 0)),
        }
        return ragged(**(arguments | changes))

    def verify(self, **changes):
        """Call `verify_tree` with valid arguments; `changes` replaces some of them."""
        tokens = torch.ones(2, 4, dtype=torch.int64)
        return verify_tree(**({"drafts": tokens, "parents": self.parents, "targets": tokens} | changes))

    def accepted(self, index=None) -> VerifyResult:
        """Return a `VerifyResult` that accepts one node per request, with `index` as its accept_index."""
        slots = torch.arange(4).repeat(2, 1) if index is None else torch.tensor(index)
        return VerifyResult(slots, torch.ones(2, dtype=torch.int64), slots)

    def commit(self, **changes) -> None:
        """Call `commit_round` with valid arguments; `changes` replaces some of them."""
        rows, kv = torch.tensor([0, 1]), ((self.tree_ops, self.pool),)
        arguments = {"batch": self.batch, "accepted": self.accepted(), "lengths": self.lengths, "rows": rows, "kv": kv}
        commit_round(**(arguments | changes))


Call = Callable[[Rig], object]
META = torch.device("meta")


def host(kind, *lens) -> Call:
    """Return a function that runs a forward with host lengths `kind(lens)`, which contradict the device."""
    return lambda rig: rig.forward(batch=replace(rig.batch, host=kind(lens)))
