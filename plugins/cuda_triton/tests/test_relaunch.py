"""`relaunch`: a repeated launch equals a new launch with the addresses of its own tensors."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from draftmark import BatchError, Mode
from draftmark.batch import Tree
from draftmark.runtime import KVCache
from draftmark_cuda_triton import decode_verify, kv_write
from draftmark_cuda_triton.heuristics import upcast
from draftmark_cuda_triton.launch import attention, relaunch, tma

pytestmark = pytest.mark.usefixtures("without_machine_code")
HEADS = (8, 2)


def plain(value):
    """Return a comparable value: the address of a tensor, the fields of a descriptor, or the value itself."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        base = value.base
        return base.data_ptr(), base.dtype, *value.shape, *value.strides, *value.block_shape
    return value


def launched(gpu, call, *args):
    """Return the kernels, grids and arguments that ``call(*args)`` launches."""
    before = len(gpu.launched)
    call(*args)
    # given[3:9] are the stream, the function and hooks, which differ between launches.
    return [(source, [plain(one) for one in (*given[:3], *given[9:])]) for source, given in gpu.launched[before:]]


def test_relaunch_equals_a_new_launch(fake_gpu, layer_calls, without_relaunch):
    """Repeated attention launches equal new launches, for every kind of layer."""
    layers, calls = layer_calls
    again = [launched(fake_gpu, layers.attention.attend, *one) for one in calls]
    with without_relaunch():
        for one, found in zip(calls, again, strict=True):
            assert found and found == launched(fake_gpu, layers.attention.attend, *one)


@pytest.mark.parametrize("fp8", [False, True])
def test_kv_write_relaunch_equals_a_new_launch(fake_gpu, make_layers, monkeypatch, fp8):
    """Repeated write_kv launches equal new ones, with or without scales, also if K and V are slices of a QKV tensor."""
    chance, layers = random.Random(5), make_layers(Mode.DECODE, 16, fp8)
    caches, calls = [layers.layer(chance) for _ in range(6)], []
    for _ in range(40):
        cache = chance.choice(caches)
        k, v, slots = layers.new_rows(chance.choice((1, 3, 16)), chance)
        calls.append((k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots))
    again = [launched(fake_gpu, kv_write.write_kv, *one) for one in calls]
    assert again == [launched(fake_gpu, kv_write.launch_write_kv, *one) for one in calls]
    monkeypatch.setattr(kv_write, "launch_write_kv", lambda *_: pytest.fail("worked out anew"))
    assert again == [launched(fake_gpu, kv_write.write_kv, *one) for one in calls]


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY])
@pytest.mark.parametrize("given", [False, True], ids=["derived", "given"])
def test_metadata_relaunch_equals_a_new_launch(fake_gpu, make_layers, monkeypatch, without_relaunch, mode, given):
    """Repeated metadata launches equal new ones, with slots of the engine or without.

    Here a size is recorded in its second use, so later uses repeat the recorded launch.
    """
    monkeypatch.setattr(decode_verify, "UNRECORDED_STEPS", 1)
    chance, layers = random.Random(6), make_layers(mode, 16)
    batches = [layers.batch(chance) for _ in range(8)]
    if given:
        batches = [replace(one, slots=layers.new_tensor(one.num_rows, dtype=torch.int64)) for one in batches]
    calls = [chance.choice(batches) for _ in range(40)]
    again = [launched(fake_gpu, layers.attention.write_metadata, one) for one in calls]
    with without_relaunch():
        assert again == [launched(fake_gpu, layers.attention.write_metadata, one) for one in calls]
    sizes = {(one.num_reqs, one.page_table.stride(0)) for one in calls}
    assert len(layers.attention._relaunch_metadata._cache) == len(sizes) < len(calls)


def test_rare_layout_is_not_recorded(fake_gpu, make_layers):
    """Metadata launches of a layout are recorded after some uses, since recording costs more than a launch."""
    chance, layers = random.Random(6), make_layers(Mode.DECODE, 16)
    batch = layers.batch(chance)
    for known in (*[0] * decode_verify.UNRECORDED_STEPS, 1, 1):
        layers.attention.write_metadata(batch)
        assert len(layers.attention._relaunch_metadata._cache) == known


