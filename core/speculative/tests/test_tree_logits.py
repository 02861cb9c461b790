"""A tree forward gives each root-to-leaf path the logits of plain decoding of that path."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from draftmark.batch import BatchBuffers, ragged
from draftmark.geometry import Mode
from draftmark.lengths import Unknown
from draftmark.tree import write_tail
from draftmark_speculative import EngineConfig, Speculation
from draftmark_speculative.config import HostKind
from draftmark_speculative.engine import Engine
from draftmark_speculative.models.tiny import FAMILIES, WINDOW
from draftmark_testing.pairs import quick

PARENTS = [-1, 0, 0, 1, 1, 2, 4]  # parents of a tree of seven nodes, three branches and depth 3
PATHS = [[0, 1, 3], [0, 1, 4, 6], [0, 2, 5]]


class Fixed(Speculation):
    """Speculation of a fixed tree shape, for an engine that never runs a round: the test calls its layers directly."""

    topk, num_draft_tokens = 3, 7

    def begin(self, request_id, prompt):
        raise AssertionError("no request is submitted")


@pytest.mark.parametrize(("family", "page_size"), quick(product(FAMILIES, [1, 16]), together=1))
def test_tree_logits_equal_path_logits(make_model, family, page_size):
    """Logits of every tree node equal transformers' logits on its path, and only the tree rows' KV changes.

    Prefixes have 21 and 9 tokens (not page-aligned). Two padded requests are in the batch. Unused KV is NaN.
    """
    model = make_model(family)
    assert _worst_error(model, _layers(model, page_size)) < 2e-5


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *product(["mistral", "gemma2", "gemma3_text"], [{"window_left": n} for n in (-1, WINDOW, WINDOW - 2)]),
        ("gemma2", {"logits_soft_cap": 0.0}),
        ("gpt_oss", {"sinks": False}),
    ],
    ids=str,
)
def test_other_window_cap_or_sinks_change_logits(make_model, monkeypatch, family, change):
    """A changed window, soft cap or sink changes the logits, so the comparison would detect a wrong value."""
    model = make_model(family)
    windowed = "window_left" in change
    with monkeypatch.context() as patch:
        changed = [one if windowed and one.window_left < 0 else replace(one, **change) for one in model.layers]
        patch.setattr(model, "layers", tuple(changed))
        layers = _layers(model, 16)
    assert _worst_error(model, layers) > 1e-3


def _layers(model, page_size):
    """Return an engine's layers, with NaN in KV that no request owns."""
    config = EngineConfig(
        speculate=Fixed(), page_size=page_size, max_num_reqs=4, max_context_len=48, host_lengths=HostKind.UNKNOWN
    )
    layers = Engine(model, config)._layers
    for group in layers.groups:
        for tensor in (group.pool.k, group.pool.v):
            tensor[:, layers.pages.null :] = float("nan")
    return layers


def _worst_error(model, layers):
    """Return the largest error of any node of two trees, relative to the largest logit of its path."""
    draw = torch.Generator().manual_seed(0)
    prefixes = [torch.randint(0, 256, (n,), generator=draw) for n in (21, 9)]
    trees = torch.randint(0, 256, (2, 7), generator=draw)
    columns = layers.geometry.max_pages_per_req
    shuffled = 1 + torch.randperm(layers.pages.total - 1, generator=draw)[: 2 * columns]
    table = shuffled.view(2, columns).int()
    with torch.inference_mode():
        _prefill(model, layers, table, prefixes)
        before = [group.pool.k.clone() for group in layers.groups]
        logits = _verify(model, layers, table, prefixes, trees)
    _only_tails_changed(layers, before, table, prefixes)
    errors = []
    for (r, prefix), path in product(enumerate(prefixes), PATHS):
        ids = torch.cat([prefix, trees[r][path]])[None]
        with torch.no_grad():
            want = model.hf(ids).logits[0, len(prefix) :]
        errors.append((logits[r][path] - want).abs().max() / want.abs().max())
    return max(errors)


def _prefill(model, layers, table, prefixes):
    zero = torch.zeros(2, dtype=torch.int32)
    lens = tuple(len(p) for p in prefixes)
    batch = ragged(layers.geometry, zero, table, lens, Unknown(2, layers.geometry.max_prefix_len))
    layers.plan(batch)
    layers.begin(batch)
    model.forward(torch.cat(prefixes), batch.positions, layers)


def _verify(model, layers, table, prefixes, trees):
    geometry = layers.geometry
    buffers = BatchBuffers(geometry, "cpu")
    buffers.mask.fill_(-1)  # as if stale memory were inside and after the live part of the mask
    batch = buffers.uniform(Mode.VERIFY, 0, 4, 2, Unknown(2, geometry.max_prefix_len), tree=True)
    batch.prefix_lens.copy_(torch.tensor([len(p) for p in prefixes] + [0, 0]))
    batch.page_table.zero_()
    batch.page_table[:2] = table
    write_tail(batch, geometry, torch.tensor(PARENTS).expand(4, -1))
    layers.plan(batch)
    layers.begin(batch)
    ids = torch.cat([trees.flatten(), torch.zeros(14, dtype=torch.long)])
    return model.forward(ids, batch.positions, layers).view(4, 7, -1)


def _only_tails_changed(layers, before, table, prefixes):
    page_size = layers.geometry.attention.page_size
    written = set(range(layers.pages.null * page_size))
    for r, prefix in enumerate(prefixes):
        for position in range(len(prefix), len(prefix) + 7):
            written.add(int(table[r, position // page_size]) * page_size + position % page_size)
    for group, old in zip(layers.groups, before, strict=True):
        new = group.pool.k.flatten(1, 2)
        same = (new == old.flatten(1, 2)) | (new.isnan() & old.flatten(1, 2).isnan())
        changed = set((~same).flatten(2).any(2).any(0).nonzero().flatten().tolist())
        assert changed <= written, sorted(changed - written)
