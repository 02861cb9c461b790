"""Converts the batch of a failed item to plain data, which a record stores and a report draws.

A `ContractViolation` has the batch as text and the place of the fault (`Wrong`, or `TooSmall` for a size). `drawing`
turns both into a dictionary of JSON types. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftmark.geometry import Geometry

from .cases.forwards import ForwardCase
from .check import ContractViolation, TooSmall, Wrong
from .oracle.history import Request, kv_slots
from .oracle.truth import enumerate_truth

MOST_REQUESTS = 8
"""Maximum number of requests in a drawing."""
MOST_SLOTS = 24
"""Maximum number of tail slots of the one request that is drawn in full."""

Drawing = dict[str, Any]
"""Batch as JSON types: `_forward` and `_sizes` list the keys."""


def drawing(error: BaseException, current: object = None) -> Drawing | None:
    """Return an error's batch as plain data, or None for an error without a batch.

    Args:
        error: exception of an item.
        current: batch that the item was running; used if the error has no batch.
    """
    violation = error if isinstance(error, ContractViolation) else None
    wrong = violation.wrong if violation else None
    if isinstance(wrong, TooSmall):
        return _sizes(wrong)
    named = violation.details["batch"] if violation else None
    batch = next((one for one in (wrong.batch if wrong else None, named, current) if one is not None), None)
    # A Step holds its ForwardCase in the attribute `forward`.
    forward = getattr(batch, "forward", batch)
    return _forward(forward, wrong or Wrong("")) if isinstance(forward, ForwardCase) else None


def _sizes(wrong: TooSmall) -> Drawing:
    """Return the batch and both sizes of a buffer that is too small.

    Keys: ``mode``, ``groups``, ``buffer``, ``declared``, ``needed`` and ``unit``.
    """
    groups = [
        {"count": one.count, "prefix": one.prefix, "rows": one.rows, "tail": one.tail}
        for one in wrong.batch.groups
        if one.count
    ]
    sizes = {"declared": int(wrong.declared), "needed": int(wrong.needed), "unit": wrong.unit}
    return {"mode": wrong.batch.mode.value, "groups": groups, "buffer": wrong.buffer, **sizes}


def _forward(forward: ForwardCase, wrong: Wrong) -> Drawing:
    """Return the sizes of every request of a forward, and the rows of one wrong request in full.

    Keys: ``mode``, ``step``, ``what`` (of `Wrong`), ``hidden`` (number of requests that are left out), ``requests``
    (each with ``number``, ``live``, ``prefix``, ``rows``, ``tail`` and ``wrong``, its number of wrong rows), ``full``
    (see `_full`; absent for a batch without rows) and ``elsewhere`` (wrong KV slots of other requests, in words).
    """
    wrong_in = [number for number, _ in wrong.rows]
    full = wrong_in[0] if wrong_in else next((n for n, one in enumerate(forward.requests) if one.live), 0)
    order = sorted(range(len(forward.requests)), key=lambda n: (n != full, n not in wrong_in, n))
    shown = sorted(order[:MOST_REQUESTS])
    requests = [_request(n, forward.requests[n], wrong_in.count(n)) for n in shown]
    found: Drawing = {"mode": forward.mode.value, "step": forward.step, "what": wrong.what}
    found |= {"hidden": len(forward.requests) - len(shown), "requests": requests}
    if full < len(forward.requests) and forward.requests[full].rows:
        found["full"] = _full(forward, full, wrong)
        found["elsewhere"] = _elsewhere(forward, full, wrong) if isinstance(forward.geometry, Geometry) else []
    return found


def _request(number: int, one: Request, wrong: int) -> Drawing:
    sizes = {"prefix": one.prefix, "rows": one.rows, "tail": one.tail}
    return {"number": number, "live": one.live, **sizes, "wrong": wrong}


def _full(forward: ForwardCase, number: int, wrong: Wrong) -> Drawing:
    """Return the draft tree of one request, and the keys of each of its drawn rows.

    Keys: ``number``, ``prefix``, ``rows``, ``tail``, ``window``, ``first`` (first tail slot that is drawn), ``parents``
    (one for each drawn slot) and ``lines``, one for each row of a drawn slot; see `_line`.
    """
    request = forward.requests[number]
    rows = [row for n, row in wrong.rows if n == number]
    first = _first_slot(request, rows)
    last = min(request.tail, first + MOST_SLOTS)
    position, visible = _keys(forward, request)
    lines = []
    for row in range(request.rows):
        if first <= request.own_slot(row) < last:
            named = wrong if rows and row == rows[0] else Wrong("")
            at = {"row": row, "slot": request.own_slot(row), "wrong": row in rows}
            kinds = {"keys": visible[row], "missing": named.missing, "extra": named.extra}
            seen = {kind: [position[slot] for slot in slots if slot in position] for kind, slots in kinds.items()}
            lines.append(at | _line(request.prefix, range(first, last), seen))
    return {
        "number": number,
        "prefix": request.prefix,
        "rows": request.rows,
        "tail": request.tail,
        "window": forward.geometry.attention.window_left if isinstance(forward.geometry, Geometry) else -1,
        "first": first,
        "parents": list(request.parents[first:last]),
        "lines": lines,
    }


def _keys(forward: ForwardCase, request: Request) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Return the position of each slot of a request, and the slots that each row sees.

    A row of recurrent state sees the whole prefix and its ancestors; its slots are numbered like its positions.
    """
    if not isinstance(forward.geometry, Geometry):
        own = {row: request.own_slot(row) for row in range(request.rows)}
        before, end = range(request.prefix), request.prefix + request.tail
        lines = {row: (*before, *(request.prefix + one for one in request.lineage(slot))) for row, slot in own.items()}
        return {at: at for at in range(end)}, lines
    a = forward.geometry.attention
    truth = enumerate_truth([request], a.page_size, a.window_left)
    visible = {row: truth.visible[0, row] for row in range(request.rows)}
    return {slot: at for at, slot in enumerate(kv_slots(request, a.page_size))}, visible