def test_equal_layer_skips_argument_binding(fake_gpu, make_layers, monkeypatch):
    """A second layer of equal layout launches without binding arguments or making descriptors."""
    chance, layers = random.Random(2), make_layers(Mode.VERIFY, 16)
    batch = layers.batch(chance)
    first, second = ([make_layers.new_tensor(4, 16, HEADS[1], 128) for _ in range(2)] for _ in range(2))
    q, out = layers.rows(batch, chance)
    layers.attention.attend(q, KVCache(*first), batch, out)
    monkeypatch.setattr(attention, "attend_decode_verify", lambda *_: pytest.fail("worked out anew"))
    monkeypatch.setattr(tma, "make_descriptors", lambda *_: pytest.fail("described anew"))
    given = launched(fake_gpu, layers.attention.attend, q, KVCache(*second), batch, out)
    assert [source.fn.__name__ for source, _ in given] == ["attend_decode_verify", "combine_splits"]
    boxed = [one[0] for one in given[0][1] if isinstance(one, tuple) and torch.bfloat16 in one]
    # Each of K and V appears twice: full-head boxes need a second descriptor, with a smaller box for the last keys.
    assert boxed == 2 * [plain(one) for one in second]


def test_tensor_with_new_storage_is_read_at_its_address(fake_gpu, make_layers):
    """Each launch reads the current address of every tensor, also of a cache tensor with new storage."""
    chance, layers = random.Random(4), make_layers(Mode.DECODE, 16)
    batch, cache, other = (
        layers.batch(chance),
        *(KVCache(*(make_layers.new_tensor(4, 16, HEADS[1], 128) for _ in "kv")) for _ in "ab"),
    )
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.attention.attend(q, cache, batch, out)
    for one, new in ((cache.k, other.k), (cache.v, other.v)):
        one.set_(new)
    moved = launched(fake_gpu, layers.attention.attend, q, cache, batch, out)
    assert moved == launched(fake_gpu, layers.attention.attend, q, other, batch, out)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_cache_keeps_no_tensor_alive(fake_gpu, make_layers, mode):
    """The relaunch cache stores numbers only, so the caller's tensors are freed when the caller drops them."""
    chance, layers = random.Random(3), make_layers(mode, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.attention.attend(q, cache, batch, out)
    kept = [weakref.ref(one.untyped_storage()) for one in (cache.k, cache.v, q, out, batch.page_table)]
    fake_gpu.launched.clear()
    del batch, cache, q, out
    gc.collect()
    assert [one() is None for one in kept] == [True] * 5


def test_first_prefill_compiles_every_split_kernel(fake_gpu, make_layers, monkeypatch):
    """The first EXTEND over a new cache layout compiles the unsplit kernel and both split kernels with combines."""
    layers, chance = make_layers(Mode.EXTEND, 16), random.Random(2)
    monkeypatch.setattr(layers.attention, "warm_up", layers.warm_up)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    batch, cache = layers.batch(chance), layers.layer(chance)
    counts = []
    for _ in range(2):
        before, (q, out) = len(fake_gpu.launched), layers.rows(batch, chance)
        layers.attention.attend(q, cache, batch, out)
        counts.append([source.fn.__name__ for source, _ in fake_gpu.launched[before:]])
    first, again = counts
    assert first[:5] == ["attend_prefill", "attend_prefill", "combine_splits", "attend_prefill", "combine_splits"]
    assert len(first) == 7 and len(again) <= 2


def test_short_fp8_prompt_compiles_upcast_kernels(fake_gpu, make_layers, monkeypatch):
    """The first short prompt over a new cache layout compiles the upcast kernels, except during graph capture."""
    layers, chance, capturing = make_layers(Mode.EXTEND, 16, fp8=True), random.Random(2), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(upcast, "upcast_pays", lambda *_: False)
    batch, cache = layers.batch(chance), layers.layer(chance)
    counts = []
    for capturing[0] in (True, False, False):
        before, (q, out) = len(fake_gpu.launched), layers.rows(batch, chance)
        layers.attention.attend(q, cache, batch, out)
        counts.append([source.fn.__name__ for source, _ in fake_gpu.launched[before:]])
    captured, first, again = counts
    assert "upcast_pages" not in captured and len(again) <= 2
    begin = first.index("upcast_pages")
    ready = ["upcast_pages", "attend_prefill", *["attend_prefill", "combine_splits"] * 2]
    assert first[begin : begin + 6] == ready


def test_layouts_leave_one_by_one(fake_gpu, make_layers, monkeypatch):
    """A layout beyond the maximum replaces the oldest one. Other layouts stay recorded, and so does every plan."""
    monkeypatch.setattr(relaunch, "MAX_LAYOUTS", 3)
    monkeypatch.setattr(decode_verify, "MAX_LAYOUTS", 3)
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    batch, caches = (
        layers.batch(chance),
        [KVCache(*(make_layers.new_tensor(n, 16, 2, 128) for _ in "kv")) for n in (4, 5, 6, 7)],
    )
    q, out = layers.rows(batch, chance)
    recorded = layers.attention._relaunch._cache
    for cache in caches:
        layers.attention.attend(q, cache, batch, out)
    kept = list(recorded)
    assert len(kept) == 3
    layers.attention.attend(q, caches[0], batch, out)
    assert list(recorded)[:2] == kept[1:] and len(recorded) == 3


@pytest.mark.parametrize(
    ("field", "dtype"), [("prefix_lens", "int64"), ("q_indptr", "int64"), ("page_table", "int64"), ("slots", "int32")]
)
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_batch_tensor_of_another_dtype_is_refused(fake_gpu, make_layers, mode, field, dtype):
    """A batch with a tensor that the kernels would misread raises an error that names the field and the conversion."""
    chance, layers = random.Random(2), make_layers(mode, 16)
    batch = layers.batch(chance)
    shape = (batch.positions if field == "slots" else getattr(batch, field)).shape
    wrong = make_layers.new_tensor(*shape, dtype=getattr(torch, dtype))
    with pytest.raises(BatchError, match=rf"{field} has dtype torch.{dtype}, .* pass {field}.to"):
        layers.attention.write_metadata(replace(batch, **{field: wrong}))


def test_mask_of_another_dtype_is_refused(fake_gpu, make_layers):
    """A tree mask of int64 raises an error, also if a mask of int32 and equal shape was attended before."""
    chance, layers = random.Random(2), make_layers(Mode.VERIFY, 16)
    batch = next(one for one in iter(lambda: layers.batch(chance), None) if isinstance(one.tail, Tree))
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.attention.attend(q, layers.layer(chance), batch, out)
    tail = Tree(make_layers.new_tensor(*batch.tail.mask.shape, dtype=torch.int64), batch.tail.depth)
    with pytest.raises(BatchError, match=r"tail\.mask has dtype torch\.int64"):
        layers.attention.attend(q, layers.layer(chance), replace(batch, tail=tail), out)


def test_int32_slots_are_refused(fake_gpu, make_layers):
    """write_kv raises an error for slots of int32, which its kernel would read as int64."""
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    cache, (k, v, slots) = layers.layer(chance), layers.new_rows(3, chance)
    with pytest.raises(BatchError, match=r"slot_mapping has dtype torch\.int32"):
        kv_write.write_kv(k, v, cache.k, cache.v, None, None, make_layers.as_gpu(slots.int()))


def test_launches_run_on_the_device_of_their_tensors(fake_gpu, make_layers, monkeypatch):
    """Tensors on another device than the current one are launched with their device as the current one."""
    current, entered = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(fake_gpu, "get_current_device", lambda: current[0], raising=False)
    chance, layers = random.Random(2), make_layers(Mode.DECODE, 16)
    monkeypatch.setattr(type(layers.layer(chance).k), "get_device", lambda _: 1, raising=False)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    seen = []
    monkeypatch.setattr(fake_gpu, "get_current_stream", lambda _: seen.append(current[0]) or 0, raising=False)
    for _ in range(3):
        layers.attention.write_metadata(batch)
        layers.attention.attend(q, cache, batch, out)
    assert entered and set(entered) == {1} == set(seen) and current == [0]
