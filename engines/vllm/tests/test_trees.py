"""Tests of the parts of draft trees that need no vLLM: depths, masks, drafts, acceptance, KV moves and sampling."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftmark import DeviceProfile, Mode, load
from draftmark.runtime import commit_round
from draftmark_engines import EngineError
from draftmark_speculative import Ngram
from draftmark_vllm.batch_runs import split_decodes_prefills
from draftmark_vllm.bound_backends import BoundBackends
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.step import StepBuffers
from draftmark_vllm.trees.acceptance import ChainMoves, GroupPages, move_kv, moved_rows, walk
from draftmark_vllm.trees.choices import Choice, choose
from draftmark_vllm.trees.combs import comb, steps_of
from draftmark_vllm.trees.look_up import MAX_NGRAM, MIN_NGRAM, look_up
from draftmark_vllm.trees.step_trees import (
    StepTrees,
    chain,
    current_trees,
    depths_of,
    set_current_trees,
    starts_of,
    trimmed,
)
from draftmark_vllm.trees.tails import TreeTails
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Problem, Request, StepData, limits, random_problem

BRANCHING = (-1, 0, 0, 1, 2, 3)
"""Two branches: 1, 3, 5 and 2, 4."""


def random_parents(rng: random.Random, nodes: int) -> tuple[int, ...]:
    """Return a random tree of `nodes` nodes."""
    return (-1, *(rng.randrange(node) for node in range(1, nodes)))


def test_rows_get_the_depth_of_their_node() -> None:
    """`depth_changes` corrects positions of a tree's rows from row order to node depth. A chain needs no change."""
    trees = StepTrees((None, BRANCHING), starts_of([3, 6]))
    assert depths_of(BRANCHING) == [0, 1, 1, 2, 2, 3]
    assert trees.depth_changes() == ([5, 6, 7, 8], [-1, -1, -2, -2])


def test_trimmed_tree_keeps_its_parents() -> None:
    """A tree that the scheduler trims from the end is still a tree: each node's parent precedes the node."""
    for nodes in range(1, 7):
        assert all(parent < node for node, parent in enumerate(trimmed(BRANCHING, nodes)))


def test_trees_are_visible_only_during_their_step() -> None:
    """Builders can read a step's trees only inside the context. An error in the context removes the trees too."""
    trees = StepTrees((BRANCHING,), (0, 6))
    with pytest.raises(ZeroDivisionError), set_current_trees(trees):
        assert current_trees() is trees
        raise ZeroDivisionError
    assert current_trees() is None


def test_comb_is_a_chain_with_leaves() -> None:
    """In a comb every draft is a child of the previous step's first draft."""
    assert comb(3, 2) == (-1, 0, 0, 1, 1, 3, 3)
    assert steps_of(6, 2) == 3
    with pytest.raises(EngineError, match="num_speculative_tokens is 7, but a comb has 2 drafts a step"):
        steps_of(7, 2)


@pytest.mark.parametrize("seed", range(30))
def test_look_up_equals_the_ngram_index(seed: int) -> None:
    """`look_up` returns the same tree as the n-gram drafter of `draftmark_speculative`."""
    rng = random.Random(seed)
    tokens, branches = [rng.randrange(5) for _ in range(rng.randrange(2, 60))], rng.choice((1, 2, 3))
    settings = Ngram(topk=branches, num_draft_tokens=8, max_ngram=MAX_NGRAM, min_ngram=MIN_NGRAM)
    ours, theirs = look_up(np.array(tokens), 8, branches), settings.begin(0, tokens).propose()
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)


