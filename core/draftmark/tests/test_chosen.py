"""Lists of chosen keys: sizes by rows, batches, and refusals that name field, value, limit and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.draftmark.tests.bad_calls import Rig
from draftmark import BatchError, BufferError, Geometry, GeometryError, Mode
from draftmark.batch_tensors import batch_tensors
from draftmark.runtime import BatchBuffers, Chosen, Exact, KVCache, KVPool, ragged, validate
from draftmark_tools.models import latent_shape

WIDTH = 6


class ChosenRig(Rig):
    """The rig of `bad_calls`, with lists of up to 6 keys for each row of its two trees, on a guarded backend."""

    def __init__(self) -> None:
        super().__init__()
        old = self.geometry
        attention = replace(old.attention, chosen_width=WIDTH)
        self.geometry = Geometry.create(attention, old.limits, old.draft, modes=old.modes)
        self.backend = self.loaded.open(self.geometry, "cpu", guard=True)
        self.buffers = BatchBuffers(self.geometry, "cpu")
        self.batch = self.uniform(Mode.VERIFY, 0, 2, 2, Exact((5, 2)), tree=True)
        self.fill()
        self.batch.chosen.counts.copy_(torch.tensor([3, 1, 0, 2, 1, 1, 1, 1]))
        first, second = (4 * int(one[0]) for one in self.batch.page_table)
        self.batch.chosen.slots.fill_(2**31 - 1)
        self.batch.chosen.slots[0, :3] = torch.tensor([first + 4, -1, first])
        self.batch.chosen.slots[1, 0] = first + 1
        self.batch.chosen.slots[3, :2] = torch.tensor([-1, first + 2])
        self.batch.chosen.slots[4:, 0] = second


def test_lists_are_sized_by_rows(make_geometry):
    """A forward of D rows a request has D lists a request; a layer without lists has none."""
    geometry = make_geometry(chosen_width=WIDTH, num_draft_tokens=5, max_num_reqs=6, modes=(Mode.VERIFY, Mode.DECODE))
    sizes = {one.name: one.shape for one in batch_tensors(geometry)}
    assert (sizes["chosen_slots"], sizes["chosen_counts"]) == ((30, WIDTH), (30,))
    assert "chosen_slots" not in {one.name for one in batch_tensors(make_geometry())}
    assert BatchBuffers(make_geometry(), "cpu").chosen is None
    buffers = BatchBuffers(geometry, "cpu")
    batch = buffers.uniform(Mode.DECODE, 0, 3, 2, Exact((1, 1)), tree=False)
    assert batch.chosen.slots.shape == (3, WIDTH) and batch.chosen.counts.shape == (3,)
    assert batch.chosen.slots.data_ptr() == buffers.chosen.slots.data_ptr()
    assert validate(batch, geometry) is batch


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"chosen_width": -1}, "attention.chosen_width", "it must be >= 0; set the entries of a row's list"),
        ({"chosen_width": 2.0}, "attention.chosen_width", "it must be an integer"),
        ({"chosen_width": 4, "window_left": 3}, "attention.window_left", "has no window: a row attends to every key"),
    ],
)
def test_a_width_out_of_range_is_refused(make_geometry, fields, field, words):
    """Each error names the field, its value, the limit and the remedy."""
    with pytest.raises(GeometryError) as caught:
        make_geometry(**fields)
    assert caught.value.field == field and words in str(caught.value), str(caught.value)


SLOTS, COUNTS = torch.zeros(8, WIDTH, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (None, "chosen is None, but it must be a Chosen, because the geometry has chosen_width 6; take it from"),
        (Chosen(SLOTS.long(), COUNTS), r"chosen.slots is int64 \[8, 6\], but this batch needs int32 \[8, 6\]"),
        (Chosen(SLOTS[:2], COUNTS), r"chosen.slots is int32 \[2, 6\]"),
        (Chosen(SLOTS[:, :5], COUNTS), r"chosen.slots is int32 \[8, 5\]"),
        (Chosen(SLOTS, COUNTS[:2]), r"chosen.counts is int32 \[2\], but this batch needs int32 \[8\]"),
        (Chosen(SLOTS, torch.zeros(16, dtype=torch.int32)[::2]), r"chosen.counts has strides \[2\]"),
        (Chosen(torch.zeros(8, 9, dtype=torch.int32)[:, :WIDTH], COUNTS), r"chosen.slots has strides \[9, 1\]"),
        (Chosen(SLOTS.to("meta"), COUNTS), "chosen.slots is on meta"),
    ],
)
def test_wrong_lists_are_refused(chosen, words):
    """`validate` and `ragged` refuse lists of requests instead of rows, of another width, dtype, pitch or device."""
    rig = ChosenRig()
    with pytest.raises(BatchError, match=words):
        validate(replace(rig.batch, chosen=chosen), rig.geometry)
    with pytest.raises(BatchError, match=words):
        ragged(rig.geometry, *extend(rig), (5, 3), Exact((0, 0)), chosen=chosen)


def extend(rig):
    """Return prefix lengths and page table of an EXTEND of two prompts."""
    return torch.zeros(2, dtype=torch.int32), rig.batch.page_table.clone()


def test_a_layer_without_lists_ignores_them():
    """Layers of one model share a batch: a dense layer takes a batch with lists."""
    rig = ChosenRig()
    plain = Rig()
    assert validate(rig.batch, plain.geometry) is rig.batch
    lists = Chosen(SLOTS, COUNTS)
    assert ragged(rig.geometry, *extend(rig), (5, 3), Exact((0, 0)), chosen=lists).chosen is lists


@pytest.mark.parametrize(
    ("row", "count", "slots", "words"),
    [
        (0, 7, None, r"chosen.counts\[0\] is 7, but a list has 0 … 6 entries"),
        (3, -1, None, r"chosen.counts\[3\] is -1"),
        (0, 4, {3: 128}, r"chosen.slots\[0\] has 128, but the cache has slots 0 … 127; write -1"),
        (0, 4, {3: -2}, r"chosen.slots\[0\] has -2"),
        (0, 4, {1: 4, 3: 4}, r"chosen.slots\[0\] has slot 4 more than once"),
        (1, 1, {0: 40}, r"chosen.slots\[1\] has slot 40, which row 1 of request 0 does not see: its prefix has 5"),
        (1, 1, {0: 11}, r"which row 1 of request 0 does not see"),
    ],
)
def test_guard_mode_reads_the_lists(row, count, slots, words):
    """Before each layer a count, a slot, a repeated slot, or a slot of another row is refused by name."""
    rig = ChosenRig()
    assert rig.forward().isfinite().all()
    rig.batch.chosen.counts[row] = count
    for entry, slot in (slots or {}).items():
        rig.batch.chosen.slots[row, entry] = slot
    with pytest.raises(BatchError, match=words):
        rig.forward()


def test_lists_may_change_between_layers():
    """One `write_metadata` serves layers with lists of their own: a backend reads the lists in `attend`."""
    rig = ChosenRig()
    want = rig.forward().clone()
    assert not want[2].any()
    rig.batch.chosen.counts.zero_()
    rig.ready()
    rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out)
    assert not rig.out.any()
    rig.batch.chosen.counts.copy_(torch.tensor([3, 1, 0, 2, 1, 1, 1, 1]))
    rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out)
    assert torch.equal(rig.out, want)


def test_slots_past_int32_are_refused(make_geometry):
    """A pool with more slots than int32 counts has no lists, neither as a KVPool nor as an engine's tensors."""
    geometry = make_geometry(chosen_width=WIDTH)
    with pytest.raises(BufferError, match=r"num_pages is 536870913, but chosen .* at most 536870912 pages"):
        KVPool(geometry, 1, 2**29 + 1, 1, "meta")
    rig = ChosenRig()
    far = torch.zeros(1, 4, 2, 8).expand(2**29 + 1, -1, -1, -1)
    with pytest.raises(BatchError, match="the cache has 2147483652 slots, but chosen keys are int32 slots"):
        rig.forward(cache=KVCache(far, far))


