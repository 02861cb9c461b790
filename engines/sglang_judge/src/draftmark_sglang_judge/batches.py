"""Construction of SGLang's `ForwardBatch` for a scene (one forward of the judge), as SGLang's workers fill it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from draftmark import Mode

from .requests import Placed


def forward_batch(placed: Placed, runner: Any, padded: int | None = None) -> Any:
    """Create a batch on torch's default device.

    Args:
        padded: number of requests of the CUDA graph. Requests after the live ones are padding. None for no padding.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    scene, live = placed.scene, len(placed.requests)
    count = live if padded is None else padded
    lengths = [*_seq_lens(placed), *[1] * (count - live)]
    per_request = _rows_of_padding(placed)
    slots = [*_out_slots(placed), *[0] * (per_request * (count - live))]
    positions = [*_positions(placed), *[0] * (_position_rows(placed) * (count - live))]
    fields: dict[str, Any] = dict(
        forward_mode=_mode(placed),
        batch_size=count,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        req_pool_indices=torch.tensor([*range(1, live + 1), *[0] * (count - live)], dtype=torch.int64),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        out_cache_loc=torch.tensor(slots, dtype=torch.int64),
        seq_lens_sum=sum(lengths) if scene.lengths_on_host else None,
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64, device="cpu") if scene.lengths_on_host else None,
        positions=torch.tensor(positions, dtype=torch.int64),
        spec_info=_spec_info(placed, count),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
    )
    if scene.mode in (Mode.EXTEND, Mode.DRAFT_EXTEND):
        fields |= _extend_fields(placed, count)
    known = {one.name for one in dataclasses.fields(ForwardBatch)}
    batch = ForwardBatch(**{name: value for name, value in fields.items() if name in known})
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None:
        # SGLang 0.5.22 and later have `bind_own_plan` in place of `rebind_write_loc`.
        (getattr(translator, "bind_own_plan", None) or translator.rebind_write_loc)(batch)
    return batch


def _mode(placed: Placed) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if placed.scene.mixed:
        return ForwardMode.MIXED
    return {
        Mode.EXTEND: ForwardMode.EXTEND,
        Mode.DECODE: ForwardMode.DECODE,
        Mode.DRAFT: ForwardMode.DECODE,
        Mode.VERIFY: ForwardMode.TARGET_VERIFY,
        Mode.DRAFT_EXTEND: ForwardMode.DRAFT_EXTEND_V2,
    }[placed.scene.mode]


def _seq_lens(placed: Placed) -> list[int]:
    """Return `seq_lens`, which include the rows of this forward in DECODE, EXTEND and DRAFT_EXTEND only."""
    counts = placed.scene.mode in (Mode.DECODE, Mode.EXTEND, Mode.DRAFT_EXTEND)
    return [one.prefix + (one.rows if counts else 0) for one in placed.requests]


def _out_slots(placed: Placed) -> list[int]:
    if placed.scene.mode is Mode.DRAFT:
        k, steps = placed.setup.topk, placed.setup.num_steps
        live = range(len(placed.requests))
        return [placed.draft_slot(n, t, s) for n in live for t in range(k) for s in range(steps)]
    found: list[int] = []
    for one, slots in zip(placed.requests, placed.slots, strict=True):
        found += slots[one.prefix : one.prefix + one.tail]
    return found


def _rows_of_padding(placed: Placed) -> int:
    setup = placed.setup
    by_mode = {Mode.DECODE: 1, Mode.DRAFT: setup.topk * setup.num_steps}
    return by_mode.get(placed.scene.mode, setup.num_draft_tokens)


def _position_rows(placed: Placed) -> int:
    return placed.setup.topk if placed.scene.mode is Mode.DRAFT else _rows_of_padding(placed)


def _positions(placed: Placed) -> list[int]:
    if placed.scene.mode is Mode.DRAFT:
        return [one.prefix for one in placed.requests for _ in range(placed.setup.topk)]
    return [one.prefix + one.depth(slot) for one in placed.requests for slot in range(one.tail)]


def _extend_fields(placed: Placed, count: int) -> dict[str, Any]:
    missing = count - len(placed.requests)
    rows = [*(one.rows for one in placed.requests), *[placed.setup.num_draft_tokens] * missing]
    prefixes = [*(one.prefix for one in placed.requests), *[0] * missing]
    starts = [sum(rows[:n]) for n in range(count)]
    known = placed.scene.lengths_on_host
    return dict(
        extend_num_tokens=sum(rows),
        extend_seq_lens=torch.tensor(rows, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_start_loc=torch.tensor(starts, dtype=torch.int32),
        extend_seq_lens_cpu=rows if known or placed.scene.mode is Mode.DRAFT_EXTEND else None,
        extend_prefix_lens_cpu=prefixes if known else None,
    )


def _spec_info(placed: Placed, count: int) -> Any:
    from sglang.srt.speculative import eagle_info

    if placed.scene.mode is Mode.VERIFY:
        return _verify_input(eagle_info.EagleVerifyInput, placed, count)
    if placed.scene.mode is Mode.DRAFT:
        return eagle_info.EagleDraftInput()
    if placed.scene.mode is Mode.DRAFT_EXTEND:
        rows = torch.full((count,), placed.setup.num_draft_tokens, dtype=torch.int32)
        made = eagle_info.EagleDraftExtendInput(num_accept_tokens=rows, num_correct_drafts=rows - 1)
        made.num_tokens_per_req, made.extend_seq_lens_tensor = placed.setup.num_draft_tokens, rows
        return made
    return None


def _verify_input(kind: Any, placed: Placed, count: int) -> Any:
    """Return SGLang's verify input with masks of the live requests only, as SGLang passes it to a padded replay.

    A mask row has ones for the prefix, then the row's ancestors.
    """
    masks = [_mask(one) for one in placed.requests] or [torch.ones(count * placed.setup.num_draft_tokens**2 * 2)]
    needed = {one.name: None for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
    fields = dict(
        custom_mask=torch.cat([one.flatten() for one in masks]).bool(),
        positions=torch.tensor(_positions(placed), dtype=torch.int64),
        spec_steps=placed.setup.num_steps,
        topk=placed.setup.topk,
        draft_token_num=placed.setup.num_draft_tokens,
        seq_lens_sum=sum(_seq_lens(placed)),
    )
    return kind(**(needed | fields))


def _mask(one: Any) -> torch.Tensor:
    mask = torch.zeros(one.rows, one.prefix + one.tail, dtype=torch.bool, device="cpu")
    mask[:, : one.prefix] = True
    for row in range(one.rows):
        for slot in one.seen(one.own_slot(row)):
            mask[row, one.prefix + slot] = True
    return mask.to(torch.get_default_device())
