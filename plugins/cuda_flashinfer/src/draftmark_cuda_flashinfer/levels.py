"""Which keys each attention pass names. Integers only, no torch.

A mode whose tail may be a tree takes two passes: the *common* level, pages of the prefix that every row sees, without a
mask; and the *masked* level, single tokens under FlashInfer's custom mask. The masked level holds the tail, which
begins in the middle of a page, and with a window also the *head*: the prefix tokens between the window edges of
the shallowest and the deepest row, up to the next page. Other modes take one causal pass over prefix and tail.
"""

from __future__ import annotations

from typing import Any

from draftmark import Geometry, Mode, ceil_div, minimum


def is_masked(geometry: Geometry, mode: Mode) -> bool:
    """Whether forwards of `mode` take two passes. One row a request is a chain: its ancestors are the whole tail."""
    if mode is Mode.VERIFY:
        return bool(geometry.draft.num_draft_tokens > 1)
    return mode is Mode.DRAFT and bool(geometry.draft.topk > 1)


def masked_modes(geometry: Geometry) -> list[Mode]:
    """The served modes that take two passes."""
    return [mode for mode in geometry.modes if is_masked(geometry, mode)]


def draft_steps_share_a_plan(geometry: Geometry) -> bool:
    """Whether the paged level's plan is the same for every step of a draft program: it names the prefix alone.

    A causal level also holds the tail, and with a window the common level begins where the tail's length says.
    """
    return is_masked(geometry, Mode.DRAFT) and bool(geometry.attention.window_left < 0)


def head_len(geometry: Geometry, tail_len: Any) -> Any:
    """Tokens of the prefix in the masked level: none without a window."""
    a = geometry.attention
    if a.window_left < 0:
        return 0
    return minimum(a.window_left, tail_len + a.page_size - 1)


def masked_len(geometry: Geometry, tail_len: Any) -> Any:
    """Tokens of the masked level, whatever the prefix: its plan needs no lengths."""
    return head_len(geometry, tail_len) + tail_len


def common_pages(prefix: int, tail_len: int, page_size: int, window_left: int) -> int:
    """Pages of the common level: from where the deepest row's window begins, in whole pages, to the prefix's end."""
    pages = -(-prefix // page_size)
    if window_left < 0:
        return pages
    first = -(-max(0, prefix + tail_len - window_left) // page_size)
    return pages - min(first, pages)


def level_pages(geometry: Geometry, mode: Mode, prefix: int, tail_len: int) -> int:
    """Pages of the paged level, common or causal, of one request."""
    a = geometry.attention
    if is_masked(geometry, mode):
        return common_pages(prefix, tail_len, a.page_size, a.window_left)
    return -(-(prefix + tail_len) // a.page_size)


def mask_bytes(q_len: Any, masked: Any) -> Any:
    """Bytes of one request's mask: rows x masked tokens, one bit each, each request from a new byte on."""
    return ceil_div(q_len * masked, 8)
