"""python -m benchmarks.vllm.tables RECORD.json [--write PAGE.md]: a record's tables, every row of it.

Throughput beside the best of vLLM's own, texts, and what drafts give. Without --write the tables are printed. With it
they replace what stands between a page's marks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .turns import case_of

PARTS = ("throughput", "texts", "drafts")
BEGIN, END = "<!-- throughput: written by benchmarks.vllm.tables -->", "<!-- /throughput -->"
OURS = "CUSTOM:"
PHASES = {"decode": 0, "verify": 1, "mixed": 2, "prefill": 3}
ENOUGH = {"decode": 1.0, "verify": 1.0, "mixed": 1.0, "prefill": 0.97}
"""What is aimed at, of the best of vLLM's own."""
DRAFTERS = {"ngram": "n-gram", "eagle3": "EAGLE-3"}
MADE_OF: dict[str, Callable[[dict[str, Any]], str]] = {
    "backend": lambda row: f"`{row['backend'].removeprefix(OURS)}`",
    "pages": lambda row: f"pages of {row['page_size']}",
    "KV": lambda row: f"KV in {row['kv_dtype']}" if "kv_dtype" in row else "",
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
    """Of the medians of turns of one pace (`turns`), to three digits."""
    return round(float(ours["tokens_per_s"]) / float(theirs["tokens_per_s"]), 3)


def table(rows: list[dict[str, Any]]) -> str:
    """One run's. A ratio below what is aimed at is bold; of what all rows share a line says it, and no column."""
    found = list(pairs(rows))
    varied = [name for name, of in MADE_OF.items() if len({of(ours) for ours, _ in found}) > 1]
    shared = [of(found[0][0]) for name, of in MADE_OF.items() if name not in varied and of(found[0][0])]
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
                    ours["case"].replace("-uneven", ", uneven").replace("-beside-", " beside ").replace("+", " + "),
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
    """Every run's, behind what is said about it and the commit that ran."""
    found = []
    for name, run in record["runs"].items():
        rows = [row for row in record["rows"] if row["run"] == name]
        if rows:
            found.append(f"**{run['about']}** (commit {run['commit']})\n\n{table(rows)}")
    return "\n\n".join(found)


def texts(record: dict[str, Any]) -> str:
    """Every engine that said texts: how many are those of the first engine of its dtypes, and how far one may part."""
    titles = ["backend", "dtype", "pages", "GPUs", "drafts", "texts", "equal", "part at near ties", "wrong"]
    lines = [_line(titles), _line(["---", "---", "---:", "---:", "---", *["---:"] * 4])]
    for row in record.get("equality", ()):
        counts = [row["texts"], row["equal"], row["near_ties"], len(row["wrong_texts"])]
        compared = ", ranks compared" if row.get("debug") and row["num_gpus"] > 1 else ""
        dtypes = ", ".join(filter(None, [row["dtype"], MADE_OF["KV"](row)]))
        about = [_name(row), dtypes, row["page_size"], f"{row.get('num_gpus', 1)}{compared}", _drafts(row)]
        lines.append(_line([str(one) for one in (*about, *counts)]))
    return "\n".join(lines)


def drafts(record: dict[str, Any]) -> str:
    """Tokens a round and a second of one model with other drafts; a sentence where none were timed."""
    rows = record.get("drafting", ())
    if not rows:
        return "On a GPU no tree has been timed in vLLM yet."
    titles = ["backend", "drafts", "runner", "rows verified", "tokens a round", "ms a step", "tokens/s", "texts equal"]
    lines = [_line(titles), _line(["---", "---", "---", *["---:"] * 5])]
    for row in rows:
        equal = f"{row['equal']} of {row['texts']}"
        numbers = [f"{row['tokens_per_round']:.2f}", f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", equal]
        about = [_name(row), _drafts(row), row.get("runner", "vLLM's choice"), str(1 + row["drafts"])]
        lines.append(_line([*about, *numbers]))
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    backend = str(row["backend"])
    return f"`{backend.removeprefix(OURS)}`" if backend.startswith(OURS) else backend


def _drafts(row: dict[str, Any]) -> str:
    sampled = f", sampled at {row['temperature']}" if row.get("temperature") else ""
    if not row["drafts"]:
        return "none" + sampled
    kind = "trees" if row.get("trees") else "chain"
    return f"{DRAFTERS[row.get('drafter', 'ngram')]}, {kind} of {row['drafts']}{sampled}"


def written(record: dict[str, Any]) -> dict[str, str]:
    """The parts of a page, by their names."""
    return dict(zip(PARTS, (tables(record), texts(record), drafts(record)), strict=True))


def write(page: str, made: str, part: str = "throughput") -> str:
    """A page's text with a part's tables between its marks.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = (one.replace("throughput", part) for one in (BEGIN, END))
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the page has no {begin!r} … {end!r}; add the two lines where the tables shall stand")
    return f"{before}{begin}\n{made}\n{end}{after}"


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*case_of(row), row["page_size"])


def _phase(row: dict[str, Any]) -> str:
    return f"{row['phase']}, {DRAFTERS[row['drafter']]}" if "drafter" in row else str(row["phase"])


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    requests, _, tokens = row["case"].partition("-")[0].partition("x")
    context, _, new = tokens.partition("+")
    uneven = "uneven" in row["case"]
    return (
        PHASES[row["phase"]],
        row.get("drafter", ""),
        uneven,
        bool(new),
        int(context.removesuffix("k")),
        int(requests),
        row["page_size"],
    )


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    asked = parser.parse_args()
    made = written(json.loads(asked.record.read_text()))
    if asked.write is None:
        print("\n\n".join(made.values()))
        return
    page = asked.write.read_text()
    for part, text in made.items():
        page = write(page, text, part)
    asked.write.write_text(page)


if __name__ == "__main__":
    main()
