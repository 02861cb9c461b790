"""Trees that the engine drafts, compared with the head run densely over each path: no cache, no mask, no graph.

The heads are random, so the tests need no training. A mistake in the head's inputs, cache or masks changes the tokens.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch

from core.speculative.tests.dense import COUNT, compare
from draftmark_speculative import Eagle, EngineConfig, HostKind, generate
from draftmark_speculative.eagle.drafter import Accepted, HeadDrafter
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder
from draftmark_testing.pairs import quick

SHAPES = [(1, 4, 5), (2, 3, 9), (4, 3, 12), (8, 2, 20), (3, 1, 4), (2, 2, 12), (1, 3, 8)]


@pytest.mark.parametrize(("shape", "graph"), quick(product(SHAPES, [False, True]), together=1))
@torch.no_grad()
def test_engine_drafts_the_trees_of_the_head(make_model, random_head, prompts, shape, graph):
    """After chunked prefill, draft extend and every draft step, the tree equals the tree of the densely run head."""
    wrong, trees, _ = compare(make_model("llama"), random_head(), prompts(4, 20), shape, graph=graph)
    assert (wrong, trees > 20) == (0, True)


@pytest.mark.parametrize("features", [(2,), (0,), (1, 2)])
@torch.no_grad()
def test_trees_are_right_with_any_feature_layers(make_model, random_head, prompts, features):
    """Trees equal the densely run head's if it reads one or two features, the embedding or the final norm's output."""
    wrong, trees, _ = compare(make_model("llama"), random_head(features), prompts(3, 20), (2, 3, 8))
    assert (wrong, trees > 20) == (0, True)


@torch.no_grad()
def test_a_reduced_vocabulary_drafts_its_own_tokens(make_model, random_head, prompts):
    """With a reduced vocabulary, d2t converts draft tokens in the tree and in the inputs of the next step."""
    wrong, trees, _ = compare(make_model("llama"), random_head(draft_vocab=40), prompts(3, 20), (3, 3, 10))
    assert (wrong, trees > 20) == (0, True)


@pytest.mark.parametrize("graph", [False, True])
@torch.no_grad()
def test_trees_are_right_after_long_paths_with_overlap(markov, random_head, prompts, graph):
    """With overlap, after accepted paths of several tokens, the trees equal those of the densely run head."""
    model, head = markov(0.01)
    wrong, trees, accepted = compare(
        model, mixed(head, random_head((0, 1))), prompts(4, 20), (3, 4, 12), graph=graph,
        host_lengths=HostKind.UPPER_BOUND, overlap=True,
    )  # fmt: skip
    assert (wrong, trees > 10) == (0, True)
    assert accepted > 1.3, "the test needs accepted drafts"


def mixed(head, noise):
    """Return a head with mostly right drafts that still depends on attention and features."""
    mixture = deepcopy(head)
    for (name, mine), other in zip(mixture.named_parameters(), noise.parameters(), strict=True):
        if mine.dim() > 1:
            mine.data += (0.3 if name.startswith("attention.") else 0.01) * other.data
    return mixture


def branch_index(self):
    """Mutant of `place`: a beam sees the slots of its own branch index, whatever its parents are (SGLang's layout)."""
    placed, k = self.slots.shape[1], self.topk
    own = torch.arange(k).expand_as(self.tokens)
    parents = own + (placed - k) if placed else torch.full_like(self.tokens, -1)
    self.slots = torch.cat((self.slots, parents), 1)
    return self.slots


def one_early(write):
    """Mutant of `write`: each node gets the feature of the node before it."""

    def mutant(self, prefix_lens, verdict, features):
        write(self, prefix_lens, verdict._replace(accept_index=(verdict.accept_index - 1).clamp(min=0)), features)

    return mutant


def full_count(write):
    """Mutant of `write`: draft extend counts every node as accepted."""

    def mutant(self, prefix_lens, verdict, features):
        write(self, prefix_lens, verdict, features)
        self.accept_lens.fill_(verdict.accept_index.shape[1])

    return mutant


MUTANTS = {
    "slots follow the branch index": (DraftTreeBuilder, "place", lambda _: branch_index),
    "no draft extend": (HeadDrafter, "draft_extend", lambda _: lambda self, padded, live, host: None),
    "features off by one": (Accepted, "write", one_early),
    "draft extend without the true count": (Accepted, "write", full_count),
}


@pytest.fixture(scope="module")
def unchanged(make_model, markov, random_head, prompts):
    """Return a function that makes a mutant test's inputs and plain texts, after a check without a mutant."""

    @cache
    def of(attends):
        # Mutants of draft extend show only after long accepted paths, so they get a head that guesses well. The mutant
        # of the slots gets a head with strong attention, so that its tokens depend on the slots that it reads.
        if attends:
            runs = make_model("llama"), attentive(random_head()), prompts(2, 5), (4, 6, 40)
        else:
            runs = markov(0.01)[0], mixed(markov(0.01)[1], random_head((0, 1))), prompts(4, 20), (3, 4, 12)
        model, head, starts, shape = runs
        plain = texts(model, None, starts, shape)
        assert texts(model, head, starts, shape) == plain
        assert compare(*runs)[0] == 0
        return runs, plain

    return of


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.no_grad()
def test_mutants_change_the_trees_but_not_the_text(unchanged, mutant, monkeypatch):
    """A mistake in drafting changes the trees, but never the text."""
    attends = mutant == "slots follow the branch index"
    (model, head, starts, shape), plain = unchanged(attends)
    owner, name, make = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    wrong, trees, _ = compare(model, head, starts, shape)
    assert wrong >= 4, f"{wrong} of {trees} trees differ"
    assert texts(model, head, starts, shape) == plain


def attentive(head):
    """Return a random head in which attention weighs more than the feature."""
    strong = deepcopy(head)
    strong.feature_proj.weight.data *= 0.05
    strong.attention.o_proj.weight.data *= 3
    return strong


def texts(model, head, starts, shape):
    """Return the engine's texts with a head, or without one."""
    speculate = None if head is None else Eagle(head, *shape)
    outs, _ = generate(model, starts, COUNT, EngineConfig(speculate=speculate, page_size=4, max_context_len=64))
    return [out.tokens for out in outs]
