"""Tests of the conversion of SGLang's forward batches to draftmark batches, with padding requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, Mode, load
from draftmark.runtime import BatchBuffers, Exact, ForwardBatch, Tree, Unknown, validate
from draftmark_sglang.batches import extend_batch, uniform_batch, write_batch
from draftmark_sglang.facts import RunnerFacts
from draftmark_sglang.geometries import geometry_of, modes_of
from draftmark_sglang.phases import counted_rows, mode_of
from draftmark_sglang.prefixes import Prefixes
from draftmark_sglang.trees import TreeMasks

FACTS = RunnerFacts("cpu", "float32", "float32", 16, 4, 100, 64, "EAGLE", 4, 3, 8)


class _Forward(SimpleNamespace):
    """Stands in for SGLang's `ForwardBatch`, with the attributes that the adapter reads."""


def _attention(facts: RunnerFacts = FACTS) -> Any:
    loaded = load("reference")
    shape = AttentionShape(2, 1, 8, 16, "float32", "float32")
    geometry = geometry_of(loaded, shape, facts, DeviceProfile(), modes_of(facts), 6)
    tree_ops = loaded.tree_ops(geometry, torch.device("cpu"))
    buffers = BatchBuffers(geometry, "cpu")

    def uniform(mode: Mode, step: int, requests: int, host: Any, *, tree: bool) -> ForwardBatch:
        return buffers.uniform(mode, step, requests, requests, host, tree=tree)

    return SimpleNamespace(
        geometry=geometry, buffers=buffers, tree_ops=tree_ops, prefixes=Prefixes(buffers), uniform=uniform
    )


def _batch(attention: Any, forward: Any, mode: Mode, masks: TreeMasks | None = None) -> ForwardBatch:
    """Return a converted batch. The part that graphs capture runs twice, because a replay starts from used buffers."""
    batch = uniform_batch(attention, forward, mode, POOL, masks=masks, in_capture=False)
    write_batch(attention, batch, masks)
    write_batch(attention, batch, masks)
    return batch


def _forward(lens: list[int], rows: list[int], **more: Any) -> _Forward:
    return _Forward(
        batch_size=len(lens),
        seq_lens=torch.tensor(lens),
        req_pool_indices=torch.tensor(rows),
        seq_lens_cpu=None,
        **more,
    )


POOL = torch.cat([torch.zeros(1, 128), 16 + torch.arange(4 * 128).view(4, 128)]).to(torch.int32)


def test_decode_excludes_its_own_row() -> None:
    """In a decode, the committed length is SGLang's length minus 1; a padding request has length 0 and null pages."""
    attention = _attention()
    batch = _batch(attention, _forward([9, 40, 1], [2, 1, 0]), Mode.DECODE)
    validate(batch, attention.geometry)
    assert batch.prefix_lens.tolist() == [8, 39, 0]
    assert batch.positions.tolist() == [8, 39, 0]
    assert bool((batch.page_table[2] == 0).all()) and int(batch.page_table[0, 0]) == 9


def test_host_lengths_are_exact_or_unknown() -> None:
    """Host lengths are exact, or unknown if SGLang has none or captures a graph (sglang#26738, #26521)."""
    attention, forward = _attention(), _forward([9, 40], [2, 1])
    batch = _batch(attention, forward, Mode.DECODE)
    assert isinstance(batch.host, Unknown)
    forward.seq_lens_cpu = torch.tensor([9, 40])
    batch = _batch(attention, forward, Mode.DECODE)
    assert batch.host == Exact((8, 39))
    assert isinstance(uniform_batch(attention, forward, Mode.DECODE, POOL, in_capture=True).host, Unknown)


