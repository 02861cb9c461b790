"""Rounds of two tensor-parallel ranks over latent rows: each rank stores whole rows, and their heads are the whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from draftmark import DraftShape, Geometry, GeometryError, Limits, Mode, load
from draftmark.runtime import (
    BatchBuffers,
    Chosen,
    ForwardBatch,
    KVPool,
    SequenceLengths,
    VerifyResult,
    commit_round,
    ragged,
    write_tail,
)
from draftmark_engines.ranks import step_digest
from draftmark_tools.models import latent_shape
from engines.common.tests.two_ranks import results_of_two_ranks

MODEL = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "num_attention_heads": 6, "qk_nope_head_dim": 8}
PAGE, PARENTS, PATHS = 4, ((-1, 0, 0, 2), (-1, 0, 1, 1)), ((0, 2, 3), (0, 1))
ROUNDS = ((Mode.EXTEND, (6, 3)), (Mode.VERIFY, ()), (Mode.DECODE, ()), (Mode.VERIFY, ()))
MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
CHOSEN_WIDTH = 12
"""Keys of a row in a layer with chosen keys; the longest prefix has more."""


@dataclass
class Rank:
    """One rank of a latent layer, and two requests. A rank has 6 or 3 heads, which no tile of 4 divides.

    Attributes:
        sparse: each row attends to chosen keys only, which every rank's indexer chooses for itself.
    """

    rank: int
    ranks: int
    sparse: bool = False

    def __post_init__(self) -> None:
        model = MODEL | ({"index_topk": CHOSEN_WIDTH} if self.sparse else {})
        shape = latent_shape(model, ranks=self.ranks, page_size=PAGE, dtype="float32")
        self.geometry = Geometry.create(shape, Limits(2, 64, 16), DraftShape(2, 1, 4), modes=MODES)
        self.backend = load("reference").open(self.geometry, "cpu", guard=True)
        self.operations = load("reference").tree_ops(self.geometry, "cpu")
        width = int(self.geometry.max_pages_per_req)
        self.pool = KVPool(self.geometry, 1, 1 + 2 * width, 1, "cpu")
        self.table = torch.arange(1, 1 + 2 * width, dtype=torch.int32).view(2, width).flip(0)
        self.lengths = SequenceLengths(2, self.geometry.max_prefix_len, "cpu")
        self.buffers = BatchBuffers(self.geometry, "cpu")
        self.random = torch.Generator().manual_seed(0)
        self.indexer = torch.Generator().manual_seed(1)
        self.outs: list[torch.Tensor] = []
        self.digests: list[torch.Tensor] = []

    def batch(self, mode: Mode, q_lens: tuple[int, ...]) -> ForwardBatch:
        """Return a filled batch of both requests."""
        prefix, host = self.lengths.device[:2], self.lengths.exact([0, 1])
        if mode is Mode.EXTEND:
            lists = self.choose(q_lens) if self.sparse else None
            return ragged(self.geometry, prefix.clone(), self.table, q_lens, host, chosen=lists)
        batch = self.buffers.uniform(mode, 0, 2, 2, host, tree=mode is Mode.VERIFY)
        batch.prefix_lens.copy_(prefix)
        batch.page_table.copy_(self.table)
        write_tail(batch, self.geometry, torch.tensor(PARENTS) if mode is Mode.VERIFY else None)
        if batch.chosen is not None:
            lists = self.choose((4, 4) if mode is Mode.VERIFY else (1, 1))
            batch.chosen.slots.copy_(lists.slots)
            batch.chosen.counts.copy_(lists.counts)
        return batch

    def choose(self, rows: tuple[int, ...]) -> Chosen:
        """Return random lists of keys for these rows of each request: keys of its prefix, and the row itself."""
        slots = torch.full((sum(rows), CHOSEN_WIDTH), -1, dtype=torch.int32)
        counts = torch.zeros(sum(rows), dtype=torch.int32)
        each = ((request, row) for request, count in enumerate(rows) for row in range(count))
        for at, (request, row) in enumerate(each):
            prefix = int(self.lengths.device[request])
            keys = [*torch.randperm(prefix, generator=self.indexer)[: CHOSEN_WIDTH - 1].tolist(), prefix + row]
            pages = self.table[request, [key // PAGE for key in keys]]
            slots[at, : len(keys)] = pages * PAGE + torch.tensor([key % PAGE for key in keys])
            counts[at] = len(keys)
        return Chosen(slots, counts)

    def step(self, mode: Mode, q_lens: tuple[int, ...]) -> None:
        """Run one forward of the layer on this rank's heads, and end the round."""
        batch, a, cache = self.batch(mode, q_lens), self.geometry.attention, self.pool.layers[0]
        q = torch.randn(batch.num_rows, MODEL["num_attention_heads"], a.head_dim, generator=self.random)
        rows = torch.randn(batch.num_rows, 1, a.head_dim, generator=self.random)
        q = q.chunk(self.ranks, 1)[self.rank].contiguous()
        self.backend.plan(batch)
        self.backend.write_metadata(batch)
        self.backend.write_kv(rows, None, cache, batch)
        out = torch.full((batch.num_rows, a.num_qo_heads, a.value_width), float("nan"))
        self.backend.attend(q, cache, batch, out)
        self.outs.append(out)
        self.digests.append(step_digest(batch, PAGE))
        accepted, most = None, max(q_lens, default=1)
        if mode is Mode.VERIFY:
            index = torch.tensor([[*path, *range(len(path), 4)] for path in PATHS])
            accepted = VerifyResult(torch.full_like(index, -1), torch.tensor([len(path) for path in PATHS]), index)
            most = 4
        self.lengths.dispatched([0, 1], most)
        commit_round(batch, accepted, self.lengths, torch.tensor([0, 1]), ((self.operations, self.pool),))
        counts = batch.q_indptr.diff() if accepted is None else accepted.accept_lens
        self.lengths.settle([0, 1], counts.tolist(), most)

    def run(self) -> Rank:
        """Run a prefill, two rounds of trees and a plain decode between them."""
        for mode, q_lens in ROUNDS:
            self.step(mode, q_lens)
        return self

    def committed(self) -> torch.Tensor:
        """Return the stored rows of both requests, ``[tokens, 1, head_dim]``."""
        found = []
        for pages, length in zip(self.table, self.lengths.device[:2].tolist(), strict=True):
            found.append(self.pool.k[0, pages.long()].flatten(0, 1)[:length])
        return torch.cat(found)


