"""Shared memory of a program: rows of q, a ring of tiles of K and V, and the barriers between the two roles."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from .constants import leavers, parts_of, width_of
from .names import thread_barrier


class Half(NamedTuple):
    """K or V of a ring.

    Attributes:
        tiles: room for as many tiles as there are slots, by the parts of their columns.
        full, free: of each slot, a barrier that says its tile is there; that its room is.
    """

    tiles: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


class Ring(NamedTuple):
    """Slots that tiles pass through, each in K and in V."""

    k: Half
    v: Half


@gluon.constexpr_function
def tile_layout(keys, dim, dtype, whole):
    """Layout of a tile in shared memory: 128 bytes of every key, then the next 128; of whole heads, which come 8 keys
    at a time, the same of every 8 keys. wgmma reads either: blocks of 8 keys and 128 bytes, swizzled, at two distances.
    """
    if not whole:
        return gl.NVMMASharedLayout.get_default_for([keys, dim], dtype)
    block = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    beside = [[0, 1 << bit] for bit in range(6, dim.bit_length() - 1)]
    below = [[1 << bit, 0] for bit in range(3, keys.bit_length() - 1)]
    return gl.SharedLinearLayout(block + beside + below, alignment=1024)


@gluon.jit
def make_part(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr):
    """Room for COUNT times ROWS rows of WIDTH elements."""
    layout: gl.constexpr = tile_layout(ROWS, WIDTH, dtype, WHOLE)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def make_room(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, WHOLE: gl.constexpr = False,
    HELD: gl.constexpr = 1,
):  # fmt: skip
    """Room for COUNT times ROWS rows, by the parts of their columns, of which one element holds HELD."""
    room = ()
    for part in gl.static_range(parts_of(C)):
        one = make_part(dtype, COUNT, ROWS, width_of(C, part) // HELD, WHOLE)
        room = room + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return room


@gluon.jit
def of_slot(parts, slot):
    """One tile of a ring, or one group's rows, by the parts of its columns."""
    return [one.index(slot) for one in parts]


@gluon.jit
def make_ring(
    dtype: gl.constexpr, READERS: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr, WRITERS: gl.constexpr = 1,
    WHOLE: gl.constexpr = False, HELD: gl.constexpr = 1,
):  # fmt: skip
    """A `Ring` of STAGES slots.

    WRITERS: arrivals that fill a tile. READERS: those that leave it. WHOLE: heads come whole, of 16-bit elements.
    HELD: columns that one element of `dtype` holds.
    """
    k_tiles = make_room(dtype, STAGES, C.BLOCK_N, C, WHOLE, HELD)
    v_tiles = make_room(dtype, STAGES, C.BLOCK_N, C, WHOLE, HELD)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=WRITERS)
        mbarrier.init(v_full.index(i), count=WRITERS)
        mbarrier.init(k_free.index(i), count=READERS)
        mbarrier.init(v_free.index(i), count=READERS)
    fence_async_shared()
    thread_barrier()
    return Ring(k=Half(tiles=k_tiles, full=k_full, free=k_free), v=Half(tiles=v_tiles, full=v_full, free=v_free))


@gluon.jit
def leave(free, C: gl.constexpr):
    """A folding group gives a tile back, once its products have read it: each thread by itself, and waits for no other.

    The arrival is the one of copies that a thread has under way, of which a folding one has none.
    """
    if leavers(C) == C.MEMBERS:
        mbarrier.arrive(free, count=1)
    else:
        async_copy.mbarrier_arrive(free, increment_count=False)


@gluon.jit
def launch_dependents():
    """Wait for the grids before this one, which took its place while they ran; then let the next one take its own.

    In this order: the merge reads the schedule before it waits for the attention, and so may not start before
    whoever wrote the schedule has ended. What a grid reads or writes of global memory comes after this call.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of the ring; its phase flips at the end."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
