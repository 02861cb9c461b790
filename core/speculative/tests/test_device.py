"""The loop on CUDA: the CPU's text, eagerly and in CUDA graphs, with and without overlap, and no wait inside a step."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from transformers import modeling_layers

from draftmark.registry import available
from draftmark_speculative import (
    Adaptive,
    DFlash,
    Eagle,
    Engine,
    EngineConfig,
    HostKind,
    Mtp,
    MtpModules,
    Ngram,
    Sampling,
    generate,
)
from draftmark_speculative.dflash.tiny import tiny_block_head
from draftmark_speculative.eagle.tiny import tiny_pair
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.tiny import tiny_hf_model
from draftmark_speculative.mtp.tiny import tiny_mtp_pair

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
BACKENDS = [row.name for row in available() if row.name in ("reference", "cuda_triton")]
SHAPES = {"none": None, "chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33)}
DRAFTING = [shape for shape in SHAPES if shape != "none"]
COSTS = (0.0, 0.04, 5.0)
"""Cost of a row in adaptive rounds, in seconds: all drafted; mixed; plain except probes."""
COUNT = 24
HAS_MODULES = hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer")


@cache
def on(device):
    """Return the tiny model and its head on a device."""
    return tiny_pair(device=device)


def starts():
    """Return six prompts of different lengths."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (1, 5, 9, 17, 26, 30)]


@cache
def wanted(*sampling):
    """Return the CPU's plain texts; arguments are temperature, top-p and seed, or none for greedy."""
    outs, _ = generate(on("cpu")[0], starts(), COUNT, EngineConfig(max_context_len=64, sampling=Sampling(*sampling)))
    return [out.tokens for out in outs]


@pytest.fixture(scope="module")
def configure(table):
    """Return a function (shape, cost of a row or None for fixed drafts, …) → configuration for four requests."""

    def of(shape, row_s=None, **more):
        drafts = Eagle(on("cuda")[1], *SHAPES[shape]) if SHAPES[shape] else None
        speculate = drafts if row_s is None else Adaptive(drafts, (), table(row_s))
        late = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND, "graph": True}
        small = {"max_num_reqs": 4, "max_context_len": 64, "max_extend_tokens": 20}
        return EngineConfig(**{**small, **late, "speculate": speculate, **more})

    return of


@pytest.mark.parametrize(
    ("backend", "shape", "row_s", "overlap", "graph", "page_size"),
    [
        *product(BACKENDS, SHAPES, [None], [False, True], [False, True], [1, 16]),
        *product(BACKENDS, DRAFTING, COSTS, [True], [False, True], [16]),
    ],
)
def test_cuda_gives_the_text_of_the_cpu(configure, backend, shape, row_s, overlap, graph, page_size):
    """CUDA gives the CPU's greedy float32 text with fixed drafts and with adaptive rounds."""
    more = {"backend": backend, "overlap": overlap, "graph": graph, "page_size": page_size, "guard": True}
    outs, engine = generate(on("cuda")[0], starts(), COUNT, configure(shape, row_s, **more))
    assert [out.tokens for out in outs] == wanted()
    assert engine.pages.in_use == 0
    if SHAPES[shape] and not row_s:
        assert engine.statistics.mean_accepted > 1.4


@cache
def family_on_cuda(family):
    """Return the tiny model of `make_model` on CUDA, as a separate copy."""
    return wrap_model(tiny_hf_model(family, vocab_size=256).cuda(), name=family)


@pytest.mark.parametrize(
    ("family", "graph", "topk", "host"),
    list(product(["llama", "mistral", "gemma3_text"], [False, True], [1, 3], [HostKind.EXACT, HostKind.UNKNOWN])),
)
def test_cuda_gives_the_text_of_every_family(plain_text, oracle, prompts, family, graph, topk, host):
    """The reference backend on CUDA gives transformers' CPU text for every family."""
    texts = [plain_text(family, tuple(prompt), 20) for prompt in prompts(5, 30, seed=5)]
    config = EngineConfig(
        speculate=oracle(topk, 7, tuple(texts)), page_size=16, max_num_reqs=3, max_context_len=64,
        max_extend_tokens=20, graph=graph, host_lengths=host, guard=True,
    )  # fmt: skip
    outs, engine = generate(family_on_cuda(family), prompts(5, 30, seed=5), 20, config)
    assert [out.tokens for out in outs] == texts
    assert engine.statistics.mean_accepted > 1.5
    for group in engine._layers.groups:
        group.arena.check()


@pytest.mark.parametrize(("backend", "row_s", "overlap"), list(product(BACKENDS, [None, 0.04], [False, True])))
def test_cuda_samples_the_tokens_of_the_cpu(configure, backend, row_s, overlap):
    """CUDA samples the CPU's tokens at temperature 0.7 with a seed, in graphs."""
    sampling = (0.7, 0.95, 5)
    config = configure("tree", row_s, backend=backend, overlap=overlap, sampling=Sampling(*sampling))
    outs, _ = generate(on("cuda")[0], starts(), COUNT, config)
    assert [out.tokens for out in outs] == wanted(*sampling)


