"""What a role that is no folding one does with a request's tiles: fetch K or V, gather both, or widen both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fetch import GATHERED, VALUES, WIDENED, fetch_tiles, widen_tiles
from .gather import gather_tiles


@gluon.jit
def bring_tiles(
    k_source, v_source, fetched, ring, place, page_row, head, first, stop, kv_len, num_pages, WHAT: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Bring tiles [first, stop) of one request.

    Args:
        k_source, v_source: what `fetch_tiles` takes; what `gather_tiles` takes where keys are gathered.
        fetched: the ring that is fetched into: `ring` itself, or that of narrow tiles, which are then widened into it.
        place: slot and phase of `ring`, and of `fetched` where it is widened from; returned as they stand afterwards.
    """
    slot, phase, near, near_phase = place
    if WHAT == WIDENED:
        near, near_phase, slot, phase = widen_tiles(fetched, ring, near, near_phase, slot, phase, first, stop, C)
    elif WHAT == GATHERED:
        slot, phase = gather_tiles(k_source, v_source, ring, slot, phase, page_row, head, first, stop, kv_len, C)
    else:
        slot, phase = fetch_tiles(
            v_source if WHAT == VALUES else k_source, fetched, slot, phase, page_row, head, first, stop, kv_len,
            num_pages, WHAT, C,
        )  # fmt: skip
    return slot, phase, near, near_phase