def test_an_indexers_topk_is_the_width():
    """`latent_shape` reads index_topk; `dense=True` leaves it out, and pools of keys are refused."""
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "qk_nope_head_dim": 128}
    assert latent_shape(config | {"index_topk": 2048}, page_size=64).chosen_width == 2048
    assert latent_shape(config | {"index_topk": 2048}, page_size=64, dense=True).chosen_width == 0
    assert latent_shape(config, page_size=64).chosen_width == 0
    with pytest.raises(GeometryError, match=r"config.index_kpool is 4, but its indexer chooses pools .*dense=True"):
        latent_shape(config | {"index_topk": 2048, "index_kpool": 4}, page_size=64)
    with pytest.raises(GeometryError, match=r"config.index_topk"):
        latent_shape(config | {"index_topk": "many"}, page_size=64)


def test_size_prints_the_lists(draftmark):
    """`draftmark size` counts the lists of the largest forward."""
    argv = ("--chosen-width", 2048, "--max-num-reqs", 8, "--num-draft-tokens", 4, "--max-extend-tokens", 16, "--json")
    shown = draftmark("size", "reference", *argv)
    assert shown.code == 0
    sizes = {one["name"]: one["shape"] for one in shown.json["batch"]}
    assert (sizes["chosen_slots"], sizes["chosen_counts"]) == ([32, 2048], [32])
    assert "lists of 2048 keys" in draftmark("size", "reference", *argv[:-1]).out
