"""What a role that is no folding one does with a request's tiles: fetch K or V, gather both, or widen both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fetch import GATHERED, VALUES, WIDENED, fetch_tiles, widen_tiles
from .gather import gather_tiles


@gluon.jit
def bring_tiles(
    k_source, v_source, fetched, ring, place, page_row, head, first, stop, kv_len, num_pages, WHAT: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring tiles [first, stop) of one request.

    Args:
        k_source, v_source: descriptors of boxes; what `gather_tiles` takes where keys are gathered.
        fetched: the ring that is fetched into: `ring` itself, or that of narrow tiles, which are then widened into it.
        place: slot and phase of `ring`, and of `fetched` where it is widened from; returned as they stand afterwards.
        HEAD_DIM: of keys that are gathered.
    """
    slot, phase, near, near_phase = place
    if WHAT == WIDENED:
        near, near_phase, slot, phase = widen_tiles(
            fetched, ring, near, near_phase, slot, phase, first, stop, BLOCK_D, DEPTH, STAGES
        )
    elif WHAT == GATHERED:
        slot, phase = gather_tiles(
            k_source, v_source, ring, slot, phase, page_row, head, first, stop, kv_len, PAGE, BLOCK_N, HEAD_DIM,
            BLOCK_D, STAGES,
        )  # fmt: skip
    else:
        slot, phase = fetch_tiles(
            v_source if WHAT == VALUES else k_source, fetched, slot, phase, page_row, head, first, stop, kv_len,
            num_pages, WHAT, PAGE, BLOCK_N, BOX, BLOCK_D, DEPTH,
        )  # fmt: skip
    return slot, phase, near, near_phase
