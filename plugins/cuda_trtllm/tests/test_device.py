"""GPU tests of outputs against float64: long contexts, wide drafts and every head shape.

Guard words after each buffer detect writes past its end.
"""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import (
    DRAFT_MODES,
    TARGET_MODES,
    AttentionShape,
    DraftShape,
    Geometry,
    Limits,
    Mode,
    load,
)
from draftmark.errors import BackendRefusal, BatchError

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
LLAMA = AttentionShape(32, 8, 128, 64)
SHAPES = {
    "llama": LLAMA,
    "gqa2-64": AttentionShape(4, 2, 64, 16),
    "fp16": AttentionShape(8, 2, 128, 64, "float16", "float16"),
    "fp8": AttentionShape(8, 2, 128, 64, "bfloat16", "float8_e4m3fn"),
    "mha": AttentionShape(8, 8, 128, 64),
    "mqa8": AttentionShape(8, 1, 128, 64),
    "gqa3": AttentionShape(6, 2, 128, 64),
    "dim80": AttentionShape(8, 2, 80, 64),
    "dim256": AttentionShape(8, 2, 256, 64),
    "page128": AttentionShape(8, 2, 128, 128),
}
DRAFT = DraftShape(2, 3, 7)


@pytest.fixture(scope="module")
def subject():
    from draftmark_contract.backend_under_test import BackendUnderTest
    from draftmark_contract.check import Tier

    return BackendUnderTest(load("cuda_trtllm"), "cuda", Tier.DEVICE)


@pytest.fixture(scope="module")
def check(subject):
    """Return a function that runs forwards on one backend, and checks outputs and that semaphores are zero again."""
    from draftmark_contract.harness.harness import Harness, place

    def run(turns):
        rig = Harness(subject, turns[0].geometry, max(turn.num_pages for turn in turns))
        for turn in turns:
            turn = place(rig, turn)
            rig.arena.poison()
            rig.assert_forward(turn, rig.load(turn))
            if "semaphores" in rig.arena:
                assert not rig.arena["semaphores"].any(), "a launch did not reset its semaphores"
        return rig

    return run


def turn(geometry, mode, lens, padded, step=0, tree="random", seed=0):
    from draftmark_contract.cases.forwards import uniform

    return uniform(f"{mode.value}{step}", geometry, mode, lens, padded, step=step, tree=tree, seed=seed)


def make(shape, draft, modes, context=4000, extend=512, window=None):
    from dataclasses import replace

    shape = shape if window is None else replace(shape, window_left=window)
    return Geometry.create(shape, Limits(8, context, extend, (8,)), draft, modes=modes)


@pytest.mark.parametrize("name", SHAPES)
def test_contexts_with_split_keys(check, name):
    """Outputs are right if one long request's keys are split over all SMs, and if eight requests are split less."""
    from draftmark_contract.cases.forwards import ragged

    draw = random.Random(name)
    for modes in (TARGET_MODES, DRAFT_MODES):
        geometry = make(SHAPES[name], DRAFT, modes)
        turns = [ragged("extend", geometry, (3000, 0, 65), (130, 64, 1), padded=1)]
        for mode in modes[1:]:
            for step in range(2) if mode is Mode.DRAFT else (0,):
                lens = tuple(draw.randrange(3900) for _ in range(5))
                turns += [turn(geometry, mode, (3999,), 1, step), turn(geometry, mode, lens, 8, step)]
        check(turns)


@pytest.mark.parametrize("window", [-1, 0, 63, 700])
@pytest.mark.parametrize("name", SHAPES)
def test_prefills_of_every_shape(check, name, window):
    """Prefill outputs are right for new prompts, chunks after prefixes, single tokens and padding requests."""
    from draftmark_contract.cases.forwards import ragged

    draw = random.Random(f"{name}{window}")
    geometry = make(SHAPES[name], DraftShape(1, 1, 1), (Mode.EXTEND,), window=window)
    turns = [ragged("extend", geometry, (0,), (512,))]
    for seed in range(4):
        prefixes = [draw.choice((0, 1, 63, 64, draw.randrange(3000))) for _ in range(draw.randint(1, 7))]
        rows = [draw.choice((0, 1, 17, 64)) for _ in prefixes]
        turns.append(ragged("extend", geometry, prefixes, rows, padded=8 - len(prefixes), seed=seed))
    check(turns)


