"""Arena: declared shapes, fixed addresses, guard words that name the buffer, and poison in uninitialized memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from draftmark.arena import GUARD_VARIABLE, Arena
from draftmark.buffers import BufferSpec
from draftmark.errors import BufferError, DraftmarkError, GuardError
from draftmark_tools.guard.arena import GUARD_BYTES


def spec(name, shape, dtype="int32", **fields):
    """Return a buffer specification."""
    return BufferSpec(name, shape, dtype, "by hand", **fields)


SPECS = [
    spec("indices", (5, 3)),
    spec("slots", (7,), "int64"),
    spec("partial", (2, 3, 5), "float32"),
    spec("staging", (3, 5), "bfloat16"),
    spec("half", (9,), "float16"),
    spec("bytes", (13,), "uint8"),
    spec("shorts", (3,), "int16"),
    spec("words", (3,), "uint16"),
    spec("flags", (5,), "bool", zeros=True),
    spec("zeroed", (4, 4), zeros=True),
    spec("quantised", (6,), "float8_e4m3fn"),
    spec("pinned", (4,), pinned=True),
    spec("scalar", (), "int64"),
]
NAMES = [s.name for s in SPECS]


@pytest.fixture
def arena():
    """Return a guarded arena with all kinds of buffers."""
    return Arena.allocate(SPECS, "cpu", guard=True)


@pytest.mark.parametrize("guard", [False, True])
def test_buffers_have_their_declared_shape_and_dtype(guard):
    """Each buffer is contiguous in its declared shape and dtype, guarded or not, in order of declaration."""
    arena = Arena.allocate(SPECS, "cpu", guard=guard)
    assert list(arena) == NAMES
    assert arena.specs == SPECS
    for s in SPECS:
        tensor = arena[s.name]
        assert (tuple(tensor.shape), tensor.dtype) == (s.shape, getattr(torch, s.dtype))
        assert tensor.is_contiguous()
    arena.check()


@pytest.mark.parametrize("device", ["sails", None, 3.5, "", "meta"])
def test_an_invalid_device_is_named_in_the_error(device):
    """The arena rejects an invalid device before torch allocates anything."""
    with pytest.raises(BufferError, match=f"an arena's device is {device!r}, but torch"):
        Arena.allocate([], device)


def test_zeros_start_as_zeros_in_guard_mode_too(arena):
    """`init=zeros` buffers are zero; only uninitialized memory is poisoned."""
    assert not arena["zeroed"].any() and not arena["flags"].any()


def test_fresh_memory_is_poison(arena):
    """Uninitialized floats are NaN and signed integers are -1, which is never a valid value, slot, page or length."""
    for name in ("partial", "staging", "half"):
        assert arena[name].isnan().all(), name
    assert arena["quantised"].float().isnan().all()
    for name in ("indices", "slots", "shorts", "pinned", "scalar"):
        assert (arena[name] == -1).all(), name


@pytest.mark.parametrize("guard", [False, True])
def test_poison_overwrites_empty_buffers_but_not_zeros(guard):
    """poison() fills written `empty` buffers with poison again, and does not change `zeros` buffers and guards."""
    arena = Arena.allocate(SPECS, "cpu", guard=guard)
    arena["partial"].fill_(1.0)
    arena["slots"].fill_(7)
    arena["zeroed"].fill_(3)
    arena.poison()
    assert arena["partial"].isnan().all()
    assert (arena["slots"] == -1).all()
    assert (arena["zeroed"] == 3).all()
    arena.check()


def test_poison_waits_for_copies_from_pinned_memory(monkeypatch):
    """poison() waits for a pending copy from pinned memory, so the copy gets the contents from before poison()."""
    arena = Arena.allocate(SPECS, "cpu")
    queue, received = [lambda: received.append(arena["pinned"].tolist())], []
    monkeypatch.setattr("draftmark.arena.synchronize", lambda device: queue.pop()())
    arena["pinned"].fill_(7)
    arena.poison()
    assert received == [[7] * 4]
    assert (arena["pinned"] == -1).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("waits", [True, False])
def test_poison_waits_for_a_sleeping_device(monkeypatch, waits):
    """On a GPU, poison() waits for a copy on another stream; if the wait is removed, the copy reads poison."""
    if not waits:
        monkeypatch.setattr("draftmark.arena.synchronize", lambda device: None)
    arena = Arena.allocate([spec("staging", (64,), pinned=True)], "cuda")
    arena["staging"].fill_(7)
    received = torch.zeros(64, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        received.copy_(arena["staging"], non_blocking=True)
    arena.poison()
    torch.cuda.synchronize()
    assert (received == (7 if waits else -1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_one_element_past_the_end_is_found_and_named(arena, name):
    """check() detects a write to entry numel of a buffer, and names only that buffer."""
    buffer = arena[name]
    beyond = torch.as_strided(buffer, (buffer.numel() + 1,), (1,), buffer.storage_offset())
    arena.check()
    beyond[buffer.numel()] = 0
    with pytest.raises(GuardError) as caught:
        arena.check()
    assert caught.value.names == (name,)
    assert f"around {name} " in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_one_byte_before_the_start_is_found_and_named(arena, name):
    """check() detects a write to the byte before a buffer, and names only that buffer."""
    buffer = arena[name].view(-1).view(torch.uint8)
    start = buffer.storage_offset()
    torch.as_strided(buffer, (start,), (1,), 0)[start - 1] ^= 1
    with pytest.raises(GuardError) as caught:
        arena.check()
    assert caught.value.names == (name,)


def test_the_last_guard_byte_counts_and_both_buffers_are_named(arena):
    """check() detects a write to the last guard byte, and names both damaged buffers."""
    for name in ("indices", "half"):
        buffer = arena[name].view(-1).view(torch.uint8)
        torch.as_strided(buffer, (buffer.numel() + GUARD_BYTES,), (1,), buffer.storage_offset())[-1] ^= 1
    with pytest.raises(GuardError) as caught:
        arena.check()
    assert caught.value.names == ("indices", "half")


def test_writes_inside_every_buffer_are_no_overrun(arena):
    """Filling each buffer up to its last entry changes no guard byte."""
    for name in NAMES:
        arena[name].fill_(1)
    arena.check()


def test_addresses_never_move(arena):
    """Data pointers are equal before and after writes, poison and checks, and no two buffers overlap."""
    before = arena.addresses()
    for name in NAMES:
        arena[name].fill_(1)
    arena.poison()
    arena.check()
    assert arena.addresses() == before == {name: arena[name].data_ptr() for name in NAMES}
    spans = sorted((arena[s.name].data_ptr(), s.nbytes) for s in SPECS)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))


@pytest.mark.parametrize(("guard", "extra"), [(False, 0), (True, 2 * GUARD_BYTES)])
def test_memory_has_the_declared_bytes(guard, extra):
    """A storage exceeds its buffer only by the guard words."""
    arena = Arena.allocate(SPECS, "cpu", guard=guard)
    for s in SPECS:
        tensor = arena[s.name]
        assert tensor.nbytes == s.nbytes
        assert tensor.untyped_storage().nbytes() == tensor.nbytes + extra


def test_an_unknown_name_lists_the_buffers(arena):
    """An unknown buffer name raises a BufferError with the arena's buffers and the remedy, not a KeyError."""
    with pytest.raises(BufferError, match=r"'indexes' is not in the arena, which has indices, slots.*declare it"):
        arena["indexes"]
    with pytest.raises(BufferError, match="has none"):
        Arena.allocate([], "cpu")["x"]
    assert issubclass(BufferError, DraftmarkError)


@pytest.mark.parametrize(("value", "guarded"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_turns_guards_on(monkeypatch, value, guarded):
    """DRAFTMARK_GUARD=1 turns guards on; they are off when it is unset, empty or 0."""
    if value is None:
        monkeypatch.delenv(GUARD_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(GUARD_VARIABLE, value)
    assert Arena.allocate(SPECS, "cpu").guarded is guarded
    assert Arena.allocate(SPECS, "cpu", guard=not guarded).guarded is not guarded


def test_a_malformed_spec_allocates_nothing():
    """allocate() validates all specifications before it allocates memory."""
    with pytest.raises(BufferError, match="declared twice"):
        Arena.allocate([SPECS[0], SPECS[0]], "cpu")


def test_guards_find_a_backend_with_too_few_entries(make_geometry, open_reference):
    """check() detects a backend that writes one entry after the end of its buffer."""
    _, arena = open_reference(make_geometry())
    slots = arena["slot_mapping"]
    torch.as_strided(slots, (slots.numel() + 1,), (1,), slots.storage_offset()).fill_(0)
    with pytest.raises(GuardError, match="slot_mapping"):
        arena.check()
