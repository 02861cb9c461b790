"""Decodes a backend's metadata, in any declared layout, to the set of KV slots of each row.

It reads three sources: the declaration (`MetadataSpec`), the buffers that it names, and the batch itself. The batch
supplies each role without a named buffer, because the backend's kernel would read it there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..layouts import Layout, MetadataSpec
from .history import Request
from .levels import Reading, Tokens, read_level
from .masks import read_bits
from .problem import DecodeProblem

if TYPE_CHECKING:
    from draftmark.batch import ForwardBatch

    from .truth import Row


@dataclass(frozen=True)
class Decoded:
    """Holds the decoded metadata of one batch.

    Attributes:
        visible: KV slots of each row, sorted, with repetitions if the metadata repeats a slot.
        writes: KV slot that each row is stored in; None when the kernel computes the slot and no buffer contains it.
        opaque: True when the layout of some attention pass cannot be decoded; `visible` is then empty.
    """

    visible: dict[Row, tuple[int, ...]]
    writes: dict[Row, int] | None
    opaque: bool = False


@dataclass(frozen=True)
class Shape:
    """Holds the numbers that decoding needs in addition to the batch.

    Attributes:
        page_size: tokens per page.
        window_left: positions that a row sees to its left; -1 for all.
        staged: True when queries are staged, so ``qo_indptr`` may count more rows than a request has queries.
    """

    page_size: int
    window_left: int
    staged: bool = False


def decode(
    spec: MetadataSpec, arena: Mapping[str, Any], batch: ForwardBatch, requests: list[Request], shape: Shape
) -> Decoded:
    """Decode the metadata of every live row. With ``live_extent="padded"`` also decode the padded rows.

    Args:
        spec: declaration for the batch's mode.
        arena: buffers by name.
        requests: all requests of the batch, padded ones last. Only their sizes (rows, tail) and `live` are used.

    Raises:
        DecodeProblem: an entry contradicts its role (a sentinel, an indptr that decreases, …).
    """
    wanted = [n for n, one in enumerate(requests) if one.live or spec.live_extent == "padded"]
    if spec.opaque:
        return Decoded({}, _writes(spec, arena, requests, wanted), opaque=True)
    seen: dict[Row, list[int]] = {(n, row): [] for n in wanted for row in range(requests[n].rows)}
    lens = batch.prefix_lens.tolist()
    depth = _depths(spec, arena, batch, requests)
    _check_rows(spec, arena, requests, wanted, shape.staged)
    bases = {n: lens[n] if requests[n].live else spec.pad_fill for n in wanted}
    for level in spec.levels:
        if level.layout is Layout.NONE:
            continue
        tokens = read_level(Reading(level, arena, batch, requests, bases, shape.page_size))
        bits = read_bits(level, arena, batch, requests, spec) if level.masked else None
        for (n, row), slots in seen.items():
            here = bases[n] + depth[n][requests[n].own_slot(row)]
            mine = None if bits is None else bits[n, row]
            slots += _seen(tokens[n], mine, here, bases[n], depth[n], shape.window_left)
    visible = {row: tuple(sorted(slots)) for row, slots in seen.items()}
    return Decoded(visible, _writes(spec, arena, requests, wanted))


def _seen(
    tokens: Tokens, bits: set[int] | None, here: int, prefix: int, depth: list[int], window_left: int
) -> list[int]:
    """Return the KV slots that a row at position `here` sees in the window: prefix and new tokens in its mask."""
    oldest = here - window_left if window_left >= 0 else 0
    tail = max(0, prefix - tokens.first)
    seen = tokens.slots[max(0, oldest - tokens.first) : tail]
    for token, slot in enumerate(tokens.slots[tail:], tokens.first + tail - prefix):
        if (bits is None or token in bits) and prefix + depth[token] >= oldest:
            seen.append(slot)
    return seen


def _check_rows(
    spec: MetadataSpec, arena: Mapping[str, Any], requests: list[Request], wanted: list[int], staged: bool
) -> None:
    """Check that ``qo_indptr`` counts the rows of each request, in every mode."""
    for name in {level.buffers["qo_indptr"] for level in spec.levels if "qo_indptr" in level.buffers}:
        found = arena[name].flatten()[: len(requests) + 1].tolist()
        if not wanted:
            return
        counts = [found[n + 1] - found[n] for n in wanted]
        rows = [requests[n].rows for n in wanted]
        fits = all(a >= b for a, b in zip(counts, rows, strict=True)) if staged else counts == rows
        if found[wanted[0]] != 0 or not fits:
            raise DecodeProblem(f"{name} does not count the rows of each request", found, f"from 0 on, rows {rows}")


def _depths(
    spec: MetadataSpec, arena: Mapping[str, Any], batch: ForwardBatch, requests: list[Request]
) -> list[list[int]]:
    """Return the depth of each new token (tail slot): from the backend's buffer, from the batch, or as in a chain."""
    name = next((level.buffers["tail_depth"] for level in spec.levels if "tail_depth" in level.buffers), None)
    tree = getattr(batch.tail, "depth", None)
    source = arena[name] if name is not None and tree is not None else tree
    if source is None:
        return [list(range(one.tail)) for one in requests]
    table = source.tolist()
    for n, one in enumerate(requests):
        if len(table) <= n or len(table[n]) < one.tail:
            raise DecodeProblem(f"tail_depth has no room for request {n}", list(source.shape), f"[>{n}, >={one.tail}]")
    return [table[n][: one.tail] for n, one in enumerate(requests)]


def _writes(
    spec: MetadataSpec, arena: Mapping[str, Any], requests: list[Request], wanted: list[int]
) -> dict[Row, int] | None:
    name = next((level.buffers["slot_mapping"] for level in spec.levels if "slot_mapping" in level.buffers), None)
    if name is None:
        return None
    rows = sum(one.rows for one in requests)
    flat = arena[name].flatten()[:rows].tolist()
    if len(flat) < rows:
        raise DecodeProblem("slot_mapping is shorter than the batch has rows", len(flat), rows)
    found: dict[Row, int] = {}
    at = 0
    for n, one in enumerate(requests):
        for row in range(one.rows):
            if n in wanted:
                found[n, row] = flat[at]
            at += 1
    return found
