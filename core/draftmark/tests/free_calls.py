"""Wrong calls that every mode refuses."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.draftmark.tests.bad_calls import LENS, META, PARENTS, Call, geometry
from draftmark import Form, Geometry, Mode
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
    device_profile,
    fence,
    graph_state_for,
    padded_batch_size,
    slots_of,
    to_device,
    validate,
    write_tail,
)


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
    "graphs on a device's name": (lambda rig: graph_state_for("cuda"), "device is 'cuda'"),
    "profile of a bogus device": (lambda rig: device_profile("bogus"), "'bogus'"),
    "to_device of text": (lambda rig: to_device("abc", "cpu"), "values"),
    "to_device of uneven rows": (lambda rig: to_device([[1], [1, 2]], "cpu"), "values"),
    "to_device past int32": (lambda rig: to_device([2**40], "cpu", torch.int32), "values"),
    "to_device of a bogus device": (lambda rig: to_device([1], "bogus"), "'bogus'"),
}
