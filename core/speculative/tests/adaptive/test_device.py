"""Adaptive drafting on an accelerator: the CPU's text, in CUDA graphs, without a wait inside a step."""

from __future__ import annotations

import itertools

import pytest

from core.speculative.tests.accelerator import BACKENDS, COUNT, NEEDS_CUDA, decode_without_a_wait, on, starts, wanted
from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind, Ngram, Sampling, generate

pytestmark = NEEDS_CUDA
SHAPES = {"chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33)}


def configure(drafts, costs, **more):
    """Four requests at a time, prefilled in chunks of 20, a round late."""
    late = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND, "graph": True}
    return EngineConfig(
        **{"max_num_reqs": 4, "max_context_len": 64, "max_extend_tokens": 20, **late, **more},
        speculate=Adaptive(drafts, (), costs),
    )


@pytest.mark.parametrize(
    ("backend", "shape", "row_s", "graph"), list(itertools.product(BACKENDS, SHAPES, [0.0, 0.04, 5.0], [False, True]))
)
def test_cuda_gives_the_text_of_the_cpu(table, backend, shape, row_s, graph):
    """Drafted, mixed and plain rounds, greedy, float32, guards on."""
    drafts = Eagle(on("cuda")[1], *SHAPES[shape])
    config = configure(drafts, table(row_s), backend=backend, graph=graph, guard=True)
    outs, engine = generate(on("cuda")[0], starts(), COUNT, config)
    assert [out.tokens for out in outs] == wanted(Sampling())
    assert engine.pages.in_use == 0
    assert row_s or engine.statistics.mean_accepted > 1.4


@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_samples_what_the_cpu_samples(table, backend):
    """Temperature 0.7 with a seed, in graphs."""
    sampling = Sampling(0.7, 0.95, 5)
    config = configure(Eagle(on("cuda")[1], 4, 3, 12), table(0.04), backend=backend, sampling=sampling)
    outs, _ = generate(on("cuda")[0], starts(), COUNT, config)
    assert [out.tokens for out in outs] == wanted(sampling)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_of_the_host_decode_so_too(table, backend):
    """N-grams in step, in graphs."""
    in_step = {"overlap": False, "host_lengths": HostKind.EXACT}
    outs, _ = generate(
        on("cuda")[0], starts(), COUNT, configure(Ngram(2, 6, 3, 1), table(0.0), backend=backend, **in_step)
    )
    assert [out.tokens for out in outs] == wanted(Sampling())


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_are_measured_on_the_device(backend):
    """Every captured size of every program has its seconds, and the text is the CPU's."""
    config = configure(Eagle(on("cuda")[1], 4, 3, 12), None, backend=backend)
    outs, engine = generate(on("cuda")[0], starts(), COUNT, config)
    found = engine._drafting._policy.table
    assert [out.tokens for out in outs] == wanted(Sampling())
    assert set(found.plain) == set(found.drafting) == set(config.limits.capture_batch_sizes)
    assert set(found.verify) == set(config.limits.row_budgets)


@pytest.mark.parametrize(("backend", "row_s"), list(itertools.product(BACKENDS, [0.0, 0.04, 5.0])))
def test_no_step_waits_for_the_device(table, backend, row_s):
    """With overlap and graphs torch finds no hidden wait in drafting, resting, catching up, joining and leaving."""
    drafts = Eagle(on("cuda")[1], 4, 3, 12)
    engine = Engine(on("cuda")[0], configure(drafts, table(row_s), backend=backend, guard=False))
    decode_without_a_wait(engine)