@pytest.mark.parametrize(("k", "steps"), [(3, 4), (8, 5), (8, 9), (40, 3)])
def test_wide_drafts(check, k, steps):
    """Draft steps are right if the number of draft tokens is below, at and above a multiple of 32 (a mask word)."""
    geometry = make(SHAPES["gqa2-64"], DraftShape(k, steps, 2), (Mode.DRAFT,), context=1500)
    check([turn(geometry, Mode.DRAFT, (1500, 0, 250, 17), 8, step, seed=step) for step in range(steps - 1)])


@pytest.mark.parametrize("lens", [(3990,), (0,), (17, 3000)])
def test_drafts_with_full_blocks(check, lens):
    """Draft steps with full blocks (8 rows x 4 heads = 32) are right for one request (not staged) and two (staged)."""
    geometry = make(LLAMA, DraftShape(8, 5, 2), (Mode.DRAFT,))
    check([turn(geometry, Mode.DRAFT, lens, len(lens), step, seed=step) for step in range(4)])


@pytest.mark.parametrize("nodes", [2, 31, 33, 64, 65, 100])
def test_trees_of_many_nodes(check, nodes):
    """VERIFY is right for random trees, stars and chains with node counts around multiples of 32."""
    geometry = make(SHAPES["gqa2-64"], DraftShape(4, 1, nodes), TARGET_MODES, context=1500)
    lens = (1500 - nodes, 1, 255)
    check([turn(geometry, Mode.VERIFY, lens, 4, tree=tree) for tree in ("random", "star", "chain", "unused")])


@pytest.mark.parametrize("window", [0, 63, 700])
def test_chains_under_a_window(check, window):
    """With a sliding window, decode, verify of a chain, draft steps with topk 1, and prefill are right."""
    from draftmark_contract.cases.forwards import ragged

    for modes in (TARGET_MODES, DRAFT_MODES):
        geometry = make(LLAMA, DraftShape(1, 4, 7), modes, context=1500, window=window)
        turns = [ragged("extend", geometry, (900, 0), (150, 70), padded=1)]
        for mode in modes[1:]:
            for step in range(3) if mode is Mode.DRAFT else (0,):
                turns.append(turn(geometry, mode, (1490, 3, 700), 4, step, tree="chain"))
        check(turns)


def test_tree_under_window_raises(subject):
    """A tree in a geometry with a sliding window raises BatchError; a geometry with a window and topk 2 is refused."""
    from draftmark_contract.harness.harness import Harness, place

    geometry = make(LLAMA, DraftShape(1, 1, 7), TARGET_MODES, context=1500, window=63)
    one = turn(geometry, Mode.VERIFY, (100,), 1, tree="star")
    rig = Harness(subject, geometry, one.num_pages)
    one = place(rig, one)
    with pytest.raises(BatchError, match="window"):
        rig.run(one, rig.load(one))
    with pytest.raises(BackendRefusal, match="window_left 63 with topk 2"):
        load("cuda_trtllm").open(make(LLAMA, DRAFT, TARGET_MODES, window=63), "cuda")


def test_queries_and_outputs_with_strides(subject):
    """attend copies strided queries, and raises for a strided output."""
    from draftmark_contract.harness.harness import Harness, place

    geometry = make(SHAPES["gqa2-64"], DRAFT, TARGET_MODES, context=200)
    one = turn(geometry, Mode.VERIFY, (100, 30), 2)
    rig = Harness(subject, geometry, one.num_pages)
    one = place(rig, one)
    batch = rig.load(one)
    wanted = rig.run(one, batch)
    q, _, _, out = rig.tensors.rows(one)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    out.fill_(float("nan"))
    rig.backend.attend(by_head, rig.tensors.cache, batch, out)
    assert torch.equal(out, wanted)
    with pytest.raises(BatchError, match="contiguous"):
        rig.backend.attend(q, rig.tensors.cache, batch, torch.empty_like(by_head))


def test_batches_of_changing_size_share_scratch(check):
    """40 forwards with changing numbers of requests are right on one arena, although they reuse its scratch."""
    geometry = make(SHAPES["gqa2-64"], DraftShape(3, 3, 9), TARGET_MODES, context=3000)
    draw, turns = random.Random(5), []
    for seed in range(40):
        lens = tuple(draw.choice((0, 1, 255, 256, 257, draw.randrange(2990))) for _ in range(draw.randint(1, 8)))
        turns.append(turn(geometry, draw.choice((Mode.DECODE, Mode.VERIFY)), lens, 8, seed=seed))
    check(turns)