@pytest.mark.parametrize("backend", ["reference", "cuda_triton"])
@pytest.mark.parametrize("seed", range(12))
def test_tree_attention_matches_dense_attention(seed: int, backend: str) -> None:
    """Attention over ancestors is right in even and uneven steps, for trees, chains, decodes and windows by depth."""
    if backend == "cuda_triton":
        pytest.importorskip("triton")
    rng = random.Random(seed)
    nodes = 6
    count = rng.randint(1, MAX_REQS - 1)
    lens = [nodes if seed % 2 else rng.randint(1, nodes) for _ in range(count)]
    requests = tuple(Request(rng.randint(0, 80), n) for n in lens)
    shape = random_problem(seed, head_dim=32).shape
    problem = Problem(shape, requests, nodes, seed=seed)
    parents = tuple(None if n == 1 or rng.random() < 0.2 else random_parents(rng, n) for n in lens)
    made, trees = StepData(problem), StepTrees(parents, starts_of(lens))
    wanted = torch.cat([dense(made, number, one) for number, one in enumerate(parents)])
    assert torch.allclose(attention(made, trees, backend).double(), wanted, atol=2e-5), f"{problem}\n{parents}"


def attention(made: StepData, trees: StepTrees, backend: str) -> torch.Tensor:
    """Run a step with trees as the builder and a layer do, and return the output of all rows."""
    problem, cpu = made.problem, torch.device("cpu")
    ours = BoundBackends(
        load(backend), [problem.shape], replace(limits(problem.verify_rows), branches=2), DeviceProfile(), cpu
    )
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    geometry = ours.geometry(run.mode)
    batch = StepBuffers(MAX_REQS, MAX_TOKENS, cpu).forward(made.step, run, geometry)
    if run.mode is not Mode.DECODE:
        batch = replace(batch, tail=TreeTails(geometry, cpu).write(run, trees))
    ours.prepare(batch)
    one, cache = ours.of(run.mode)[problem.shape], kv_cache(made.pages, problem.shape.num_kv_heads, None, None)
    out = torch.full_like(made.q, float("nan"))
    one.write_kv(made.k, made.v, cache, batch)
    one.attend(made.q, cache, batch, out)
    return out


def dense(made: StepData, number: int, parents: tuple[int, ...] | None) -> torch.Tensor:
    """Return one request's attention in float64, computed node by node."""
    a, request, kv = made.problem.shape, made.problem.requests[number], made.history[number]
    first = sum(one.rows for one in made.problem.requests[:number])
    parents = chain(request.rows) if parents is None else parents
    depths, scale = depths_of(parents), a.head_dim**-0.5 if a.softmax_scale is None else a.softmax_scale
    k, v = kv.double().repeat_interleave(a.group_size, 2)
    rows = []
    for node in range(request.rows):
        position, seen = request.prefix + depths[node], [*range(request.prefix)]
        up = node
        while up >= 0:
            seen.append(request.prefix + up)
            up = parents[up]
        where = [n if n < request.prefix else request.prefix + depths[n - request.prefix] for n in seen]
        if a.window_left >= 0:
            seen = [n for n, at in zip(seen, where, strict=True) if at >= position - a.window_left]
        scores = torch.einsum("hd,nhd->hn", made.q[first + node].double(), k[seen]) * scale
        if a.logits_soft_cap:
            scores = a.logits_soft_cap * torch.tanh(scores / a.logits_soft_cap)
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[seen]))
    return torch.stack(rows)


def test_walk_accepts_the_targets_branch() -> None:
    """`walk` accepts the branch that the target's tokens follow. Of a wrong chain it keeps only the root."""
    drafts = [[11, 12, 13, 14, 15], [21, 22], []]
    targets = torch.tensor([12, 0, 14, 0, 99, 0, 20, 0, 0, 31])
    kept = walk(drafts, [BRANCHING, None, None], targets)
    assert kept.paths == [[0, 2, 4], [0], [0]]
    assert kept.tokens.tolist() == [[12, 14, 99, -1, -1, -1], [20, *[-1] * 5], [31, *[-1] * 5]]


