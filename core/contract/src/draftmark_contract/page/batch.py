"""Draws a failing batch as inline SVG, from the plain data of `failing_batch.drawing`.

Each request is a line with its prefix and its new tokens. One request follows in full: its draft tree, and a matrix
with one
row for each query row and one column for each key. Wrong cells are red and have a mark, so colour is not needed.
"""

from __future__ import annotations

from html import escape
from typing import Any

from ..failing_batch import Drawing
from .svg import mark, rect, svg, text

CELL = 16
"""Side of a matrix cell, in pixels."""
LABEL = 58
"""Width of the row labels, in pixels."""
TREE = 110
"""Maximum width of the draft tree, in pixels."""
BAR = 150
"""Length of the longest bar, in pixels."""
LETTER = 7
"""Width of a letter of the labels, in pixels, rounded up."""
RESULTS = {"output": "output", "store": "KV store"}
"""Title of the column of results, by the kind of fault; wrong keys are marked in the matrix instead."""


def figure(drawing: Drawing) -> str:
    """Return the drawing of a batch as an HTML figure."""
    if "groups" in drawing:
        return f"<figure><figcaption>{escape(_sizes_caption(drawing))}</figcaption>{_sizes(drawing)}</figure>"
    step = f", draft step {drawing['step']}" if drawing["step"] else ""
    hidden = f"; {drawing['hidden']} further requests are not drawn" if drawing["hidden"] else ""
    first = f"The batch: {drawing['mode']}{step}, {len(drawing['requests']) + drawing['hidden']} requests{hidden}"
    keys = _key("on", "prefix", 0.4) + _key("tail", "tail")
    body = f"<figcaption>{escape(first)}{keys}</figcaption>{_requests(drawing)}"
    if "full" in drawing:
        body += f"<figcaption>{escape(_full_caption(drawing['full']))}</figcaption>"
        body += _Matrix(drawing).svg() + _legend(drawing)
    elsewhere = "; ".join(drawing.get("elsewhere", ()))
    return f"<figure>{body}{f'<figcaption>{escape(elsewhere)}</figcaption>' if elsewhere else ''}</figure>"


