"""What the loop does with draft trees on the device: the backend's own kernels if it offers some, else torch's.

Every backend meets these items. One that offers nothing is judged with torch's operations on its device, which is
what the loop would run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.graphs import GraphKey, Program

from ..behaviour import behaviour
from ..cases.geometries import PAGE128, PAGE128_LIMITS, Shape
from ..check import Case

if TYPE_CHECKING:
    from draftmark.tree import VerifyResult

    from ..backend_under_test import BackendUnderTest
    from ..harness.tree_tensors import TreeTensors

SINCE = (1, 1)
LARGE = (1, 2)
"""Contract that brought pages of 128."""
SMALL = AttentionShape(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
LIMITS = Limits(max_num_reqs=6, max_context_len=84, capture_batch_sizes=(2, 6))


def _trees() -> list[Shape]:
    """Trees of 2 to 70 nodes, masks of one to three words, of which a tail may need fewer than there are."""
    tokens = replace(SMALL, page_size=1, q_dtype="float32", kv_dtype="float32")
    make = Geometry.create
    return [
        Shape("pair", make(SMALL, LIMITS, DraftShape(2, 1, 2))),
        Shape("page1-overlap", make(tokens, replace(LIMITS, overlap=True), DraftShape(3, 4, 6))),
        Shape("words2", make(replace(SMALL, head_dim=80), LIMITS, DraftShape(8, 6, 64))),
        Shape("words3-for-2", make(replace(SMALL, page_size=32), LIMITS, DraftShape(9, 9, 33))),
        Shape("words3", make(replace(SMALL, page_size=8), LIMITS, DraftShape(4, 2, 70))),
        Shape("kv8", make(replace(SMALL, kv_dtype="float8_e4m3fn"), LIMITS, DraftShape(4, 3, 7))),
        Shape("chain", make(SMALL, LIMITS, DraftShape(1, 5, 5))),
        Shape("far", make(AttentionShape(8, 8, 128, 64), LIMITS, DraftShape(3, 2, 6))),
        Shape("page128", make(PAGE128, PAGE128_LIMITS, DraftShape(8, 3, 35)), LARGE),
        Shape("far-page128", make(AttentionShape(8, 8, 128, 128), LIMITS, DraftShape(3, 2, 6)), LARGE),
    ]


def _cases(*names: str) -> Callable[[], list[Case]]:
    return lambda: [shape.case(shape.geometry) for shape in _trees() if shape.name in names]


def _tailed() -> list[Case]:
    """With the modes of a target and of a draft model."""
    both = tuple(Mode)
    names = ("page1-overlap", "words2", "words3-for-2", "words3", "chain", "page128")
    return [replace(case, value=replace(case.value, modes=both)) for case in _cases(*names)()]


@behaviour(cases=_tailed, since=SINCE)
def tail_follows_the_parents(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Mask, depth and positions in every mode, on dirty buffers, up to the wall; nothing else is written."""
    import torch

    from ..harness.tree_expect import tail_holds, tails, with_tails
    from ..harness.tree_tensors import JUNK, TreeTensors, make_round, open_ops

    ops, tensors = open_ops(subject, geometry), TreeTensors(subject, geometry)
    for seed, (mode, step, tree) in enumerate(tails(geometry)):
        one = make_round(geometry, seed)
        tensors.load(one)
        requests = with_tails(one, geometry, mode, step, tree, seed)
        batch = tensors.batch(mode, step, tree)
        wide = torch.full((len(requests), requests[0].tail + 5), JUNK, dtype=torch.int64, device=tensors.device)
        parents = wide[:, : requests[0].tail]
        parents.copy_(torch.tensor([request.parents for request in requests]))
        ops.write_tail(batch, parents if tree else None)
        tail_holds(tensors, batch, requests, f"{mode.value} step {step}")


@behaviour(cases=_cases("pair", "page1-overlap", "words2", "words3", "page128"), since=SINCE)
def walk_follows_the_target(subject: BackendUnderTest, geometry: Geometry) -> None:
    """The verdict on trees of every kind: first of equal children, unused nodes, padding, 64-bit tokens."""
    from ..harness.tree_expect import verdict_holds
    from ..harness.tree_tensors import TreeTensors, make_round, open_ops

    ops, tensors = open_ops(subject, geometry), TreeTensors(subject, geometry)
    for seed in range(4):
        one = make_round(geometry, seed)
        tensors.load(one)
        verdict_holds(one, ops.verify_tree(*tensors.trees(), tensors.targets), f"round {seed}")