def _line(prefix: int, drawn: range, seen: dict[str, list[int]]) -> Drawing:
    """Return the keys of one row: keys it must see, keys missing from its metadata, and keys it sees in error.

    Keys of the result: ``keys``, ``missing`` and ``extra``, with ``"1"`` or ``"0"`` for each drawn tail slot;
    ``prefix_keys``, ``prefix_missing`` and ``prefix_extra``, the number of prefix tokens of each kind. Empty kinds are
    left out, except ``keys``.
    """
    line: Drawing = {}
    for kind, positions in seen.items():
        slots = {at - prefix for at in positions}
        if kind == "keys" or not slots.isdisjoint(drawn):
            line[kind] = "".join("1" if slot in slots else "0" for slot in drawn)
        before = len({at for at in positions if at < prefix})
        if before:
            line[f"prefix_{kind}"] = before
    return line


def _first_slot(request: Request, rows: Sequence[int]) -> int:
    """Return the first tail slot (new token) to draw, chosen so that the drawing contains the first wrong row."""
    if request.tail <= MOST_SLOTS or not rows:
        return 0
    return max(0, min(request.own_slot(rows[0]) - MOST_SLOTS * 2 // 3, request.tail - MOST_SLOTS))


def _elsewhere(forward: ForwardCase, number: int, wrong: Wrong) -> list[str]:
    """Return, as text, the tokens stored in the wrong KV slots of requests other than `number`."""
    size = forward.geometry.attention.page_size
    own = set(kv_slots(forward.requests[number], size))
    left = [slot for slot in wrong.extra if slot not in own][:MOST_REQUESTS]
    owner = {
        slot: (n, at)
        for n, one in enumerate(forward.requests)
        if left and one.live and n != number
        for at, slot in enumerate(kv_slots(one, size))
    }
    return [f"KV slot {slot}: {_token(owner.get(slot), slot < forward.null_pages * size)}" for slot in left]


def _token(owner: tuple[int, int] | None, null: bool) -> str:
    if owner is not None:
        return f"token {owner[1]} of request {owner[0]}"
    return "in a null page" if null else "owned by no request"
