"""Inline SVG: the tree and its mask, and a page table. Colours come from the page's style."""

from __future__ import annotations

from html import escape

from .sample import PARENTS, PREFIXES, depth, sees

CELL = 22


def tree_svg() -> str:
    """The draft tree: row numbers, joined to their parents, one column per depth."""
    levels: dict[int, list[int]] = {}
    for row in range(len(PARENTS)):
        levels.setdefault(depth(row), []).append(row)
    tallest = max(map(len, levels.values()))
    place = {
        row: (24 + level * 62, 22 + (index + (tallest - len(rows)) / 2) * 44)
        for level, rows in levels.items()
        for index, row in enumerate(rows)
    }
    parts = []
    for row, parent in enumerate(PARENTS):
        if parent >= 0:
            (x1, y1), (x2, y2) = place[parent], place[row]
            parts.append(f'<path class="edge" d="M{x1} {y1}C{x1 + 30} {y1} {x2 - 30} {y2} {x2} {y2}"/>')
    for row, (x, y) in place.items():
        parts.append(f'<circle class="node" cx="{x}" cy="{y}" r="13"/>')
        parts.append(f'<text class="on" x="{x}" y="{y + 4}">{row}</text>')
    return _svg(max(x for x, _ in place.values()) + 24, 44 * tallest, parts, "draft tree")


def mask_svg(prefix: int) -> str:
    """Rows by keys: the prefix in one wide column, then a column per tail slot."""
    rows = len(PARENTS)
    left, wide, top = 26, 84, 22
    parts = [f'<text class="label" x="{left + wide / 2}" y="14">prefix [0, {prefix})</text>']
    for slot in range(rows):
        parts.append(f'<text class="label" x="{_tail_x(left, wide, slot) + CELL / 2}" y="14">{slot}</text>')
    for row in range(rows):
        y = top + row * CELL
        parts.append(f'<text class="label" x="14" y="{y + 15}">{row}</text>')
        parts.append(_cell("prefix", left, y, wide - 2, f"row {row} sees positions 0 ... {prefix - 1}"))
        for slot in range(rows):
            seen = sees(row, slot)
            kind = "self" if row == slot else "seen" if seen else "hidden"
            title = f"row {row} {'sees' if seen else 'does not see'} tail slot {slot}"
            parts.append(_cell(kind, _tail_x(left, wide, slot), y, CELL - 2, title))
    return _svg(_tail_x(left, wide, rows) + 4, top + rows * CELL + 2, parts, "tail mask")


def page_table_svg(page_size: int) -> str:
    """Two live requests and a padded one: the part of each page that holds prefix, tail, or nothing yet."""
    tail, width, height, top = len(PARENTS), 76, 24, 20
    parts, page, widest = [], 1, 0
    for request, prefix in enumerate(PREFIXES):
        live = prefix > 0
        pages = -(-(prefix + tail) // page_size)
        widest = max(widest, pages)
        y = top + request * (height + 10)
        parts.append(f'<text class="label start" x="0" y="{y + 16}">{f"req {request}" if live else "padded"}</text>')
        for column in range(pages):
            x = 56 + column * (width + 4)
            title = f"positions {column * page_size} ... {(column + 1) * page_size - 1}"
            number = page if live else 0
            parts.append(_page(x, y, width, height, column * page_size, page_size, prefix, tail, live, title))
            parts.append(f'<text class="page" x="{x + width / 2}" y="{y + 16}">{number}</text>')
            page += live
    for column in range(widest):
        parts.append(f'<text class="label" x="{56 + column * (width + 4) + width / 2}" y="13">page {column}</text>')
    return _svg(60 + widest * (width + 4), top + len(PREFIXES) * (height + 10), parts, "page table")


def bar_svg(needed: int, declared: int) -> str:
    """Needed over declared; what is declared beyond the need, or lacking, is the second part."""
    width, largest = 180, max(needed, declared, 1)
    full, part = declared / largest * width, min(needed, declared) / largest * width
    parts = [f'<rect class="declared" width="{full:.1f}" height="12" rx="2"/>']
    parts.append(f'<rect class="needed" width="{part:.1f}" height="12" rx="2"/>')
    if needed > declared:
        parts.append(f'<rect class="lacking" x="{full:.1f}" width="{width - full:.1f}" height="12" rx="2"/>')
    return _svg(width, 12, parts, f"needs {needed} of {declared}")


def _page(
    x: float, y: float, width: int, height: int, first: int, size: int, prefix: int, tail: int, live: bool, title: str
) -> str:
    whole = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    parts = [f'<g><title>{escape(title)}</title><rect class="empty" {whole}/>']
    for kind, low, high in (("prefix", 0, prefix), ("tail" if live else "null", prefix, prefix + tail)):
        a, b = max(low, first) - first, min(high, first + size) - first
        if b > a:
            part = f'x="{x + a / size * width:.1f}" y="{y}" width="{(b - a) / size * width:.1f}" height="{height}"'
            parts.append(f'<rect class="{kind}" {part}/>')
    return "".join([*parts, "</g>"])


def _cell(kind: str, x: float, y: float, width: float, title: str) -> str:
    box = f'x="{x}" y="{y}" width="{width}" height="{CELL - 2}" rx="2"'
    return f'<rect class="{kind}" {box}><title>{escape(title)}</title></rect>'


def _tail_x(left: int, wide: int, slot: int) -> int:
    return left + wide + 8 + slot * CELL


def _svg(width: float, height: float, parts: list[str], label: str) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg role="img" aria-label="{escape(label)}" {size}>{"".join(parts)}</svg>'
