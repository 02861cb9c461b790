"""Mapping of SGLang's forward modes to draftmark's modes, and of its `seq_lens` to committed lengths.

| SGLang | mode | committed length L |
|---|---|---|
| EXTEND, MIXED, SPLIT_PREFILL | EXTEND | `extend_prefix_lens` |
| DECODE | DECODE | `seq_lens` - 1: `seq_lens` already includes the row of this forward |
| TARGET_VERIFY | VERIFY | `seq_lens` |
| DRAFT_EXTEND_V2 | DRAFT_EXTEND | `seq_lens` - D: `seq_lens` already includes the D rows of this forward |
| a draft step | DRAFT | `seq_lens` |
"""

from __future__ import annotations

from typing import Any

from draftmark import Mode


def mode_of(forward_mode: Any) -> Mode:
    """Return the draftmark mode of SGLang's `ForwardMode`.

    The predicates of `ForwardMode` are read, because they change less between releases than its members.

    Raises:
        NotImplementedError: the forward mode is not supported.
    """
    if forward_mode.is_decode():
        return Mode.DECODE
    if forward_mode.is_target_verify():
        return Mode.VERIFY
    if forward_mode.name.startswith("DRAFT_EXTEND"):
        return Mode.DRAFT_EXTEND
    if forward_mode.is_extend():
        return Mode.EXTEND
    raise NotImplementedError(f"forward mode {forward_mode.name} is not supported; docs/sglang.md lists those that are")


def counted_rows(mode: Mode, num_draft_tokens: int) -> int:
    """Return the number of this forward's rows that SGLang's `seq_lens` already includes."""
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: num_draft_tokens}.get(mode, 0)


def live_requests(forward: Any, padded: int) -> int:
    """Return the number of a batch's requests that are not padding.

    A graph replay and DP attention store this number in different attributes.
    """
    before = getattr(forward, "_original_batch_size", None)
    return before if before is not None else padded - (getattr(forward, "num_padding", 0) or 0)