def _requests(drawing: Drawing) -> str:
    """Return one line per request: a bar for its prefix and its new tokens (tail), and their lengths as text."""
    longest = max((one["prefix"] + one["tail"] for one in drawing["requests"]), default=0) or 1
    found, width = [], 0
    for line, one in enumerate(drawing["requests"]):
        y = line * 20
        prefix, tail = (max(2, one[part] * BAR // longest) if one[part] else 0 for part in ("prefix", "tail"))
        kind = "prefix" if one["live"] else "idle"
        name = f"request {one['number']}"
        found.append(text(0, y + 14, name, "alarm" if one["wrong"] else "" if one["live"] else "dim"))
        found.append(rect(72, y + 4, prefix, 12, kind))
        found.append(rect(72 + prefix, y + 4, tail, 12, "tail" if one["live"] else "idle"))
        sizes = f"{one['prefix']:,} prefix + {one['tail']:,} tail, {_count(one['rows'], 'row')}"
        words = sizes if one["live"] else "padding"
        words += f", {one['wrong']:,} wrong" if one["wrong"] else ""
        found.append(text(80 + prefix + tail, y + 14, words, "alarm" if one["wrong"] else "dim"))
        width = max(width, 80 + prefix + tail + len(words) * LETTER)
    return svg(width, len(drawing["requests"]) * 20 + 4, "requests of the batch", found)


class _Matrix:
    """Draws one request in full: draft tree, visible keys and results, one line per drawn tail slot (new token)."""

    def __init__(self, drawing: Drawing) -> None:
        self.full: Drawing = drawing["full"]
        self.result = RESULTS.get(drawing["what"], "")
        self.parents: list[int] = self.full["parents"]
        self.first: int = self.full["first"]
        self.lines = {line["slot"]: line for line in self.full["lines"]}
        depths = self._depths()
        tree = any(parent != slot - 1 for slot, parent in enumerate(self.parents, self.first)) and not self.first
        self.indent = min(CELL, TREE // (max(depths, default=0) + 1)) if tree else 0
        self.depths = depths
        self.prefix_x = LABEL + self.indent * (max(depths, default=0) + 1) + 6 * bool(tree)
        self.tail_x = self.prefix_x + 54
        self.result_x = self.tail_x + len(self.parents) * CELL + 8

    def svg(self) -> str:
        """Return the SVG markup of the request."""
        found = [text(self.prefix_x, 10, "prefix", "dim"), *map(self._column, range(len(self.parents)))]
        if self.first:
            found.append(text(self.tail_x, 22, f"slots before {self.first} are not drawn", "dim"))
        if self.result:
            found.append(text(self.result_x, 10, self.result, "dim"))
        for at in range(len(self.parents)):
            found += self._line(at)
        width = self.result_x + (56 if self.result else 4)
        what = f"tree and visible keys of request {self.full['number']}"
        return svg(max(width, 180), self._y(len(self.parents)) + 4, what, found)

    def _depths(self) -> list[int]:
        found: list[int] = []
        for parent in self.parents:
            at = parent - self.first
            found.append(found[at] + 1 if 0 <= at < len(found) else 0)
        return found

    def _y(self, at: int) -> int:
        return (28 if self.first else 16) + at * CELL

    def _column(self, at: int) -> str:
        return text(self.tail_x + at * CELL + CELL // 2, 10, str(self.first + at), "dim", "middle")

    def _line(self, at: int) -> list[str]:
        """Return the SVG elements on the line of one tail slot (new token)."""
        slot, y = self.first + at, self._y(at)
        line = self.lines.get(slot)
        wrong = bool(line and line["wrong"])
        found = [rect(0, y, self.result_x + (50 if self.result else 0), CELL, "band")] if wrong else []
        name = f"row {line['row']}" if line else f"slot {slot}"
        found.append(text(0, y + 12, f"✕ {name}" if wrong else name, "alarm" if wrong else "" if line else "dim"))
        found += self._node(at, wrong)
        if line:
            found += [self._prefix(line, y), *(self._cell(line, key, y) for key in range(len(self.parents)))]
            found += [self._outcome(line, y)] if self.result else []
        return found

    def _node(self, at: int, wrong: bool) -> list[str]:
        """Return the node of a tail slot and the edge from its parent. A chain is not drawn, so it gives []."""
        if not self.indent:
            return []
        x, y = LABEL + self.depths[at] * self.indent + 5, self._y(at) + CELL // 2
        parent = self.parents[at] - self.first
        bend = f"M{x - self.indent} {self._y(parent) + CELL // 2}V{y}H{x}"
        edge = f'<path class="edge" d="{bend}"/>' if parent >= 0 else ""
        return [edge, f'<circle class="node{" alarm" if wrong else ""}" cx="{x}" cy="{y}" r="4"/>']

    def _prefix(self, line: Drawing, y: int) -> str:
        """Return the cell for the committed prefix. It shows the number of visible or of wrong tokens."""
        missing, extra = line.get("prefix_missing", 0), line.get("prefix_extra", 0)
        seen = line.get("prefix_keys", 0)
        title = f"row {line['row']}: {seen:,} of {self.full['prefix']:,} prefix tokens are visible"
        if missing or extra:
            words = " ".join(f"{sign}{count:,}" for sign, count in (("−", missing), ("+", extra)) if count)
            title += f"; {missing:,} missing, {extra:,} extra"
            return rect(self.prefix_x, y + 1, 48, CELL - 2, "wrong", title) + text(
                self.prefix_x + 24, y + 12, words, "alarm", "middle"
            )
        return rect(self.prefix_x, y + 1, 48, CELL - 2, "prefix" if seen else "off", title) + text(
            self.prefix_x + 24, y + 12, f"{seen:,}", "dim" if not seen else "", "middle"
        )

    def _cell(self, line: Drawing, key: int, y: int) -> str:
        """Return the matrix cell of one query row and one tail slot (new token)."""
        x, where = self.tail_x + key * CELL, f"row {line['row']}, slot {self.first + key}"
        if _bit(line, "missing", key):
            return rect(x + 1, y + 1, CELL - 2, CELL - 2, "wrong", f"{where}: missing key") + mark("−", x, y)
        if _bit(line, "extra", key):
            return rect(x + 1, y + 1, CELL - 2, CELL - 2, "wrong", f"{where}: extra key") + mark("+", x, y)
        return rect(x + 1, y + 1, CELL - 2, CELL - 2, "on" if _bit(line, "keys", key) else "off")

    def _outcome(self, line: Drawing, y: int) -> str:
        """Return the result cell at the end of a row's line."""
        x = self.result_x + 12
        if line["wrong"]:
            title = f"row {line['row']}: wrong {self.result}"
            return rect(x + 1, y + 1, CELL - 2, CELL - 2, "wrong", title) + mark("✕", x, y)
        return f'<path class="right" d="M{x + 4} {y + 9}l3 3l5 -7"/>'


def _full_caption(full: Drawing) -> str:
    window = f", window of {full['window']} to the left" if full["window"] >= 0 else ""
    sizes = (_count(full["prefix"], "prefix token"), _count(full["rows"], "row"), _count(full["tail"], "tail slot"))
    meaning = "Each line is a query row, with its node of the draft tree; each column is a key that the row may read"
    return f"Request {full['number']} in full: {', '.join(sizes)}{window}. {meaning}."


def _legend(drawing: Drawing) -> str:
    """Return the legend of the cell kinds that occur in the drawing."""
    keys = [_key("on", "visible key")]
    lines = drawing["full"]["lines"]
    keys += ["<span>− missing key</span>"] if any("missing" in str(line.keys()) for line in lines) else []
    keys += ["<span>+ extra key</span>"] if any("extra" in str(line.keys()) for line in lines) else []
    keys += [f"<span>✕ wrong {RESULTS[drawing['what']]}</span>"] if drawing["what"] in RESULTS else []
    return f"<figcaption>{' · '.join(keys)}</figcaption>"


def _sizes_caption(drawing: Drawing) -> str:
    groups = ", ".join(
        f"{_count(one['count'], 'request')} with a prefix of {one['prefix']:,}, {_count(one['rows'], 'row')} "
        f"and {_count(one['tail'], 'tail slot')}"
        for one in drawing["groups"]
    )
    return f"The batch: {drawing['mode']}, {groups}."


def _sizes(drawing: Drawing) -> str:
    """Return two bars for a too small buffer: its declared size, and the size that the batch needs."""
    declared, needed = drawing["declared"], drawing["needed"]
    width = BAR * declared // (needed or 1)
    lines = [
        *(text(0, 14, "declared"), rect(58, 4, width, 12, "on"), text(66 + width, 14, f"{declared:,}")),
        *(text(0, 34, "needed"), rect(58, 24, width, 12, "on")),
        rect(58 + width, 24, max(4, BAR - width), 12, "wrong", f"too few {drawing['unit']}: {needed - declared:,}"),
        text(66 + max(BAR, width + 4), 34, f"{needed:,} {drawing['unit']}", "alarm"),
    ]
    return svg(420, 42, f"declared and needed size of buffer {drawing['buffer']}", lines)


def _bit(line: dict[str, Any], kind: str, key: int) -> bool:
    return str(line.get(kind, ""))[key : key + 1] == "1"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _key(kind: str, text: str, opacity: float = 1.0) -> str:
    colour = "tail" if kind == "tail" else "key"
    return f'<span><i class="key" style="background:var(--{colour});opacity:{opacity}"></i>{escape(text)}</span>'