def test_tree_with_padding() -> None:
    """SGLang gives tree masks of live requests only, so each row of a padding request sees only itself."""
    attention = _attention()
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[3, 2] = mask[4:, 2] = False
    forward = _forward([20, 1], [3, 0], spec_info=SimpleNamespace(custom_mask=mask.flatten()), num_padding=1)
    batch = _batch(attention, forward, Mode.VERIFY, TreeMasks(6, 8, "cpu"))
    validate(batch, attention.geometry)
    assert isinstance(batch.tail, Tree)
    assert batch.tail.depth[0].tolist() == [0, 1, 2, 2, 3, 4, 5, 6]
    assert batch.tail.mask[8:, 0].tolist() == [1 << node for node in range(8)]
    assert batch.positions[:8].tolist() == [20, 21, 22, 22, 23, 24, 25, 26]


@pytest.mark.parametrize(("algorithm", "topk", "stated"), [("NGRAM", 1, 2), ("EAGLE", 1, 1), ("EAGLE", 4, 4)])
def test_geometry_states_trees(algorithm: str, topk: int, stated: int) -> None:
    """A backend learns from topk that tails are trees. NGRAM verifies trees, although SGLang gives it no topk."""
    facts = replace(FACTS, algorithm=algorithm, topk=topk)
    assert _attention(facts).geometry.draft.topk == stated


def test_padded_draft_extend_has_no_prefix() -> None:
    """In DRAFT_EXTEND, a padding request has committed length 0, not its `seq_lens` of 1 minus its D rows."""
    attention = _attention(replace(FACTS, is_draft=True))
    forward = _forward([20, 1], [3, 0])
    batch = _batch(attention, forward, Mode.DRAFT_EXTEND)
    assert batch.prefix_lens.tolist() == [12, 0]
    assert batch.positions[8:].tolist() == list(range(8))


def test_narrower_table_resets_columns() -> None:
    """Page table columns past the end of a narrower `req_to_token` become null pages again (sglang#22778)."""
    attention, forward = _attention(), _forward([9, 40], [2, 1])
    _batch(attention, forward, Mode.DECODE)
    narrow = uniform_batch(attention, forward, Mode.DECODE, POOL[:, :32].clone(), in_capture=False)
    write_batch(attention, narrow)
    assert bool((narrow.page_table[:, 2:] == 0).all()) and bool((narrow.page_table[:, :2] > 0).all())


def test_extend_is_ragged() -> None:
    """Each request of an EXTEND batch has its own number of rows after its committed tokens."""
    attention = _attention()
    forward = _forward([0], [1, 3], extend_seq_lens_cpu=[5, 1], extend_prefix_lens_cpu=[32, 7])
    forward.extend_prefix_lens = torch.tensor([32, 7], dtype=torch.int32)
    batch = extend_batch(attention.geometry, forward, POOL)
    validate(batch, attention.geometry)
    assert batch.q_lens == (5, 1) and batch.host == Exact((32, 7))
    assert batch.positions.tolist() == [32, 33, 34, 35, 36, 7]


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, predicate: str) -> Any:
        return lambda: (
            predicate
            == {"DECODE": "is_decode", "TARGET_VERIFY": "is_target_verify", "MIXED": "is_extend"}.get(
                self.name, "is_extend" if self.name == "EXTEND" else ""
            )
        )


@pytest.mark.parametrize(
    ("name", "mode", "counted"),
    [
        ("EXTEND", Mode.EXTEND, 0),
        ("MIXED", Mode.EXTEND, 0),
        ("DECODE", Mode.DECODE, 1),
        ("TARGET_VERIFY", Mode.VERIFY, 0),
        ("DRAFT_EXTEND_V2", Mode.DRAFT_EXTEND, 8),
    ],
)
def test_phases(name: str, mode: Mode, counted: int) -> None:
    """Each forward mode of SGLang has a draftmark mode and a number of rows that `seq_lens` already includes."""
    assert mode_of(_Name(name)) is mode and counted_rows(mode, 8) == counted


def test_unknown_forward_mode_is_rejected() -> None:
    """The error for an unsupported forward mode contains its name."""
    with pytest.raises(NotImplementedError, match="forward mode PREBUILT is not supported"):
        mode_of(_Name("PREBUILT"))
