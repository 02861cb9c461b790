"""The loop with a head on an accelerator: the CPU's text, eagerly and in CUDA graphs, and no wait inside a step."""

from __future__ import annotations

import itertools

import pytest

from core.speculative.tests.accelerator import BACKENDS, COUNT, NEEDS_CUDA, decode_without_a_wait, on, starts, wanted
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind, Sampling, generate

pytestmark = NEEDS_CUDA
SHAPES = {"none": None, "chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33)}
LATE = {"in step": (False, HostKind.UPPER_BOUND), "late": (True, HostKind.UPPER_BOUND)}


def configure(shape, overlap, host, **more):
    """Four requests at a time, prefilled in chunks of 20."""
    head = on("cuda")[1]
    return EngineConfig(
        speculate=Eagle(head, *SHAPES[shape]) if SHAPES[shape] else None, overlap=overlap, host_lengths=host,
        max_num_reqs=4, max_context_len=64, max_extend_tokens=20, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "shape", "late", "graph", "page_size"),
    list(itertools.product(BACKENDS, SHAPES, LATE, [False, True], [1, 16])),
)
def test_cuda_gives_the_text_of_the_cpu(backend, shape, late, graph, page_size):
    """Greedy, float32, guards on."""
    config = configure(shape, *LATE[late], backend=backend, graph=graph, page_size=page_size, guard=True)
    outs, engine = generate(on("cuda")[0], starts(), COUNT, config)
    assert [out.tokens for out in outs] == wanted(Sampling())
    assert engine.pages.in_use == 0
    if SHAPES[shape]:
        assert engine.statistics.mean_accepted > 1.5


@pytest.mark.parametrize(("backend", "late"), list(itertools.product(BACKENDS, LATE)))
def test_cuda_samples_what_the_cpu_samples(backend, late):
    """Temperature 0.7 with a seed, in graphs."""
    sampling = Sampling(0.7, 0.95, 5)
    outs, _ = generate(
        on("cuda")[0], starts(), COUNT, configure("tree", *LATE[late], backend=backend, graph=True, sampling=sampling)
    )
    assert [out.tokens for out in outs] == wanted(sampling)


@pytest.mark.parametrize(
    ("backend", "shape", "host"),
    list(itertools.product(BACKENDS, ["none", "chain", "tree"], [HostKind.UPPER_BOUND, HostKind.UNKNOWN])),
)
def test_no_step_waits_for_the_device(backend, shape, host):
    """With overlap and graphs, torch finds no hidden synchronisation in prefill, drafting, rounds or reservations;
    requests join and leave meanwhile, and the one wait is for the tokens of the round before."""
    engine = Engine(on("cuda")[0], configure(shape, True, host, backend=backend, graph=True, guard=False))
    decode_without_a_wait(engine)


def test_the_host_is_ahead_of_the_device():
    """With overlap a round is sent before the one before it has come down: its tokens are found a step later."""
    engine = Engine(on("cuda")[0], configure("tree", True, HostKind.UPPER_BOUND, graph=True))
    engine.submit(starts()[0], COUNT)
    assert engine.step() == []
    assert len(engine._pending) == 1
    first = engine.step()
    assert [len(progress.tokens) for progress in first] == [1]
    assert len(engine._pending) == 1
