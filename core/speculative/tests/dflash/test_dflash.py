"""Block drafts: chains and trees of one block forward equal a plain recomputation, and never change the text."""

from __future__ import annotations

import heapq
from itertools import product

import pytest
import torch

from core.speculative.tests.dense import planted_paths, watch
from draftmark import GeometryError, ModelError, RequestError
from draftmark_speculative import BlockConfig, BlockHead, DFlash, Engine, EngineConfig, HostKind, decode
from draftmark_speculative.dflash.tiny import tiny_block_head
from draftmark_speculative.dflash.tree import block_tree
from draftmark_testing.pairs import quick

COUNT = 16
SMALL = {"max_num_reqs": 3, "max_context_len": 96, "max_extend_tokens": 20, "guard": True}
SHAPES = {"chain": (1, 0), "short chain": (1, 3), "tree": (4, 12), "wide tree": (16, 33)}
KINDS = {"whole": (False,), "causal": (True,), "both": (False, True, False)}
FAMILIES = ("llama", "gemma2", "qwen3_5_text", "granitemoehybrid")
MEMORY = {
    "enough": {},
    "few pages": {"num_pages": 30},
    "cache": {"prefix_cache": True, "state_interval": 96, "num_pages": 40},
}


def settings() -> list[tuple]:
    """Return every combination of family, shape, kind of blocks, page size, graph, overlap and memory."""
    return list(product(FAMILIES, SHAPES, KINDS, [4, 16], [False, True], [False, True], MEMORY))


@pytest.mark.parametrize(("family", "shape", "kind", "page_size", "graph", "overlap", "memory"), quick(settings()))
def test_every_setting_gives_the_plain_text(
    few_tokens, starts, plain, family, shape, kind, page_size, graph, overlap, memory
):
    """Chains and trees of blocks, causal or not, over dense and hybrid targets give the text of plain decoding."""
    model, prompts = few_tokens(family), starts(5, 24, seed=len(family))
    more = {"overlap": overlap, "host_lengths": HostKind.UPPER_BOUND if overlap else HostKind.EXACT}
    sizes = (1, 3) if graph else ()
    drafts, held = DFlash(tiny_block_head(model, KINDS[kind]), *SHAPES[shape]), dict(MEMORY[memory])
    if page_size == 16:
        held.pop("num_pages", None)
    config = EngineConfig(
        **SMALL, **more, **held, page_size=page_size, speculate=drafts, graph=graph, capture_batch_sizes=sizes
    )
    engine = Engine(model, config)
    for _ in range(2 if memory == "cache" else 1):
        assert decode(engine, prompts, COUNT) == plain(model, prompts, COUNT)
    assert engine.statistics.mean_accepted > (1.2 if "wide" in shape else 1.0), "the test needs accepted drafts"


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_tree_of_256_nodes_gives_the_plain_text(few_tokens, starts, plain, family):
    """One block becomes a tree of 256 nodes (mask of eight words), verified in one forward, also over states."""
    model, prompts = few_tokens(family), starts(3, 24, seed=2)
    config = EngineConfig(**SMALL, speculate=DFlash(tiny_block_head(model), 16, 256))
    engine = Engine(model, config)
    assert engine.geometry.mask_words == 8
    assert decode(engine, prompts, 8) == plain(model, prompts, 8)
    assert engine.statistics.mean_accepted > 1.3


@pytest.mark.parametrize(
    ("family", "shape", "graph"), [("llama", (1, 0), True), ("llama", (8, 40), False), ("qwen3_5_text", (8, 40), False)]
)
def test_cuda_triton_gives_the_plain_text(few_tokens, starts, plain, family, shape, graph):
    """Kernels of another backend (here in Triton's interpreter) run blocks of both kinds, also over states."""
    pytest.importorskip("draftmark_cuda_triton")
    model, prompts = few_tokens(family), starts(2, 12, seed=8)
    drafts = DFlash(tiny_block_head(model), *shape)
    config = EngineConfig(
        "cuda_triton", page_size=16, max_num_reqs=2, max_context_len=48, speculate=drafts, graph=graph
    )
    assert decode(Engine(model, config), prompts, 6) == plain(model, prompts, 6)


# -- what is drafted --------------------------------------------------------------------------------------------


