"""python -m benchmarks.vllm.tables RECORD.json [--write PAGE.md]: throughput beside the best of vLLM's own, every row.

Without --write the tables are printed. It replaces what stands between the two marks of a page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- throughput: written by benchmarks.vllm.tables -->", "<!-- /throughput -->"
OURS = "CUSTOM:"
PHASES = {"decode": 0, "verify": 1, "prefill": 2}
ENOUGH = {"decode": 1.0, "verify": 1.0, "prefill": 0.97}
"""What is aimed at, of the best of vLLM's own."""
DRAFTERS = {"ngram": "n-gram", "eagle3": "EAGLE-3"}
MADE_OF: dict[str, Callable[[dict[str, Any]], str]] = {
    "backend": lambda row: f"`{row['backend'].removeprefix(OURS)}`",
    "pages": lambda row: f"pages of {row['page_size']}",
    "GPUs": lambda row: f"{row['num_gpus']} GPU{'s' * (row['num_gpus'] > 1)}",
}
"""What an engine is made of, beside its case: columns where they differ."""


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each of our rows, and the best of vLLM's own backends in the same case."""
    peers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        peers.setdefault(_case(row), []).append(row)
    for row in sorted(rows, key=_order):
        theirs = [one for one in peers[_case(row)] if not one["backend"].startswith(OURS)]
        if row["backend"].startswith(OURS) and theirs:
            yield row, max(theirs, key=lambda one: float(one["tokens_per_s"]))


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Of the medians, to three digits."""
    return round(float(ours["tokens_per_s"]) / float(theirs["tokens_per_s"]), 3)


def table(rows: list[dict[str, Any]]) -> str:
    """One run's. A ratio below what is aimed at is bold; of what all rows share a line says it, and no column."""
    found = list(pairs(rows))
    varied = [name for name, of in MADE_OF.items() if len({of(ours) for ours, _ in found}) > 1]
    shared = [of(found[0][0]) for name, of in MADE_OF.items() if name not in varied]
    titles = ["phase", "requests x tokens", *varied, "tokens/s", "vLLM's best", "tokens/s", "ratio", "by turns"]
    lines = [f"All rows: {', '.join(shared)}.", ""] if shared else []
    lines += [_line(titles), _line(["---"] * (2 + len(varied)) + ["---:", "---", "---:", "---:", "---"])]
    for ours, theirs in found:
        among = ratio(ours, theirs)
        turns = [one / other for one, other in zip(ours["all"], theirs["all"], strict=False)]
        lines.append(
            _line(
                [
                    _phase(ours),
                    ours["case"].replace("-uneven", ", uneven"),
                    *(MADE_OF[name](ours) for name in varied),
                    f"{ours['tokens_per_s']:,.0f}",
                    theirs["backend"],
                    f"{theirs['tokens_per_s']:,.0f}",
                    f"{among:.3f}" if among >= ENOUGH[ours["phase"]] else f"**{among:.3f}**",
                    f"{min(turns):.2f} … {max(turns):.2f}" if len(turns) > 1 else "once",
                ]
            )
        )
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(record: dict[str, Any]) -> str:
    """Every run's, behind what is said about it."""
    found = []
    for name, run in record["runs"].items():
        rows = [row for row in record["rows"] if row["run"] == name]
        if rows:
            found.append(f"**{run['about']}**\n\n{table(rows)}")
    return "\n\n".join(found)


def write(page: str, made: str) -> str:
    """A page's text with the tables between its marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the page has no {BEGIN!r} … {END!r}; add the two lines where the tables shall stand")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["phase"], row.get("drafter"), row["case"], row["page_size"], row["num_gpus"]


def _phase(row: dict[str, Any]) -> str:
    return f"{row['phase']}, {DRAFTERS[row['drafter']]}" if "drafter" in row else str(row["phase"])


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    requests, _, tokens = row["case"].partition("-")[0].partition("x")
    uneven = "uneven" in row["case"]
    return (
        PHASES[row["phase"]],
        row.get("drafter", ""),
        uneven,
        int(tokens.removesuffix("k")),
        int(requests),
        row["page_size"],
    )


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    asked = parser.parse_args()
    made = tables(json.loads(asked.record.read_text()))
    if asked.write is None:
        print(made)
    else:
        asked.write.write_text(write(asked.write.read_text(), made))


if __name__ == "__main__":
    main()
