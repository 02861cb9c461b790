"""Tables of a vLLM record: a summary for docs/vllm.md, and every row for the generated page of results.

    python -m benchmarks.vllm.tables RECORD.json                    # print every table
    python -m benchmarks.vllm.tables RECORD.json --write PAGE.md    # write the summary between the markers of the page

A ratio is the tokens/s of one of our backends divided by the tokens/s of vLLM's fastest backend in the same case, run
and page size: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import between, origin

from .turns import case_of

BEGIN, END = "<!-- summary: written by benchmarks.vllm.tables -->", "<!-- /summary -->"
OURS = "CUSTOM:"
PHASES = {"decode": 0, "verify": 1, "mixed": 2, "prefill": 3}
TARGETS = {"decode": 1.0, "verify": 1.0, "mixed": 1.0, "prefill": 0.97}
"""Lowest ratio that a phase aims at; a smaller one is bold."""
DRAFTERS = {
    "ngram": "n-gram", "eagle3": "EAGLE-3", "dflash": "DFlash", "dflash, adaptive": "DFlash, adaptive",
}  # fmt: skip
MODEL = "Llama 3 8B"
MODELS = {"one-gpu-windows": "Gemma 2 9B", "one-gpu-qwen": "Qwen 2.5 7B"}
"""Model shape of a run, where it is not `MODEL`."""
MADE_OF: dict[str, Callable[[dict[str, Any]], str]] = {
    "backend": lambda row: f"`{row['backend'].removeprefix(OURS)}`",
    "pages": lambda row: f"pages of {row['page_size']}",
    "KV": lambda row: f"KV in {row['kv_dtype']}" if "kv_dtype" in row else "",
    "GPUs": lambda row: f"{row['num_gpus']} GPU{'s' * (row['num_gpus'] > 1)}",
}
"""Properties of an engine; each is a column where it differs among the rows of a table."""


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each of our rows with the row of vLLM's fastest backend in the same case and page size."""
    peers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        peers.setdefault(_case(row), []).append(row)
    for row in sorted(rows, key=_order):
        theirs = [one for one in peers[_case(row)] if not one["backend"].startswith(OURS)]
        if row["backend"].startswith(OURS) and theirs:
            yield row, max(theirs, key=lambda one: float(one["tokens_per_s"]))


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the tokens/s of `ours` divided by the tokens/s of `theirs`, rounded to three decimals."""
    return round(float(ours["tokens_per_s"]) / float(theirs["tokens_per_s"]), 3)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the throughput table of one run. Properties that all rows share stand in a line above it."""
    found = list(pairs(rows))
    varied = [name for name, of in MADE_OF.items() if len({of(ours) for ours, _ in found}) > 1]
    shared = [of(found[0][0]) for name, of in MADE_OF.items() if name not in varied and of(found[0][0])]
    titles = ["phase", "requests x tokens", *varied, "tokens/s", "vLLM's fastest", "tokens/s", "ratio", "each turn"]
    lines = [f"All rows: {', '.join(shared)}.", ""] if shared else []
    lines += [_line(titles), _line(["---"] * (2 + len(varied)) + ["---:", "---", "---:", "---:", "---"])]
    for ours, theirs in found:
        shown = ratio(ours, theirs)
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
                    f"{shown:.3f}" if shown >= TARGETS[ours["phase"]] else f"**{shown:.3f}**",
                    f"{min(turns):.2f} … {max(turns):.2f}" if len(turns) > 1 else "once",
                ]
            )
        )
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(record: dict[str, Any]) -> str:
    """Return a section for each run with throughput: its description, its versions, its table."""
    found = []
    for name, run in record["runs"].items():
        rows = [row for row in record["rows"] if row["run"] == name]
        if rows:
            found.append(f"## {name}\n\n{run['about']}\n\n{origin(run)}\n\n{table(rows)}")
    return "\n\n".join(found)


def summary(record: dict[str, Any]) -> str:
    """Return the lowest and highest ratio of each engine and kind of work, and the number of cases.

    Where two runs measured one case, the later run counts; runs stand in the order of their commits.
    """
    newest: dict[tuple[Any, ...], float] = {}
    for name, run in record["runs"].items():
        for ours, theirs in pairs([row for row in record["rows"] if row["run"] == name]):
            kind = (_engine(ours, name, run["device"]), _phase(ours))
            newest[(*kind, ours["case"], ours["page_size"])] = ratio(ours, theirs)
    groups: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for (engine, phase, *_), found in newest.items():
        groups.setdefault(engine, {}).setdefault(phase, []).append(found)
    phases = sorted({phase for found in groups.values() for phase in found}, key=_place)
    lines = [_line(["model shape", "GPUs", "backend", *phases]), f"|{'---|' * 3}{'---:|' * len(phases)}"]
    for engine in sorted(groups, key=lambda one: (not one[0].startswith(MODEL), one[2] != "`cuda_triton`", one)):
        lines.append(_line([*engine, *(_range(groups[engine].get(phase, ())) for phase in phases)]))
    return "\n".join(lines)


def _engine(row: dict[str, Any], run: str, device: str) -> tuple[str, str, str]:
    """Return the model shape, the GPUs and the backend of a row."""
    model = ", ".join(filter(None, [MODELS.get(run, MODEL), MADE_OF["KV"](row)]))
    return model, f"{row['num_gpus']} x {device.removeprefix('NVIDIA ').partition(' ')[0]}", MADE_OF["backend"](row)


def _place(phase: str) -> tuple[int, str]:
    """Return the sort key of a phase's column in the table."""
    return PHASES[phase.partition(",")[0]], phase


def _range(ratios: Sequence[float]) -> str:
    """Return the lowest and highest of some ratios, and their number; a dash for none."""
    return f"{min(ratios):.3f}–{max(ratios):.3f} ({len(ratios)})" if ratios else "–"


def texts(record: dict[str, Any]) -> str:
    """Return the table of texts: the number equal to the first engine's texts, and the reasons for differences."""
    titles = ["backend", "dtype", "pages", "GPUs", "drafts", "texts", "equal", "differ at a near tie", "wrong"]
    lines = [_line(titles), _line(["---", "---", "---:", "---:", "---", *["---:"] * 4])]
    for row in record.get("equality", ()):
        counts = [row["texts"], row["equal"], row["near_ties"], len(row["wrong_texts"])]
        compared = ", ranks compared" if row.get("debug") and row["num_gpus"] > 1 else ""
        dtypes = ", ".join(filter(None, [row["dtype"], MADE_OF["KV"](row)]))
        about = [_name(row), dtypes, row["page_size"], f"{row.get('num_gpus', 1)}{compared}", _drafts(row)]
        lines.append(_line([str(one) for one in (*about, *counts)]))
    return "\n".join(lines)


def drafts(record: dict[str, Any]) -> str:
    """Return the table of drafts of one model: tokens per round and tokens/s."""
    titles = ["backend", "drafts", "runner", "rows verified", "tokens a round", "ms a step", "tokens/s", "texts equal"]
    lines = [_line(titles), _line(["---", "---", "---", *["---:"] * 5])]
    for row in record.get("drafting", ()):
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


def write(page: str, made: str) -> str:
    """Return a page's text with `made` between its markers; a page without them raises ValueError."""
    return between(page, BEGIN, END, made)


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
    """Print every table, or write the summary into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    if options.write is None:
        print("\n\n".join([summary(record), tables(record), texts(record), drafts(record)]))
        return
    options.write.write_text(write(options.write.read_text(), summary(record)))


if __name__ == "__main__":
    main()