def dense_scores(model, head, text):
    """Return log-probabilities ``[block_size - 1, vocab]`` of the block after a text, without a cache.

    Args:
        text: committed tokens and the root.
    """
    c, length, rows = head.config, len(text) - 1, head.config.block_size
    states = model.hf(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    context = head.fuse(torch.cat([states[layer][0] for layer in c.feature_layers], -1))
    places = torch.arange(length + rows)

    def attend(layer, q, k, v):
        committed = head.keys_values(layer, context, places[:length])
        k, v = (torch.cat(pair).repeat_interleave(2, 1) for pair in zip(committed, (k, v), strict=True))
        shape, row = head.layers[layer], places[length:, None]
        seen = (places <= row) | (places >= length) & (not shape.causal_block)
        if shape.window_left >= 0:
            seen &= places >= row - shape.window_left
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.softmax_scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    tokens = torch.tensor([text[-1], *[c.mask_token_id] * (rows - 1)])
    hidden = head(model.embed(tokens), places[length:], attend)
    return head.logits(hidden[1:], model.lm_head).log_softmax(-1)


def best_first(scores, topk, count):
    """Return the `count` most probable paths over the topk candidates of each depth, popped from a heap."""
    best = [sorted(((-score, token) for token, score in enumerate(row)))[:topk] for row in scores.tolist()]
    heap, found = [(score, (token,)) for score, token in best[0]], set()
    heapq.heapify(heap)
    while heap and len(found) < count:
        score, path = heapq.heappop(heap)
        found.add(path)
        if len(path) < len(best):
            for more, token in best[len(path)]:
                heapq.heappush(heap, (score + more, (*path, token)))
    return found


def drafted(model, head, prompts, topk, nodes, **more):
    """Decode; return (blocks with a tree other than the plain recomputation's, all blocks)."""
    engine = Engine(model, EngineConfig(**SMALL, page_size=4, speculate=DFlash(head, topk, nodes), **more))
    seen = watch(engine)
    decode_texts = {}
    for prompt in prompts:
        engine.submit(prompt, COUNT)
    while engine.busy:
        engine.step()
    wrong = 0
    for request, length, tokens, parents in seen:
        text = request.tokens[:length]
        if len(text) < length:
            continue  # with overlap, the root's token was dropped because the request had ended
        key = tuple(text)
        if key not in decode_texts:
            decode_texts[key] = dense_scores(model, head, text)
        wrong += planted_paths(tokens, parents) != best_first(decode_texts[key], topk, (nodes or 6) - 1)
    return wrong, len(seen)


@pytest.mark.parametrize(
    ("family", "kind", "shape", "late"),
    [
        ("llama", "both", "tree", False),
        ("gemma2", "whole", "chain", True),
        ("qwen3_5_text", "both", "chain", False),
        ("granitemoehybrid", "causal", "tree", True),
    ],
)
@torch.no_grad()
def test_engine_drafts_the_trees_of_the_head(few_tokens, starts, family, kind, shape, late):
    """Every tree equals the best-first tree of the head over its whole context, recomputed without a cache.

    A mistake in stored context, positions, windows or the kind of blocks changes the tokens.
    """
    model = few_tokens(family)
    more = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND, "graph": True} if late else {}
    head = tiny_block_head(model, KINDS[kind])
    wrong, blocks = drafted(model, head, starts(3, 16, seed=4), *SHAPES[shape], **more)
    assert (wrong, blocks > 20) == (0, True)


@torch.no_grad()
def test_a_lost_context_changes_the_trees_but_not_the_text(monkeypatch, few_tokens, starts, plain):
    """A drafter that stores its context one position too far drafts other trees, and the text stays the model's."""
    from draftmark_speculative.dflash import drafter

    model, prompts = few_tokens("llama"), starts(3, 16, seed=4)
    head, store = tiny_block_head(model), drafter.BlockDrafter._store
    monkeypatch.setattr(drafter.BlockDrafter, "_store", lambda self, batch, f: store(self, batch, f.roll(1, 0)))
    wrong, blocks = drafted(model, head, prompts, *SHAPES["tree"])
    assert wrong > blocks / 4
    engine = Engine(model, EngineConfig(**SMALL, speculate=DFlash(head, 4, 12)))
    assert decode(engine, prompts, COUNT) == plain(model, prompts, COUNT)


@pytest.mark.parametrize(("depths", "topk", "count"), [(1, 5, 9), (5, 1, 9), (4, 3, 20), (7, 16, 255), (3, 2, 40)])
def test_block_tree_is_the_best_first_tree(depths, topk, count):
    """The tree has the nodes that a heap pops first, parents before children, for every request of a batch."""
    draw = torch.Generator().manual_seed(depths)
    logits = torch.randn(3, depths, max(topk, 8), generator=draw).log_softmax(-1)
    scores, tokens = logits.topk(topk, -1)
    got = block_tree(scores, tokens, count)
    for request in range(3):
        nodes, parents = (one[request].tolist() for one in got)
        assert all(parent <= index for index, parent in enumerate(parents))
        with_root = torch.tensor([0, *nodes]), torch.tensor([-1, *parents])
        assert planted_paths(*with_root) == best_first(logits[request], topk, count)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_wrong_settings_are_refused_by_name(few_tokens):
    """A chain longer than a block, too many candidates, and wrong fields of a head raise errors with their names."""
    model = few_tokens("llama")
    head = tiny_block_head(model)
    with pytest.raises(GeometryError, match=r"num_draft_tokens is 7.*block_size = 6"):
        DFlash(head, 1, 7)
    with pytest.raises(GeometryError, match=r"topk is 17.*16 tokens"):
        DFlash(head, 17, 20).open(model)
    with pytest.raises(RequestError, match="BlockHead"):
        DFlash("path")  # type: ignore[arg-type]
    wrong = ({"block_size": 1}, {"mask_token_id": 16}, {"causal": ()}, {"windows": (1, 2)})
    for fields in wrong:
        with pytest.raises(ModelError, match=next(iter(fields))):
            BlockConfig(48, 16, 4, 2, 12, 96, (0,), **fields)
    with pytest.raises(ModelError, match="hidden_size is 24"):
        DFlash(BlockHead(BlockConfig(24, 16, 4, 2, 12, 96, (0,)))).open(model)
