"""What SGLang is about to run, in draftmark's terms: the mode, and the committed length under SGLang's `seq_lens`.

| SGLang | mode | committed length L |
|---|---|---|
| EXTEND, MIXED, SPLIT_PREFILL | EXTEND | `extend_prefix_lens` |
| DECODE | DECODE | `seq_lens` - 1: the row's own slot is counted already |
| TARGET_VERIFY | VERIFY | `seq_lens` |
| DRAFT_EXTEND_V2 | DRAFT_EXTEND | `seq_lens` - D: the worker has added its rows |
| a draft step | DRAFT | `seq_lens` |
"""

from __future__ import annotations

from typing import Any

from draftmark import Mode


def mode_of(forward_mode: Any) -> Mode:
    """The mode of SGLang's `ForwardMode`, by its predicates, which outlive its members.

    Raises:
        NotImplementedError: a forward that is not served.
    """
    if forward_mode.is_decode():
        return Mode.DECODE
    if forward_mode.is_target_verify():
        return Mode.VERIFY
    if forward_mode.name.startswith("DRAFT_EXTEND"):
        return Mode.DRAFT_EXTEND
    if forward_mode.is_extend():
        return Mode.EXTEND
    raise NotImplementedError(f"forward mode {forward_mode.name} is not served; see docs/sglang.md for those that are")


def counted_rows(mode: Mode, num_draft_tokens: int) -> int:
    """How many of this forward's own rows SGLang's `seq_lens` counts already."""
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: num_draft_tokens}.get(mode, 0)


def live_requests(forward: Any, padded: int) -> int:
    """How many of a batch's requests are no padding, which a replay says in one way, and DP attention in another."""
    before = getattr(forward, "_original_batch_size", None)
    return before if before is not None else padded - (getattr(forward, "num_padding", 0) or 0)
