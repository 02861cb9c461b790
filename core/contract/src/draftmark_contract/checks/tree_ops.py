"""Checks of the draft-tree operations on the device: the backend's own kernels if it has some, else torch's.

Every backend runs these items. For a backend without tree operations the suite tests torch's operations on the
backend's device, because the decode loop uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits
from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour
from ..cases.geometries import PAGE128, PAGE128_LIMITS, Shape
from ..cases.tree_rounds import any_paths, make_round, tails, with_tails
from ..check import Case
from ..oracle.formulas import max_requests

if TYPE_CHECKING:
    from draftmark.tree import VerifyResult

    from ..harness.tree_harness import TreeHarness

SINCE = (1, 1)
LARGE = (1, 2)
"""Contract version that added pages of 128."""
SMALL = AttentionShape(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
LIMITS = Limits(max_num_reqs=6, max_context_len=84, capture_batch_sizes=(2, 6))


MANY_LAYERS = 13
"""Number of layers of a large pool: more than the first powers of two."""


LARGE_MODELS = (80, 126)
"""Numbers of layers of large models."""


def _trees() -> list[Shape]:
    """Return trees of 2 to 101 nodes with masks of one to four words. A mask may be wider than its tree needs."""
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
        Shape("crowd", make(SMALL, replace(LIMITS, max_num_reqs=12), DraftShape(8, 3, 101)), (1, 3)),
    ]


def _cases(*names: str) -> Callable[[], list[Case]]:
    return lambda: [shape.case(shape.geometry) for shape in _trees() if shape.name in names]


def _tailed() -> list[Case]:
    """Return cases with the modes of a target model and of a draft model."""
    names = ("page1-overlap", "words2", "words3-for-2", "words3", "chain", "page128", "crowd")
    return [replace(case, value=replace(case.value, modes=CORE_MODES)) for case in _cases(*names)()]


@behaviour(Fixture.TREES, cases=_tailed, since=SINCE)
def tail_follows_the_parents(trees: TreeHarness, geometry: Geometry) -> None:
    """`write_tail` writes mask, depth and positions from the parents in every mode, and changes no other element.

    The buffers are dirty before the call. Positions end at the context limit.
    """
    for seed, (mode, step, tree) in enumerate(tails(geometry)):
        one = make_round(geometry, seed)
        trees.tensors.load(one)
        requests = with_tails(one, geometry, mode, step, tree, seed)
        batch = trees.tensors.batch(mode, step, tree)
        trees.ops.write_tail(batch, trees.tensors.parents_of(requests) if tree else None)
        trees.assert_tail(batch, requests, f"{mode.value} step {step}")


@behaviour(Fixture.TREES, cases=_cases("pair", "page1-overlap", "words2", "words3", "page128", "crowd"), since=SINCE)
def walk_follows_the_target(trees: TreeHarness, geometry: Geometry) -> None:
    """`verify_tree` accepts exactly the nodes that the target agrees with, on trees of every kind.

    Among children with equal tokens the first is accepted. Cases include unused nodes, padding and 64-bit tokens.
    """
    for seed in range(4):
        one = make_round(geometry, seed)
        trees.tensors.load(one)
        trees.assert_verdict(one, trees.verify(), f"round {seed}")


@behaviour(Fixture.TREES, cases=_cases("pair", "page1-overlap", "words2", "kv8", "page128", "crowd"), since=SINCE)
def kept_path_is_made_contiguous(trees: TreeHarness, geometry: Geometry) -> None:
    """`compact` makes the accepted path contiguous in every layer, and changes no byte outside of it.

    The paths ascend, and the old and new places of a path may overlap.
    """
    for seed in range(3):
        _compacts(trees, seed)


@behaviour(Fixture.LARGE_POOL_TREES, cases=_cases("far", "far-page128"), since=SINCE, bugs=("vllm#47671",))
def kept_path_reaches_past_int32(trees: TreeHarness, geometry: Geometry) -> None:
    """`compact` is right in pages with a flat element offset that does not fit 32 bits."""
    _compacts(trees, 0)


@behaviour(Fixture.TREES, cases=_cases("page1-overlap", "words2", "page128"), since=(1, 3))
def every_pool_is_served(trees: TreeHarness, geometry: Geometry) -> None:
    """`compact` serves pools with other numbers of layers and KV heads and other head sizes, one after the other.

    An engine has such pools for a target, for its other groups of layers, and for a draft model.
    """
    a = trees.geometry.attention
    own, larger = trees.tensors, trees.more_tensors(MANY_LAYERS, a.num_kv_heads + 1, a.head_dim + 32)
    for seed, tensors in enumerate((own, larger, trees.more_tensors(1, 1, 32), own)):
        trees.tensors = tensors
        _compacts(trees, seed)


@behaviour(Fixture.TREES, cases=_cases("page1-overlap", "words2", "page128"), since=(1, 5))
def every_layer_of_a_large_model_is_moved(trees: TreeHarness, geometry: Geometry) -> None:
    """`compact` moves KV in every layer of a pool of 80 layers, and of 126 layers, the numbers of large models."""
    for seed, layers in enumerate(LARGE_MODELS):
        trees.tensors = trees.more_tensors(layers, 1, 32)
        _compacts(trees, seed)


def _compacts(trees: TreeHarness, seed: int) -> None:
    one = make_round(trees.geometry, seed, trees.tensors.first_page)
    trees.tensors.load(one)
    trees.tensors.scramble(seed)
    paths = any_paths(one, seed)
    wanted = trees.moved(one, paths)
    trees.compact(paths)
    trees.assert_pool(wanted, one, f"paths {paths}")


@behaviour(
    Fixture.TREES,
    cases=_cases("page1-overlap", "words2", "page128", "crowd"),
    since=SINCE,
    bugs=("sglang#26655", "sglang#26521", "sglang#29413"),
)
def replays_follow_the_round(trees: TreeHarness, geometry: Geometry) -> None:
    """One captured graph of `write_tail`, `verify_tree` and `compact` is right for other trees, lengths and pages.

    The graph is captured and replayed without a synchronization.
    """
    tensors, key = trees.tensors, GraphKey(Program.VERIFY, max_requests(geometry))
    parents, batch = tensors.trees()[1], tensors.batch()

    def step() -> VerifyResult:
        trees.ops.write_tail(batch, parents)
        found = trees.verify()
        trees.ops.compact(tensors.pool, batch, found)
        return found

    tensors.load(make_round(geometry, 17))
    tensors.scramble(17)
    step()  # The first call compiles the kernels, as an engine's warm-up does.
    found = trees.capture(key, step)
    for seed in range(4):
        one, what = make_round(geometry, seed), f"replay {seed}"
        tensors.load(one)
        tensors.scramble(seed)
        tensors.batch()
        wanted = trees.moved(one, one.kept)
        trees.replay(key)
        trees.assert_tail(batch, one.requests, what)
        trees.assert_verdict(one, found, what)
        trees.assert_pool(wanted, one, what)
