"""`again`: a layer's launches are those of the layer before it, at its own addresses."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark.runtime import KVCache
from draftmark_cuda_triton import boxes, launch, tiling, writing

HEADS = (8, 2)


def plain(value):
    """What a kernel gets: addresses for tensors, and what a box is made of for descriptors."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        base = value.base
        return base.data_ptr(), base.dtype, *value.shape, *value.strides, *value.block_shape
    return value


def launched(gpu, call, *args):
    """Kernels, grids and arguments that ``call(*args)`` launches."""
    before = len(gpu.launched)
    call(*args)
    # Behind the grid come stream, function and hooks.
    return [(source, [plain(one) for one in (*given[:3], *given[9:])]) for source, given in gpu.launched[before:]]


def test_launches_are_those_that_would_be_made_anew(compiled, asked_of_layers, anew):
    """Of all that is asked of layers."""
    layers, asked = asked_of_layers
    again = [launched(compiled, layers.served.attend, *one) for one in asked]
    with anew():
        for one, found in zip(asked, again, strict=True):
            assert found and found == launched(compiled, layers.served.attend, *one)


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_written_as_they_would_be_anew(compiled, layers_of, monkeypatch, fp8):
    """Rows of K and V that are parts of one projection or not, to layers as above; scales that are there and not."""
    chance, layers = random.Random(5), layers_of(Mode.DECODE, 16, fp8)
    caches, asked = [layers.layer(chance) for _ in range(6)], []
    for _ in range(40):
        cache = chance.choice(caches)
        k, v, slots = layers.new_rows(chance.choice((1, 3, 16)), chance)
        asked.append((k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots))
    again = [launched(compiled, writing.write_kv, *one) for one in asked]
    assert again == [launched(compiled, writing._launch, *one) for one in asked]
    monkeypatch.setattr(writing, "_launch", lambda *_: pytest.fail("worked out anew"))
    assert again == [launched(compiled, writing.write_kv, *one) for one in asked]


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY])
@pytest.mark.parametrize("given", [False, True], ids=["derived", "given"])
def test_metadata_is_written_as_it_would_be_anew(compiled, layers_of, anew, mode, given):
    """Of steps of any sizes, with slots that the engine brings or not; from the second of a size on nothing is worked
    out anew.
    """
    chance, layers = random.Random(6), layers_of(mode, 16)
    batches = [layers.batch(chance) for _ in range(8)]
    if given:
        batches = [replace(one, slots=layers.made(one.num_rows, dtype=torch.int64)) for one in batches]
    asked = [chance.choice(batches) for _ in range(40)]
    again = [launched(compiled, layers.served.write_metadata, one) for one in asked]
    with anew():
        assert again == [launched(compiled, layers.served.write_metadata, one) for one in asked]
    sizes = {(one.num_reqs, one.page_table.stride(0)) for one in asked}
    assert len(layers.served._written._known) == len(sizes) < len(asked)


def test_what_comes_once_is_not_remembered(compiled, layers_of):
    """Metadata of a size that no step has had: to remember it would cost more than the launch."""
    chance, layers = random.Random(6), layers_of(Mode.DECODE, 16)
    batch = layers.batch(chance)
    for known in (0, 1, 1):
        layers.served.write_metadata(batch)
        assert len(layers.served._written._known) == known


def test_a_like_layer_costs_no_look_at_its_arguments(compiled, layers_of, monkeypatch):
    """Of a second layer of the same layout nothing is bound, described or worked out."""
    chance, layers = random.Random(2), layers_of(Mode.VERIFY, 16)
    batch = layers.batch(chance)
    first, second = ([layers_of.made(4, 16, HEADS[1], 128) for _ in range(2)] for _ in range(2))
    q, out = layers.rows(batch, chance)
    layers.served.attend(q, KVCache(*first), batch, out)
    monkeypatch.setattr(launch, "attend", lambda *_: pytest.fail("worked out anew"))
    monkeypatch.setattr(boxes, "describe", lambda *_: pytest.fail("described anew"))
    given = launched(compiled, layers.served.attend, q, KVCache(*second), batch, out)
    assert [source.fn.__name__ for source, _ in given] == ["attend_uniform", "merge_pieces"]
    boxed = [one[0] for one in given[0][1] if isinstance(one, tuple) and torch.bfloat16 in one]
    # Of whole heads the last keys have descriptors of their own.
    assert boxed == 2 * [plain(one) for one in second]


def test_a_tensor_that_was_given_other_memory_is_read_there(compiled, layers_of):
    """An address is asked for at every launch, of caches too, whatever objects they are in."""
    chance, layers = random.Random(4), layers_of(Mode.DECODE, 16)
    batch, cache, other = (
        layers.batch(chance),
        *(KVCache(*(layers_of.made(4, 16, HEADS[1], 128) for _ in "kv")) for _ in "ab"),
    )
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.served.attend(q, cache, batch, out)
    for one, new in ((cache.k, other.k), (cache.v, other.v)):
        one.set_(new)
    moved = launched(compiled, layers.served.attend, q, cache, batch, out)
    assert moved == launched(compiled, layers.served.attend, q, other, batch, out)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_no_tensor_is_kept(compiled, layers_of, mode):
    """What is remembered of a launch are numbers: the caller's memory goes when the caller lets it go."""
    chance, layers = random.Random(3), layers_of(mode, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.served.attend(q, cache, batch, out)
    kept = [weakref.ref(one.untyped_storage()) for one in (cache.k, cache.v, q, out, batch.page_table)]
    compiled.launched.clear()
    del batch, cache, q, out
    gc.collect()
    assert [one() is None for one in kept] == [True] * 5


def test_all_that_may_be_launched_is_compiled_at_first(compiled, layers_of, monkeypatch):
    """Over a cache of a layout that is new: EXTEND's whole row tiles, and both cuts with their merges."""
    layers, chance = layers_of(Mode.EXTEND, 16), random.Random(2)
    monkeypatch.setattr(layers.served, "get_ready", layers.get_ready)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    batch, cache = layers.batch(chance), layers.layer(chance)
    counts = []
    for _ in range(2):
        before, (q, out) = len(compiled.launched), layers.rows(batch, chance)
        layers.served.attend(q, cache, batch, out)
        counts.append([source.fn.__name__ for source, _ in compiled.launched[before:]])
    first, again = counts
    assert first[:5] == ["attend_ragged", "attend_ragged", "merge_pieces", "attend_ragged", "merge_pieces"]
    assert len(first) == 7 and len(again) <= 2


def test_a_short_prompt_over_e4m3_compiles_what_long_ones_are_launched_with(compiled, layers_of, monkeypatch):
    """With the first one over a cache of a layout that is new; but not while a graph is captured."""
    layers, chance, capturing = layers_of(Mode.EXTEND, 16, fp8=True), random.Random(2), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(tiling, "pays_widening", lambda *_: False)
    batch, cache = layers.batch(chance), layers.layer(chance)
    counts = []
    for capturing[0] in (True, False, False):
        before, (q, out) = len(compiled.launched), layers.rows(batch, chance)
        layers.served.attend(q, cache, batch, out)
        counts.append([source.fn.__name__ for source, _ in compiled.launched[before:]])
    captured, first, again = counts
    assert "widen_pages" not in captured and len(again) <= 2
    begin = first.index("widen_pages")
    ready = ["widen_pages", "attend_ragged", *["attend_ragged", "merge_pieces"] * 2]
    assert first[begin : begin + 6] == ready