@behaviour(cases=_cases("pair", "page1-overlap", "words2", "kv8", "page128"), since=SINCE)
def kept_path_is_made_contiguous(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Any ascending paths in all layers, overlapping ones too; every byte that is no kept node's stays."""
    from ..harness.tree_tensors import TreeTensors

    _compacts(subject, geometry, TreeTensors(subject, geometry), 3)


@behaviour(cases=_cases("far", "far-page128"), since=SINCE, bugs=("vllm#47671",))
def kept_path_reaches_past_int32(subject: BackendUnderTest, geometry: Geometry) -> None:
    """The same in pages whose flat element offset no longer fits 32 bits."""
    import torch

    from ..harness.sparse import sparse_memory
    from ..harness.tree_tensors import TreeTensors

    a = geometry.attention
    page = (a.page_size, a.num_kv_heads, a.head_dim)
    first = 2**31 // (page[0] * page[1] * page[2])
    shape = (2, 1, first + int(geometry.max_reqs * geometry.max_pages_per_req), *page)
    with sparse_memory(shape, getattr(torch, a.kv_dtype), subject.device) as memory:
        _compacts(subject, geometry, TreeTensors(subject, geometry, first, memory), 1)


def _compacts(subject: BackendUnderTest, geometry: Geometry, tensors: TreeTensors, rounds: int) -> None:
    import torch

    from draftmark.tree import VerifyResult

    from ..harness.tree_expect import moved, pool_holds
    from ..harness.tree_tensors import make_round, open_ops

    ops, nodes = open_ops(subject, geometry), geometry.draft.num_draft_tokens
    for seed in range(rounds):
        one, dice = make_round(geometry, seed, tensors.first_page), random.Random(seed)
        tensors.load(one)
        tensors.scramble(seed)
        paths = [_path(nodes, (seed + r) % 5, dice) if request.live else [0] for r, request in enumerate(one.requests)]
        path = torch.tensor([[*kept, *range(len(kept), nodes)] for kept in paths], device=tensors.device)
        counts = torch.tensor([len(kept) for kept in paths], device=tensors.device)
        wanted = moved(tensors, one, paths)
        ops.compact(tensors.pool, tensors.batch(), VerifyResult(torch.full_like(path, -1), counts, path))
        pool_holds(tensors, wanted, one, f"paths {paths}")


def _path(nodes: int, kind: int, dice: random.Random) -> list[int]:
    """An ascending path: one behind the other from slot 2 on, every second, random, in place, the root alone."""
    shifted = [0, *range(2, nodes)]
    chosen = [0, *sorted(dice.sample(range(1, nodes), dice.randrange(nodes)))]
    return (shifted, list(range(0, nodes, 2)), chosen, list(range(nodes)), [0])[kind]


@behaviour(
    cases=_cases("page1-overlap", "words2", "page128"),
    since=SINCE,
    bugs=("sglang#26655", "sglang#26521", "sglang#29413"),
)
def replays_follow_the_round(subject: BackendUnderTest, geometry: Geometry) -> None:
    """All three captured in one graph without a sync, replayed on other trees, lengths and pages."""
    from ..harness.graph_harness import no_sync
    from ..harness.tree_expect import moved, pool_holds, tail_holds, verdict_holds
    from ..harness.tree_tensors import TreeTensors, make_round, open_ops
    from ..oracle.verify_tree import kept_path

    ops, tensors = open_ops(subject, geometry), TreeTensors(subject, geometry)
    state, key = subject.graph_state(geometry), GraphKey(Program.VERIFY, int(geometry.max_reqs))
    drafts, parents = tensors.trees()
    batch = tensors.batch()

    def step() -> VerifyResult:
        ops.write_tail(batch, parents)
        found = ops.verify_tree(drafts, parents, tensors.targets)
        ops.compact(tensors.pool, batch, found)
        return found

    tensors.load(make_round(geometry, 17))
    tensors.scramble(17)
    step()  # a warm-up, as engines do; kernels are compiled here
    with no_sync(subject.device):
        found = state.capture(key, step)
    for seed in range(4):
        one = make_round(geometry, seed)
        tensors.load(one)
        tensors.scramble(seed)
        tensors.batch()
        paths = [kept_path(d, r.parents, t) for d, r, t in zip(one.drafts, one.requests, one.targets, strict=True)]
        wanted = moved(tensors, one, paths)
        with no_sync(subject.device):
            state.replay(key)
        what = f"replay {seed}"
        tail_holds(tensors, batch, one.requests, what)
        verdict_holds(one, found, what)
        pool_holds(tensors, wanted, one, what)
