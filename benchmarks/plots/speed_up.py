"""Draw a result of `benchmarks.decode.end_to_end.adaptive`: speed-up over plain decoding, by batch size.

    python -m benchmarks.plots.speed_up        # docs/speed-up-h200.svg, and the table on stdout

Each context and forced acceptance has a panel. A ratio is tokens/s of all requests divided by tokens/s of plain
decoding in the same panel. Missing rows are left out.
"""

from __future__ import annotations

import math
from typing import Any

from .svg import command, page, text

Key = tuple[str, int]
"""Way to draft, and topk."""
WAYS: dict[Key, tuple[str, str, str]] = {
    ("adaptive", 4): ("adaptive, tree", "#2da44e", ""),
    ("adaptive", 1): ("adaptive, chain", "#1b9e8a", "6 3"),
    ("tree", 4): ("fixed tree", "#d9646b", ""),
    ("chain", 1): ("fixed chain", "#4c8eda", ""),
}
"""Label, colour and dashes of each line; plain decoding is the line at 1."""
TITLES = {"good": "good drafts", "bad": "each accepted with 0.2"}
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 300, 190, 56, 92, 56, 72
Panels = dict[tuple[int, str], dict[Key, dict[int, float]]]
"""Speed-up by batch size, for each context and acceptance profile, for each way to draft."""


def speed_ups(rows: list[dict[str, Any]]) -> Panels:
    """Return tokens/s divided by those of plain decoding at the same batch size and context."""
    timed = [row for row in rows if row.get("tokens_per_s") and "profile" in row]
    plain = {(r["batch"], r["context"]): r["tokens_per_s"] for r in timed if r["speculate"] == "none"}
    panels: Panels = {}
    for row in sorted(timed, key=lambda r: (r["context"], r["profile"] != "good", r["batch"])):
        base, key = plain.get((row["batch"], row["context"])), (row["speculate"], row["topk"])
        if base and key in WAYS:
            panel = panels.setdefault((row["context"], row["profile"]), {})
            panel.setdefault(key, {})[row["batch"]] = row["tokens_per_s"] / base
    return panels


def draw(result: dict[str, Any]) -> str:
    """Return the picture as SVG: a row of panels for each context.

    Raises:
        ValueError: no row has a plain row at the same batch size and context.
    """
    panels = speed_ups(result["rows"])
    if not panels:
        raise ValueError(
            "the result has 0 rows with a plain row at the same batch size, but a speed-up needs both; measure more"
        )
    contexts = sorted({context for context, _ in panels})
    profiles = [profile for profile in TITLES if any(profile == p for _, p in panels)]
    batches = sorted({batch for panel in panels.values() for line in panel.values() for batch in line})
    most = math.ceil(max(v for panel in panels.values() for line in panel.values() for v in line.values()) * 2) / 2
    width = LEFT + len(profiles) * (WIDTH + GAP_X)
    height = TOP + len(contexts) * (HEIGHT + GAP_Y)
    parts = []
    for (context, profile), panel in panels.items():
        x = LEFT + profiles.index(profile) * (WIDTH + GAP_X)
        y = TOP + contexts.index(context) * (HEIGHT + GAP_Y)
        parts += _panel(x, y, f"{_tokens(context)} tokens, {TITLES[profile]}", panel, batches, max(most, 1.5))
    label = "Speed-up over plain decoding by batch size"
    head = text(16, 24, f"{label}, higher is faster", "ink title")
    return page(width, height, label, [head, *_legend(), *parts, text(16, height - 12, _caption(result), "dim small")])


def _panel(
    x: float, y: float, title: str, panel: dict[Key, dict[int, float]], batches: list[int], most: float
) -> list[str]:
    """Return one panel: batch sizes at equal distances, speed-ups from 0."""
    step = WIDTH / max(1, len(batches) - 1)
    at = {batch: x + i * step for i, batch in enumerate(batches)}

    def up(value: float) -> float:
        return y + HEIGHT - value / most * HEIGHT

    parts = [text(x, y - 14, title, "ink")]
    for half in range(int(most * 2) + 1):
        value = half / 2
        kind = 'class="one" stroke-width="1.5"' if value == 1 else 'class="rule"'
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}" {kind}/>')
        parts.append(text(x - 8, up(value), f"{value:g}", "dim small", "end"))
    parts += [text(at[batch], y + HEIGHT + 14, str(batch), "dim small", "middle") for batch in batches]
    for key, (label, colour, dashes) in WAYS.items():
        points = [(batch, at[batch], up(value), value) for batch, value in panel.get(key, {}).items()]
        path = " ".join(f"{px:.1f},{py:.1f}" for _, px, py, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                     f'stroke-dasharray="{dashes}"/>')  # fmt: skip
        for batch, px, py, value in points:
            tooltip = f"<title>{label}, batch {batch}: {value:.2f}</title>"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{colour}">{tooltip}</circle>')
    return parts


def _legend() -> list[str]:
    parts, x = [], 16.0
    for label, colour, dashes in [*WAYS.values(), ("plain = 1", "", "")]:
        ink = f'stroke="{colour}"' if colour else 'class="one"'
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="50" y2="50" {ink} stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        parts.append(text(x + 24, 50, label, "ink small"))
        x += 40 + 6.2 * len(label)
    return parts


def _caption(result: dict[str, Any]) -> str:
    row = next(row for row in result["rows"] if "profile" in row)
    return f"{row['device']}, {row['model']}, {row['backend']}, page 64, acceptance forced; requests in the batch below"


def table(result: dict[str, Any]) -> str:
    """Return the speed-ups as Markdown, a row for each batch size, context and acceptance."""
    lines = [
        "| batch × context | drafts | " + " | ".join(label for label, *_ in WAYS.values()) + " |",
        "|---" * (len(WAYS) + 2) + "|",
    ]
    for (context, profile), panel in speed_ups(result["rows"]).items():
        for batch in sorted({batch for line in panel.values() for batch in line}):
            cells = [f"{panel[key][batch]:.2f}" if batch in panel.get(key, {}) else "–" for key in WAYS]
            lines.append(f"| {batch} × {_tokens(context)} | {profile} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def main() -> None:
    """Read the record, draw it and print its table."""
    command(__doc__, "end-to-end-h200.json", "speed-up-h200.svg", draw, table)


if __name__ == "__main__":
    main()