@pytest.mark.parametrize("backend", BACKENDS)
def test_host_drafts_give_the_text_of_the_cpu(configure, table, backend):
    """Adaptive rounds with n-gram drafts, without overlap and in graphs, give the CPU's text."""
    drafts = Adaptive(Ngram(2, 6, 3, 1), (), table(0.0))
    more = {"overlap": False, "host_lengths": HostKind.EXACT, "speculate": drafts, "backend": backend}
    outs, _ = generate(on("cuda")[0], starts(), COUNT, configure("none", **more))
    assert [out.tokens for out in outs] == wanted()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cost_table_is_measured_on_the_device(configure, backend):
    """The measured cost table has every captured size of every program, and the text is the CPU's."""
    config = configure("none", speculate=Adaptive(Eagle(on("cuda")[1], 4, 3, 12)), backend=backend)
    outs, engine = generate(on("cuda")[0], starts(), COUNT, config)
    found = engine._drafting._policy.table
    assert [out.tokens for out in outs] == wanted()
    assert set(found.plain) == set(found.drafting) == set(config.limits.capture_batch_sizes)
    assert set(found.verify) == set(config.limits.row_budgets)


@pytest.mark.parametrize(
    ("backend", "shape", "row_s", "host"),
    [
        *product(BACKENDS, ["none", "chain", "tree"], [None], [HostKind.UPPER_BOUND, HostKind.UNKNOWN]),
        *product(BACKENDS, ["tree"], COSTS, [HostKind.UPPER_BOUND]),
    ],
)
def test_no_step_synchronises_with_the_device(configure, backend, shape, row_s, host):
    """With overlap and graphs, torch finds no hidden synchronisation in prefill, drafting, rounds or reservations.

    Requests join, leave and are cancelled meanwhile. The only wait is for the tokens of the round before.
    """
    engine = Engine(on("cuda")[0], configure(shape, row_s, host_lengths=host, backend=backend, guard=False))
    prompts = starts()
    engine.submit(prompts[0], 3)  # a first prefill, because it compiles the kernels that no graph contains
    while engine.busy:
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = [engine.submit(prompt, COUNT) for prompt in prompts[:3]]
        for _ in range(4):
            engine.step()
        ids += [engine.submit(prompt, COUNT) for prompt in prompts[3:]]
        engine.step()
        engine.cancel(ids[1])
        while engine.busy:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in (0, 2, 3, 4, 5):
        assert engine.output(ids[one]) == wanted()[one]


def test_overlap_returns_tokens_one_step_later(configure):
    """With overlap a round is enqueued before the round before has finished, so its tokens arrive one step later."""
    engine = Engine(on("cuda")[0], configure("tree"))
    engine.submit(starts()[0], COUNT)
    assert engine.step() == []
    assert len(engine._pending) == 1
    first = engine.step()
    assert [len(progress.tokens) for progress in first] == [1]
    assert len(engine._pending) == 1


@pytest.mark.parametrize(
    ("backend", "shape", "graph", "page_size"), list(product(BACKENDS, [(1, 3, 4), (4, 3, 12)], [False, True], [1, 48]))
)
def test_latent_rows_give_the_text_of_the_cpu(backend, shape, graph, page_size):
    """A latent model with drafts of its MTP layer gives the CPU's text, eagerly and in graphs."""
    (plain, _), (model, head) = tiny_mtp_pair("minicpm3"), tiny_mtp_pair("minicpm3", device="cuda")
    want, _ = generate(plain, starts(), COUNT, EngineConfig(max_context_len=64))
    config = EngineConfig(
        backend=backend, speculate=Mtp(head, *shape), page_size=page_size, max_num_reqs=4, max_context_len=64,
        graph=graph, overlap=True, host_lengths=HostKind.UPPER_BOUND,
    )  # fmt: skip
    outs, engine = generate(model, starts(), COUNT, config)
    assert outs == want
    assert engine.statistics.mean_accepted > 1.2, "the test needs accepted drafts"


LATE = {"graph": True, "overlap": True, "host_lengths": HostKind.UPPER_BOUND}


@pytest.mark.parametrize(
    ("backend", "family", "shape", "late"),
    list(product(BACKENDS, ["llama", "qwen3_5_text"], [(1, 0), (8, 33), (16, 256)], [False, True])),
)
def test_blocks_give_the_text_of_the_cpu(backend, family, shape, late):
    """Chains and trees of draft blocks, with layers of both kinds, give the CPU's text, also over recurrent state."""
    plain, model = (wrap_model(tiny_hf_model(family, vocab_size=16).to(one), name=family) for one in ("cpu", "cuda"))
    prompts = [[token % 16 for token in prompt] for prompt in starts()]
    want, _ = generate(plain, prompts, COUNT, EngineConfig(max_context_len=64))
    config = EngineConfig(
        backend=backend, speculate=DFlash(tiny_block_head(model), *shape), max_num_reqs=4, max_context_len=64,
        max_extend_tokens=20, **(LATE if late else {}),
    )  # fmt: skip
    assert generate(model, prompts, COUNT, config)[0] == want


@pytest.mark.skipif(not HAS_MODULES, reason="needs transformers 5.23: MtpModel.forward_layer")
@pytest.mark.parametrize(
    ("backend", "family", "count", "late"),
    list(product(BACKENDS, ["minicpm3", "llama"], [2, 3], [False, True])),
)
def test_modules_give_the_text_of_the_cpu(backend, family, count, late):
    """Several MTP modules give the CPU's text, with latent rows and with K and V."""
    plain, _ = tiny_mtp_pair(family, num_modules=count)
    model, head = tiny_mtp_pair(family, num_modules=count, device="cuda")
    want, _ = generate(plain, starts(), COUNT, EngineConfig(max_context_len=64))
    config = EngineConfig(
        backend=backend, speculate=MtpModules(head, count), max_num_reqs=4, max_context_len=64, max_extend_tokens=20,
        **(LATE if late else {}),
    )  # fmt: skip
    outs, engine = generate(model, starts(), COUNT, config)
    assert outs == want
    assert engine.statistics.mean_accepted > 1.1, "the test needs accepted drafts"