def _serve(rank: int, results) -> None:
    import torch.distributed as dist

    for sparse in (False, True):
        mine = Rank(rank, 2, sparse).run()
        every = []
        for tensor in (*mine.outs, mine.committed(), torch.stack(mine.digests)):
            parts = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(parts, tensor.contiguous())
            every.append([part.tolist() for part in parts])
        results.put((rank, sparse, every))


@pytest.mark.long
def test_two_ranks_serve_as_one():
    """Two ranks store the rows of one, give its output by heads, and agree on each step, also with chosen keys."""
    found = {(rank, sparse): every for rank, sparse, every in results_of_two_ranks(_serve, each=2)}
    wholes = [Rank(0, 1, sparse).run() for sparse in (False, True)]
    for sparse, whole in enumerate(wholes):
        *outs, rows, digests = found[0, bool(sparse)]
        for parts, wanted in zip(outs, whole.outs, strict=True):
            torch.testing.assert_close(torch.cat([torch.tensor(one) for one in parts], 1), wanted)
        assert whole.lengths.device.tolist()[:2] == [13, 8]
        assert rows[0] == rows[1] == whole.committed().tolist()
        assert digests[0] == digests[1]
    assert not torch.allclose(wholes[0].outs[-1], wholes[1].outs[-1]), "chosen keys change the output"


@pytest.mark.parametrize("ranks", [4, 5, 12])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks):
    """A rank has whole heads."""
    with pytest.raises(
        GeometryError, match=f"ranks is {ranks}, but it must be an integer that divides the 6 query heads"
    ):
        latent_shape(MODEL, ranks=ranks, page_size=PAGE)