def test_accepted_kv_moves_to_chain_slots() -> None:
    """In every layer, K and V of accepted nodes move to a chain's slots, and all other slots stay unchanged."""
    generator = torch.Generator().manual_seed(0)
    pages = [torch.randn(4, 2, 4, 3, generator=generator).transpose(1, 2).contiguous().transpose(1, 2) for _ in "ab"]
    before = [one.clone() for one in pages]
    slots = torch.tensor([5, 6, 7, 8, 9, 10])
    sources, targets = moved_rows([[0, 2, 4]], [0, 6])
    assert (sources, targets) == ([2, 4], [1, 2])
    move_kv(pages, slots, sources, targets)
    for now, then in zip(pages, before, strict=True):
        by_slot, old = (one.transpose(1, 2).reshape(16, 2, 3) for one in (now, then))
        assert torch.equal(by_slot[6], old[7]) and torch.equal(by_slot[7], old[9])
        same = [slot for slot in range(16) if slot not in (6, 7)]
        assert torch.equal(by_slot[same], old[same])


def test_rounds_end_in_one_commit() -> None:
    """`commit_round` without a batch or lengths, which vLLM owns, moves the accepted KV of every cache group."""
    groups = [GroupPages([torch.randn(4, 2, 4, 3)], torch.tensor(slots)) for slots in ([1, 2, 3, 4], [9, 8, 7, 6])]
    before = [one.pages[0].transpose(1, 2).reshape(16, 2, 3).clone() for one in groups]
    kept = walk([[11, 12, 13]], [(-1, 0, 0, 2)], torch.tensor([12, 0, 13, 7]))
    commit_round(None, kept.result, None, None, kv=[(ChainMoves(kept.paths, (0, 4)), one) for one in groups])
    for one, old in zip(groups, before, strict=True):
        now, (root, first, second, third) = one.pages[0].transpose(1, 2).reshape(16, 2, 3), one.slots.tolist()
        assert torch.equal(now[first], old[second]) and torch.equal(now[second], old[third])
        same = [slot for slot in range(16) if slot not in (first, second)]
        assert root in same and torch.equal(now[same], old[same])


def params(**changes: object) -> SimpleNamespace:
    """Return the fields of vLLM's sampling parameters that the adapter reads."""
    usual = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 7,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "logprobs": None,
    }
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.1}, {"min_p": 0.1}, {"logprobs": 2}, {"bad_words": ["x"]}, {"min_tokens": 3}]
)
def test_other_sampling_options_use_vllms_sampler(options: dict[str, object]) -> None:
    """A request with options other than temperature, top_k, top_p and seed gets no trees: vLLM's sampler serves it."""
    assert Choice.of(params(), "a", 0) == Choice(1.0, 0, 1.0, 7)
    assert Choice.of(params(**options), "a", 0) is None


def test_missing_seed_is_derived_equally_on_each_rank() -> None:
    """Without a seed, a request's seed is derived from only its id and the engine's seed, equally on each rank."""
    one, again = (Choice.of(params(seed=None), "a", 1) for _ in range(2))
    assert one == again and one != Choice.of(params(seed=None), "b", 1) != Choice.of(params(seed=None), "b", 2)


def test_samples_have_the_targets_distribution() -> None:
    """Over many positions sampled tokens match their probabilities, and none lies outside top_k or top_p."""
    logits, positions = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.arange(4000)
    each = logits.expand(len(positions), -1)
    for choice, wanted in (
        (Choice(1.0, 0, 1.0, 3), (0.5, 0.3, 0.15, 0.05)),
        (Choice(1.0, 2, 1.0, 3), (0.625, 0.375, 0, 0)),
        (Choice(1.0, 0, 0.7, 3), (0.625, 0.375, 0, 0)),
    ):
        counts = Counter(choose(each, [choice] * len(positions), positions).tolist())
        for token, share in enumerate(wanted):
            assert abs(counts[token] / len(positions) - share) < 0.03, (choice, counts)
            assert share or not counts[token]
    assert set(choose(each, [Choice()] * len(positions), positions).tolist()) == {0}
