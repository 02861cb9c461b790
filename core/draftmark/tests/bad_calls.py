"""A small correct forward, and wrong calls of the engine API around it.

Calls in `FREE` are always refused. Calls in `GUARDED` are refused with DRAFTMARK_GUARD=1. Each entry has a name, a
function that makes the call on a `Rig` (the correct forward), and words that the error must contain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from draftmark import AttentionShape, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark.runtime import (
    Arena,
    AsyncHostCopy,
    BatchBuffers,
    Block,
    Causal,
    Exact,
    GraphKey,
    KVCache,
    KVPool,
    Program,
    SequenceLengths,
    Tree,
    Unknown,
    UpperBound,
    VerifyResult,
    commit_round,
    device_profile,
    fence,
    graph_state_for,
    padded_batch_size,
    ragged,
    slots_of,
    to_device,
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


def commit(**changes) -> Call:
    """Return a function that calls `commit_round`; `changes` replaces valid arguments."""
    return lambda rig: rig.commit(**changes)


def uniform(**changes) -> Call:
    """Return a function that calls `BatchBuffers.uniform`; `changes` replaces valid arguments."""
    right = {"mode": Mode.VERIFY, "step": 0, "padded_reqs": 2, "num_reqs": 2, "host": Exact(LENS), "tree": True}
    return lambda rig: rig.uniform(**(right | changes))


def budget(**changes) -> Call:
    """Return a function that calls `BatchBuffers.ragged_verify`; `changes` replaces valid arguments."""
    right = {"budget": 8, "num_reqs": 2, "host": Exact(LENS), "tree": True}
    return lambda rig: rig.buffers.ragged_verify(**(right | changes))


def pool(**changes) -> Call:
    """Return a function that creates a `KVPool`; `changes` replaces valid arguments."""
    right = {"num_layers": 1, "num_pages": 4, "null_pages": 1, "device": "cpu"}
    return lambda rig: KVPool(**({"geometry": rig.geometry} | right | changes))


def extend(**changes) -> Call:
    """Return a function that calls `ragged`; `changes` replaces valid arguments."""
    return lambda rig: rig.extend(**changes)


def field(**changes) -> Call:
    """Return a function that calls `validate` on a batch in which `changes` replaces fields."""
    return lambda rig: rig.with_field(**changes)


def tail(parents, **fields) -> Call:
    """Return a function that calls `write_tail` with `parents`; `fields` replaces fields of the batch."""
    return lambda rig: write_tail(replace(rig.batch, **fields), rig.geometry, parents)


FREE: dict[str, tuple[Call, str]] = {
    # -- wrong arguments of BatchBuffers.uniform
    "mode as text": (uniform(mode="DECODE"), "mode is 'DECODE'"),
    "mode as its value": (uniform(mode="decode"), "Mode.DECODE"),
    "mode unknown": (uniform(mode="prefill"), "mode is 'prefill'"),
    "mode None": (uniform(mode=None), "mode is None"),
    "mode extend": (uniform(mode=Mode.EXTEND), "ragged"),
    "mode ragged_verify": (uniform(mode=Mode.RAGGED_VERIFY), "ragged_verify"),
    "mode not in the geometry": (
        lambda rig: BatchBuffers(geometry(modes=(Mode.EXTEND, Mode.DECODE)), "cpu").uniform(
            Mode.VERIFY, 0, 1, 1, Exact((0,)), tree=False
        ),
        "the geometry serves extend, decode",
    ),
    "step of verify": (uniform(step=1), "step is 1"),
    "step negative": (uniform(mode=Mode.DRAFT, step=-1), "step is -1"),
    "step past the last": (uniform(mode=Mode.DRAFT, step=2), "step is 2"),
    "step as text": (uniform(step="0"), "step is '0'"),
    "step True": (uniform(step=True), "step is True"),
    "padded_reqs 0": (uniform(padded_reqs=0, num_reqs=0, host=Exact(())), "padded_reqs is 0"),
    "padded_reqs negative": (uniform(padded_reqs=-1), "padded_reqs is -1"),
    "padded_reqs past the largest": (uniform(padded_reqs=4), "padded_reqs is 4"),
    "padded_reqs fraction": (uniform(padded_reqs=2.0), "padded_reqs is 2.0"),
    "padded_reqs a tensor": (uniform(padded_reqs=torch.tensor(2)), "padded_reqs is a tensor"),
    "num_reqs above padded": (uniform(num_reqs=3), "num_reqs is 3"),
    "num_reqs negative": (uniform(num_reqs=-1), "num_reqs is -1"),
    "num_reqs None": (uniform(num_reqs=None), "num_reqs is None"),
    "host a list": (uniform(host=[5, 2]), "host is [5, 2]"),
    "host None": (uniform(host=None), "host is None"),
    "host a tensor": (uniform(host=torch.tensor(LENS)), "host is a tensor"),
    "host of one request": (uniform(host=Exact((5,))), "cover 1 requests, but 2 are live"),
    "host of three requests": (uniform(host=Unknown(3, 32)), "cover 3 requests"),
    "host negative": (uniform(host=Exact((5, -2))), "-2"),
    "host past the limit": (uniform(host=UpperBound((5, 99))), "99"),
    "host of fractions": (uniform(host=Exact((5.0, 2.0))), "host.lens"),
    "host as a list of lens": (uniform(host=Exact([5, 2])), "host.lens is [5, 2]"),
    "host bound as text": (uniform(host=Unknown(2, "32")), "host.bound is '32'"),
    "tree as text": (uniform(tree="yes"), "tree is 'yes'"),
    "tree in draft_block": (uniform(mode=Mode.DRAFT_BLOCK), "draft_block"),
    "causal as text": (uniform(mode=Mode.DRAFT_BLOCK, tree=False, causal="yes"), "causal is 'yes'"),
    "causal in verify": (uniform(causal=True), "causal is True"),
    # -- wrong arguments of BatchBuffers.ragged_verify
    "budget 0": (budget(budget=0), "budget is 0"),
    "budget past the largest": (budget(budget=9), "budget is 9"),
    "budget as text": (budget(budget="8"), "budget is '8'"),
    "ragged padded_reqs past the largest": (budget(padded_reqs=4), "padded_reqs is 4"),
    "ragged num_reqs": (budget(num_reqs=9), "num_reqs is 9"),
    "ragged host": (budget(host=Exact((1,))), "cover 1"),
    "ragged tree None": (budget(tree=None), "tree is None"),
    "q_bounds of two": (budget(q_bounds=(4, 4)), "q_bounds is (4, 4)"),
    "q_bounds empty": (budget(q_bounds=()), "q_bounds is ()"),
    "q_bounds past D": (budget(q_bounds=(4, 5, 4)), "q_bounds is (4, 5, 4)"),
    "q_bounds negative": (budget(q_bounds=(4, -1, 4)), "q_bounds is (4, -1, 4)"),
    "q_bounds a list": (budget(q_bounds=[4, 4, 4]), "q_bounds is [4, 4, 4]"),
    "ragged_verify not in the geometry": (
        lambda rig: BatchBuffers(geometry(modes=(Mode.DECODE,)), "cpu").ragged_verify(4, 1, Exact((0,)), tree=False),
        "ragged_verify",
    ),
    # -- wrong arguments of the constructors of BatchBuffers and KVPool
    "buffers without a geometry": (lambda rig: BatchBuffers(None, "cpu"), "geometry is None"),
    "buffers on a bogus device": (lambda rig: BatchBuffers(rig.geometry, "bogus"), "'bogus'"),
    "buffers on an absent device": (lambda rig: BatchBuffers(rig.geometry, "mps"), "mps"),
    "buffers on no device": (lambda rig: BatchBuffers(rig.geometry, None), "None"),
    "pool of 0 layers": (pool(num_layers=0), "num_layers is 0"),
    "pool of -1 pages": (pool(num_pages=-1), "num_pages is -1"),
    "pool of 0 pages": (pool(num_pages=0, null_pages=0), "num_pages is 0"),
    "pool of 99 null pages": (pool(null_pages=99), "null_pages is 99"),
    "pool of -1 null pages": (pool(null_pages=-1), "null_pages is -1"),
    "pool of 1.5 layers": (pool(num_layers=1.5), "num_layers is 1.5"),
    "pool of text pages": (pool(num_pages="4"), "num_pages is '4'"),
    "pool without a geometry": (pool(geometry=None), "geometry is None"),
    "pool on a bogus device": (pool(device="bogus"), "'bogus'"),
    "pool on an absent device": (pool(device="mps"), "mps"),
    "pool on device 7": (pool(device=7.5), "7.5"),
    "move to fewer slots": (lambda rig: rig.pool.move(torch.tensor([1, 2]), torch.tensor([1])), "source has 2 slots"),
    "move of 32-bit slots": (
        lambda rig: rig.pool.move(torch.tensor([1], dtype=torch.int32), torch.tensor([1])),
        "source is int32",
    ),
    "move of a list": (lambda rig: rig.pool.move([1], [2]), "source is [1]"),
    "scale of float32 KV": (lambda rig: KVCache(rig.cache.k, rig.cache.v, torch.ones(1)), "k_scale"),
    "sinks of half precision": (
        lambda rig: KVCache(rig.cache.k, rig.cache.v, sinks=torch.ones(4).half()),
        "sinks are float16",
    ),
    "slots_of a 64-bit table": (
        lambda rig: slots_of(rig.batch.page_table.long(), torch.zeros(2, 1, dtype=torch.int64), 4),
        "page_table",
    ),
    "slots_of too few rows": (
        lambda rig: slots_of(rig.batch.page_table, torch.zeros(1, 1, dtype=torch.int64), 4),
        "positions has 1",
    ),
    "slots_of page size 0": (
        lambda rig: slots_of(rig.batch.page_table, torch.zeros(2, 1, dtype=torch.int64), 0),
        "page_size is 0",
    ),
    # -- wrong arguments of ragged, which makes EXTEND batches
    "ragged negative length": (extend(q_lens=(3, -1)), "q_lens is (3, -1)"),
    "ragged list": (extend(q_lens=[3, 2]), "q_lens is [3, 2]"),
    "ragged fractions": (extend(q_lens=(3.0, 2.0)), "q_lens is (3.0, 2.0)"),
    "ragged tensor": (extend(q_lens=torch.tensor([3, 2])), "q_lens is a tensor"),
    "ragged empty": (extend(q_lens=(), prefix_lens=torch.zeros(0, dtype=torch.int32)), "q_lens is ()"),
    "ragged too many tokens": (extend(q_lens=(16, 1)), "max_extend_tokens is 16"),
    "ragged one request": (extend(q_lens=(3,)), "prefix_lens is int32 [2]"),
    "ragged 64-bit prefix": (extend(prefix_lens=torch.zeros(2, dtype=torch.int64)), "prefix_lens is int64"),
    "ragged prefix as a list": (extend(prefix_lens=[0, 0]), "prefix_lens is [0, 0]"),
    "ragged narrow table": (extend(page_table=torch.zeros(2, 3, dtype=torch.int32)), "page_table is int32 [2, 3]"),
    "ragged 64-bit table": (extend(page_table=torch.zeros(2, 10, dtype=torch.int64)), "page_table is int64"),
    "ragged table of one": (extend(page_table=torch.zeros(1, 10, dtype=torch.int32)), "page_table is int32 [1"),
    "ragged table elsewhere": (
        lambda rig: rig.extend(page_table=rig.batch.page_table.to(META)),
        "page_table is on meta",
    ),
    "ragged no host": (extend(host=None), "host is None"),
    "ragged host of three": (extend(host=Exact((0, 0, 0))), "cover 3"),
    "ragged too many live": (extend(num_reqs=3), "num_reqs is 3"),
    "ragged slots without the form": (extend(slots=torch.zeros(5, dtype=torch.int64)), "lacks Form.ENGINE_SLOTS"),
    "ragged no geometry": (extend(geometry=None), "geometry is None"),
    "ragged without slots": (lambda rig: rig.extend(geometry=geometry(forms=(Form.ENGINE_SLOTS,))), "slots is None"),
    # -- wrong arguments of write_tail, verify_tree and compact
    "no parents for a tree": (tail(None), "parents is None"),
    "parents of one request": (tail(torch.tensor([PARENTS])), "parents is int64 [1, 4]"),
    "parents of three nodes": (tail(torch.zeros(2, 3, dtype=torch.int64)), "parents is int64 [2, 3]"),
    "parents 32-bit": (tail(torch.zeros(2, 4, dtype=torch.int32)), "parents is int32"),
    "parents as a list": (tail([list(PARENTS)] * 2), "parents is [[-1"),
    "parents elsewhere": (tail(torch.zeros(2, 4, dtype=torch.int64, device=META)), "parents is on meta"),
    "tail of an EXTEND batch": (lambda rig: write_tail(rig.extend(), rig.geometry), "write_tail got a extend"),
    "tail of no batch": (lambda rig: write_tail(None, rig.geometry), "batch is None"),
    "verify other targets": (lambda rig: rig.verify(targets=torch.ones(2, 3, dtype=torch.int64)), "targets is int64"),
    "verify flat drafts": (lambda rig: rig.verify(drafts=torch.ones(8, dtype=torch.int64)), "drafts is [8]"),
    "verify 32-bit targets": (lambda rig: rig.verify(targets=torch.ones(2, 4, dtype=torch.int32)), "targets is int32"),
    "verify no parents": (lambda rig: rig.verify(parents=None), "parents is None"),
    "compact no pool": (lambda rig: rig.tree_ops.compact(None, rig.batch, rig.accepted()), "pool is None"),
    "compact no result": (lambda rig: rig.tree_ops.compact(rig.pool, rig.batch, None), "accept_index is None"),
    "compact another batch": (
        lambda rig: rig.tree_ops.compact(
            rig.pool,
            rig.extend(
                q_lens=(1,),
                prefix_lens=rig.batch.prefix_lens[:1],
                page_table=rig.batch.page_table[:1],
                host=Exact((5,)),
            ),
            rig.accepted(),
        ),
        "accept_index is int64 [2, 4]",
    ),
    "compact another page size": (
        lambda rig: rig.tree_ops.compact(
            KVPool(Geometry.create(replace(rig.geometry.attention, page_size=8), rig.geometry.limits), 1, 4, 1, "cpu"),
            rig.batch,
            rig.accepted(),
        ),
        "pages of 8 tokens",
    ),
    # -- wrong arguments of commit_round
    "commit nothing": (commit(batch=None, accepted=None), "batch and accepted are None"),
    "commit no batch but a list": (commit(batch=[1]), "batch is [1]"),
    "commit a draft's forward": (
        lambda rig: rig.commit(batch=rig.uniform(Mode.DRAFT_EXTEND, 0, 2, 2, Exact(LENS), tree=False)),
        "a draft_extend batch",
    ),
    "commit an unverified round": (commit(accepted=None), "accepted is None for a verify batch"),
    "commit counts alone": (commit(accepted=torch.ones(2)), "accepted is a tensor"),
    "commit rows of no lengths": (commit(lengths=None), "rows is given and lengths is None"),
    "commit lengths without rows": (commit(rows=None), "lengths is given and rows is None"),
    "commit a list of lengths": (commit(lengths=[5, 2]), "lengths is [5, 2]"),
    "commit a pool alone": (lambda rig: rig.commit(kv=(rig.pool,)), "kv is (<"),
    "commit rows of one request": (commit(rows=torch.tensor([0])), "1 rows advance by 2 counts"),
    "commit a state pool alone": (commit(states=(3,)), "states is (3,)"),
    "commit states without a batch": (commit(batch=None, states=((None, None),)), "batch is None, but states"),
    "commit checkpoints of nothing": (commit(save_slots=torch.zeros(2, dtype=torch.int32)), "save_slots is given"),
    "commit into no pool": (lambda rig: rig.commit(kv=((rig.tree_ops, None),)), "pool is None"),
    # -- batches that validate refuses
    "validate nothing": (lambda rig: validate(None, rig.geometry), "batch is None"),
    "validate without a geometry": (lambda rig: validate(rig.batch, None), "geometry is None"),
    "validate mode as text": (field(mode="verify"), "mode is 'verify'"),
    "validate q_lens as a list": (field(q_lens=[4, 4]), "q_lens is [4, 4]"),
    "validate no requests": (field(q_lens=(), tail_lens=()), "q_lens is ()"),
    "validate num_rows": (field(num_rows=7), "num_rows is 7"),
    "validate num_rows as text": (field(num_rows="8"), "num_rows is '8'"),
    "validate no tail": (field(tail=None), "tail is None"),
    "validate a block": (field(tail=Block()), "Block"),
    "validate no positions": (field(positions=None), "positions is None"),
    "validate positions elsewhere": (
        lambda rig: rig.with_field(positions=rig.batch.positions.to(META)),
        "positions is on meta",
    ),
    "validate a mask of bools": (
        lambda rig: rig.with_field(tail=Tree(rig.batch.tail.mask.bool(), rig.batch.tail.depth)),
        "tail.mask is bool",
    ),
    "validate a draft without a tree": (
        lambda rig: validate(
            replace(rig.uniform(Mode.DRAFT, 0, 2, 2, Exact(LENS), tree=True), tail=Causal()), rig.geometry
        ),
        "tail is Causal()",
    ),
    # -- wrong arguments of SequenceLengths
    "lengths of 0 rows": (lambda rig: SequenceLengths(0, 32, "cpu"), "max_rows is 0"),
    "lengths of text rows": (lambda rig: SequenceLengths("3", 32, "cpu"), "max_rows is '3'"),
    "lengths without a limit": (lambda rig: SequenceLengths(3, None, "cpu"), "max_prefix_len is None"),
    "lengths on a bogus device": (lambda rig: SequenceLengths(3, 32, "bogus"), "'bogus'"),
    "advance a list": (lambda rig: rig.lengths.advance([0], [1]), "rows is [0]"),
    "advance 32-bit rows": (
        lambda rig: rig.lengths.advance(torch.tensor([0], dtype=torch.int32), torch.tensor([1])),
        "int32",
    ),
    "advance fractions": (lambda rig: rig.lengths.advance(torch.tensor([0]), torch.tensor([1.5])), "by is float32"),
    "advance two rows by one count": (
        lambda rig: rig.lengths.advance(torch.tensor([0, 1]), torch.tensor([1])),
        "2 rows advance by 1 counts",
    ),
    "dispatch a null row": (lambda rig: rig.lengths.dispatched([3], 1), "row 3"),
    "dispatch a text row": (lambda rig: rig.lengths.dispatched(["0"], 1), "row '0'"),
    "dispatch fewer than none": (lambda rig: rig.lengths.dispatched([0], -1), "-1 tokens"),
    "dispatch None": (lambda rig: rig.lengths.dispatched([0], None), "None tokens"),
    "settle without a dispatch": (lambda rig: rig.lengths.settle([0], [1], 1), "0 are in flight"),
    "settle two rows with one count": (lambda rig: rig.lengths.settle([0, 1], [1], 1), "2 rows settle 1"),
    "settle a tensor": (lambda rig: rig.lengths.settle([0], [torch.tensor(1)], 1), "settles tensor(1)"),
    "exact of row -1": (lambda rig: rig.lengths.exact([-1]), "row -1"),
    "reset of row None": (lambda rig: rig.lengths.reset(None), "row None"),
    # -- wrong arguments of backends, arenas, graphs and host-device copies
    "open without a geometry": (lambda rig: rig.loaded.open(None, "cpu"), "geometry is None"),
    "open on a bogus device": (lambda rig: rig.loaded.open(rig.geometry, "bogus"), "'bogus'"),
    "open on an absent device": (lambda rig: rig.loaded.open(rig.geometry, "mps"), "mps"),
    "open with guard as text": (lambda rig: rig.loaded.open(rig.geometry, "cpu", guard="yes"), "guard is 'yes'"),
    "bind without an arena": (lambda rig: rig.loaded.bind(rig.geometry, None), "arena is None"),
    "bind another geometry's arena": (
        lambda rig: rig.loaded.bind(rig.geometry, Arena.allocate([], "cpu")),
        "buffer 'kv_lens' is not in the arena",
    ),
    "tree_ops without a geometry": (lambda rig: rig.loaded.tree_ops(7, torch.device("cpu")), "geometry is 7"),
    "arena of one spec": (lambda rig: Arena.allocate(rig.loaded.buffers(rig.geometry)[0], "cpu"), "list of BufferSpec"),
    "arena of text": (lambda rig: Arena.allocate(["kv_lens"], "cpu"), "'kv_lens'"),
    "arena on a bogus device": (lambda rig: Arena.allocate([], "bogus"), "'bogus'"),
    "capture without a key": (lambda rig: graph_state_for(torch.device("cpu")).capture("x", lambda: None), "'x'"),
    "capture without a step": (
        lambda rig: graph_state_for(torch.device("cpu")).capture(GraphKey(Program.DECODE, 1), None),
        "None",
    ),
    "replay an unknown key": (lambda rig: graph_state_for(torch.device("cpu")).replay([1]), "[1]"),
    "pad None": (lambda rig: padded_batch_size(None, (1,)), "num_reqs is None"),
    "copy of nothing": (lambda rig: AsyncHostCopy([]), "tensors has 0"),
    "fence on a bogus device": (lambda rig: fence("bogus"), "'bogus'"),
    "profile of a bogus device": (lambda rig: device_profile("bogus"), "'bogus'"),
    "to_device of text": (lambda rig: to_device("abc", "cpu"), "values"),
    "to_device of uneven rows": (lambda rig: to_device([[1], [1, 2]], "cpu"), "values"),
    "to_device past int32": (lambda rig: to_device([2**40], "cpu", torch.int32), "values"),
    "to_device of a bogus device": (lambda rig: to_device([1], "bogus"), "'bogus'"),
}


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


def host(kind, *lens) -> Call:
    """Return a function that runs a forward with host lengths `kind(lens)`, which contradict the device."""
    return lambda rig: rig.forward(batch=replace(rig.batch, host=kind(lens)))


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
