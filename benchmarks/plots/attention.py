"""Draw a result of `python -m benchmarks.attention` as one SVG, and print its table for a README.

    python -m benchmarks.plots.attention                       # docs/attention-h200.svg, and the table on stdout

A bar is a backend's time divided by cuda_triton's in the same case: below 1 the backend is faster. A bar that would
leave the picture is shortened, with its number after it. Hatched bars do less work: no tree mask (causal), or no tail.
"""

from __future__ import annotations

from .svg import command, page, text

OURS = "cuda_triton"
COLOURS = {
    "fa3": "#4c8eda", "fa3-composed": "#24507f", "flashinfer-once": "#1b9e8a", "flashinfer": "#7fc97f",
    "xqa": "#b5a033", "xformers": "#8d7ad6", "flex": "#c77cb5", "vllm": "#8a8f98", "sglang": "#d9646b",
}  # fmt: skip
LABELS = {
    OURS: "cuda_triton (1.0)", "fa3": "FlashAttention 3", "fa3-composed": "FA3, composed exactly",
    "flashinfer-once": "FlashInfer, prefix once", "flashinfer": "FlashInfer", "xqa": "XQA", "xformers": "xformers",
    "flex": "flex_attention", "vllm": "vLLM Triton", "sglang": "SGLang Triton",
}  # fmt: skip
EASIER = {"causal": "causal", "none": "prefix only"}
LIMIT = 5.0
LEFT, RIGHT, UNIT, BAR, GAP, TOP = 168, 96, 118, 11, 16, 86
HATCHES = (
    '<defs><pattern id="easier" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="page" width="2.2" height="5" opacity="0.75"/></pattern></defs>'
)


def timed(result: dict) -> dict[str, dict[str, dict]]:
    """Return the timed rows of 32/8 heads of 128 in pages of 64, by case and backend, in the order of the file."""
    cases: dict[str, dict[str, dict]] = {}
    for row in result["rows"]:
        if row["us"] is not None and "@" not in row["case"]:
            cases.setdefault(row["case"], {})[row["backend"]] = row
    return cases


def draw(result: dict) -> str:
    """Return the picture as SVG."""
    cases = timed(result)
    width = LEFT + int(LIMIT * UNIT) + RIGHT
    parts, y = [], TOP
    for name, rows in cases.items():
        shown = [backend for backend in COLOURS if backend in rows]
        middle = y + len(shown) * BAR / 2
        ours = rows[OURS]["us"]
        parts.append(text(LEFT - 12, middle, name, "ink", "end"))
        parts.append(text(LEFT - 12, middle + 14, f"{_us(ours)} µs", "dim small", "end"))
        for backend in shown:
            parts.append(_bar(y, backend, rows[backend], rows[backend]["us"] / ours))
            y += BAR
        y += GAP
    bottom = y - GAP + 6
    height = bottom + 40
    marks = [_mark(value, bottom) for value in range(int(LIMIT) + 1)]
    head = [
        text(16, 26, "Attention: time relative to cuda_triton, lower is faster", "ink title"),
        text(16, height - 10, _caption(result), "dim small"),
        *_legend(_backends(cases)),
    ]
    label = "Attention times of peers relative to cuda_triton"
    return page(width, height, label, [*marks[:1], *marks[2:], *parts, marks[1], *head], HATCHES)


def _backends(cases: dict[str, dict[str, dict]]) -> list[str]:
    """Return the backends with times in the result; ours first."""
    return [OURS, *(one for one in COLOURS if any(one in rows for rows in cases.values()))]


def _bar(y: float, backend: str, row: dict, ratio: float) -> str:
    length = min(ratio, LIMIT) * UNIT
    box = f'x="{LEFT}" y="{y + 1:.1f}" width="{length:.1f}" height="{BAR - 2}"'
    easier = EASIER.get(row["tail"])
    label = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
    label += f" {easier}" if easier else ""
    drawn = f'<rect {box} fill="{COLOURS[backend]}"/>'
    if easier:
        drawn += f'<rect {box} fill="url(#easier)"/>'
    name = f"<title>{row['case']}, {LABELS[backend]}: {_us(row['us'])} µs</title>"
    shift = max(length, UNIT) if 0.7 < ratio <= 1 else length  # the bar's number must not cross the line at ratio 1
    return f"<g>{name}{drawn}{text(LEFT + shift + 5, y + BAR / 2, label, 'dim small')}</g>"


def _mark(value: int, bottom: float) -> str:
    x = LEFT + value * UNIT
    kind = 'class="one" stroke-width="1.5"' if value == 1 else 'class="rule"'
    line = f'<line x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{bottom:.1f}" {kind}/>'
    return line + text(x, bottom + 10, str(value), "dim small", "middle")


def _legend(backends: list[str]) -> list[str]:
    parts, x, y = [], 16, 50
    for backend in backends:
        fill = 'class="ours"' if backend == OURS else f'fill="{COLOURS[backend]}"'
        size = 'width="2" height="12"' if backend == OURS else 'width="12" height="10"'
        parts.append(f'<rect x="{x}" y="{y - 6}" {size} {fill}/>')
        parts.append(text(x + 17, y, LABELS[backend], "ink small"))
        x += 34 + 6 * len(LABELS[backend])
        if x > LEFT + LIMIT * UNIT - 60:
            x, y = 16, y + 17
    return parts


def _caption(result: dict) -> str:
    versions = result["versions"]
    return (
        f"{result['device']}, 32/8 heads of 128, bf16, page 64, median of CUDA-graph replays, one run; torch "
        f"{versions['torch']}, Triton {versions['triton']}. Hatched: without the tree's mask."
    )


def table(result: dict) -> str:
    """Return a Markdown table of µs per backend: ours bold; ᶜ marks causal results, ᵖ prefix-only results."""
    cases = timed(result)
    backends = _backends(cases)
    titles = [OURS, *(LABELS[one] for one in backends[1:])]
    lines = ["| case | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, rows in cases.items():
        cells = [_cell(rows.get(backend)) for backend in backends]
        lines.append(f"| {name} | **{cells[0]}** | " + " | ".join(cells[1:]) + " |")
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "–"
    easier = {"causal": "ᶜ", "none": "ᵖ"}.get(row["tail"], "")
    return _us(row["us"]) + easier


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def main() -> None:
    """Read the record, draw it and print its table."""
    command(__doc__, "attention-peers-h200.json", "attention-h200.svg", draw, table)


if __name__ == "__main__":
    main()
