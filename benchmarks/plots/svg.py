"""Shared parts of the drawings: text, page, command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.origin import RESULTS, ROOT

STYLE = """
svg { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px }
.ink { fill: #1f2328 } .dim { fill: #59636e } .rule { stroke: #d1d9e0 } .one { stroke: #1f2328 } .ours { fill: #1f2328 }
.edge { stroke: #8a8f98 } .cell { fill: #eaeef2 } .page { fill: #ffffff }
.small { font-size: 10.5px } .title { font-size: 15px; font-weight: 600 }
.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 11px }
@media (prefers-color-scheme: dark) {
  .ink { fill: #f0f6fc } .dim { fill: #9198a1 } .rule { stroke: #3d444d } .one { stroke: #f0f6fc }
  .ours { fill: #f0f6fc } .page { fill: #0d1117 } .cell { fill: #21262d }
}
"""


def text(x: float, y: float, line: str, kind: str, anchor: str = "start") -> str:
    """Return one line of text, vertically centred at y; `kind` names CSS classes of the drawing."""
    safe = line.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" dominant-baseline="middle">{safe}</text>'
    )


def page(width: int, height: float, label: str, parts: Sequence[str], definitions: str = "") -> str:
    """Return the whole SVG file. `label` is its description for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
            f'height="{height:.0f}" role="img" aria-label="{label}">',
            f"<style>{STYLE}</style>{definitions}",
            f'<rect class="page" width="{width}" height="{height:.0f}" rx="6"/>', *parts, "</svg>", "",
        ]
    )  # fmt: skip


def command(
    description: str, recorded: str, drawing: str, draw: Callable[[Any], str], *tables: Callable[[Any], str]
) -> None:
    """Read a recorded result, draw it into docs/, and print its tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / recorded)
    parser.add_argument("--svg", type=Path, default=ROOT / "docs" / drawing)
    args = parser.parse_args()
    result = json.loads(args.json.read_text(encoding="utf-8"))
    args.svg.write_text(draw(result), encoding="utf-8")
    print(*(table(result) for table in tables), sep="\n\n")
