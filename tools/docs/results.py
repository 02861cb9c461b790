"""Pages of measured results, made from the records in benchmarks/results by `make docs`.

Every record has a section on one page. Each section shows the hardware, the versions and the commit of its record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import origin
from benchmarks.sglang import tables as sglang_tables
from benchmarks.vllm import tables as vllm_tables

from .kills import ROOT

Row = dict[str, Any]

RECORDS = ROOT / "benchmarks" / "results"
OURS = "cuda_triton"
PEERS = (
    "fa3", "fa3-composed", "flashinfer", "flashinfer-once", "xqa", "xformers", "flex", "vllm", "sglang",
    "draftmark-flashinfer", "draftmark-trtllm",
)  # fmt: skip
"""Other backends in attention records; every other name is a variant of cuda_triton's kernels."""
MARKS = {"causal": " ᶜ", "none": " ᵖ"}
WITHOUT_CAPTION = ("rows", "commit", "device", "versions", "torch", "date", "about", "note", "schema", "later_runs")
NOT_SHOWN = ("turns", "all", "largest_us", "kernels", "checked", "schema")
"""Fields of rows that a table omits: single turns of a median, and lists of kernels."""
PAGES: dict[str, tuple[str, ...]] = {
    "results-vllm.md": ("vllm-",),
    "results-sglang.md": ("sglang-",),
    "results-attention.md": ("attention-",),
    "results-kernels.md": ("attention-", "latent-", "state-", "merges-", "loop-helpers-", "kernels-"),
    "results-decode.md": ("end-to-end-", "lossless-", "cpu-ngram", "draft-ancestors", "eagle-", "bfloat16-", "soak-"),
    "results-judge.md": ("judge-",),
}
"""Pages, and the first letters of the records on them; `page_of` assigns the records of attention."""
VLLM = """# Results: vLLM

[How the benchmark works and how to run it](benchmarks.md#vllm). A case `16x1k` is 16 requests of 1,024 tokens each;
`1x8k + 64` is one request with 64 new tokens after 8,192 cached ones; `64x8k beside 2k` is a prompt of 2,048 tokens
that arrives while 64 requests decode.

* **ratio**: tokens/s of the backend divided by tokens/s of vLLM's fastest backend in the same case, run and page size.
  Above 1 ours is faster. **Bold**: below 1.0 in decode and verification, below 0.97 in prefill.
* **each turn**: the smallest and the largest ratio of a single turn.
* Speeds are medians over turns. Slow-downs that hit every engine in a turn are removed first.
* Runs stand in the order of their commits. Kernels changed between them, so compare ratios inside one run only.

## Texts

Every token is the model's best token, or below it by no more than rounding explains ([the rule](judge.md)).
*Equal*: equal to the text of the first engine with the same dtypes, or with the same sampling.

{texts}

## Drafts of SmolLM2-135M

Seven prompts at once. *Equal*: equal to FLASH_ATTN's text; for sampled rows, equal to the text of the same worker
without drafts.

{drafts}

{throughput}
"""
SGLANG = """# Results: SGLang

[How the benchmark works and how to run it](benchmarks.md#sglang). Tokens/s; `p1`, `p16` and `p64` are page sizes.

* **ratio**: draftmark's tokens/s divided by that of SGLang's fastest backend in the same run, at any
  measured page size.
* **bound**: the ratio if draftmark's attention took no time. A dash: the kernels of that row were not timed.
* A star: one round took more than 1.4 times the median. The rate is then that of the median round.
* The runs used different machines. Compare ratios inside one run only.

"""
ATTENTION = """# Results: attention

µs of one call; [how to run it](benchmarks.md#attention). A case `verify16-64x8192@32/8x128-p16` is a tree of 16
drafts for each of 64 requests with 8,192 tokens, 32 query heads, 8 KV heads of 128, pages of 16. Without `@` the shape
is 32/8x128 in pages of 64. Every answer is compared with float64 before its time is taken, except where a run states
otherwise.

* **ratio**: the time of the fastest other backend divided by cuda_triton's. Above 1 cuda_triton is faster.
* ᶜ the backend has no tree mask and computes causal attention; ᵖ it computes the prefix only. Both are less work.
* ʳ the backend also rounds queries and softmax weights to e4m3.

"""
KERNELS = """# Results: variants of cuda_triton

µs of one call; cases and marks are those of [the attention results](results-attention.md). These records compare
versions of our own kernels. `cuda_triton` is the commit of the record; each section explains the other names.

"""
DECODE = """# Results: decoding

Records of draftmark's own decoding loop, its draft head and its soak tests
([how to run them](benchmarks.md#decoding)).

"""
JUDGE = """# Results: `draftmark judge`

Items and their outcomes as the judge recorded them. *seen as* is what each wrong answer turned out to be:
`defect` is the engine's, `judge` is a fault of the judge that is fixed since, `not served` is a case that the engine
rejects.

"""


def page_of(record: Path) -> str:
    """Return the page that shows a record, with its anchor, or "" if no page shows it."""
    for page, starts in PAGES.items():
        if record.name.startswith(starts) and record.suffix == ".json":
            variants = page == "results-attention.md" and not _backends(_read(record)) <= {OURS, *PEERS}
            if not variants:
                return f"{page}#{record.stem}"
    return ""


def vllm() -> str:
    """Return the results page of vLLM."""
    record = _read(RECORDS / "vllm-h200.json")
    parts = {"texts": vllm_tables.texts(record), "drafts": vllm_tables.drafts(record)}
    page = VLLM.format(**parts, throughput=vllm_tables.tables(record))
    return _anchored(page, "vllm-h200") + _sections("results-vllm.md", without="vllm-h200")


def sglang() -> str:
    """Return the results page of SGLang."""
    page = SGLANG + sglang_tables.tables(_read(RECORDS / "sglang-h200.json"))
    return _anchored(page, "sglang-h200") + _sections("results-sglang.md", without="sglang-h200")


def attention() -> str:
    """Return the results page of attention, in comparison with other libraries."""
    return ATTENTION + _sections("results-attention.md")


def kernels() -> str:
    """Return the results page of variants of our own kernels."""
    return KERNELS + _sections("results-kernels.md")


def decode() -> str:
    """Return the results page of draftmark's own decoding loop."""
    return DECODE + _sections("results-decode.md")


def judge() -> str:
    """Return the results page of `draftmark judge`."""
    return JUDGE + _sections("results-judge.md")


MADE: dict[str, Callable[[], str]] = dict(zip(PAGES, (vllm, sglang, attention, kernels, decode, judge), strict=True))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table with a column per field; fields that all rows share are named above it."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    shared = [name for name in names if len(rows) > 1 and len({_cell(row.get(name)) for row in flat}) == 1]
    varied = [name for name in names if name not in shared]
    same = "; ".join(f"{_title(name)} {_cell(flat[0][name])}" for name in shared if _cell(flat[0].get(name)))
    lines = [f"All rows: {same}.", ""] if same else []
    lines += [_line(map(_title, varied)), _line(["---"] * len(varied))]
    return "\n".join([*lines, *(_line(_cell(row.get(name)) for name in varied) for row in flat)])


def times(rows: Sequence[Row]) -> str:
    """Return an attention run as a Markdown table, with a line per case and a column per backend."""
    cases: dict[str, dict[str, Row]] = {}
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row["case"], set()).add(row.get("page_size", 64))
    for row in rows:
        case = row["case"] + (f", pages of {row['page_size']}" if len(sizes[row["case"]]) > 1 else "")
        cases.setdefault(case, {})[row["backend"]] = row
    names = sorted({row["backend"] for row in rows if row["us"] is not None}, key=lambda one: (one != OURS, one))
    lines = [_line(["case", *names, "ratio"]), _line(["---", *["---:"] * (len(names) + 1)])]
    for case, found in cases.items():
        timed = {name: row["us"] for name, row in found.items() if row["us"] is not None}
        others = [us for name, us in timed.items() if name != OURS]
        ratio = f"{min(others) / timed[OURS]:.2f}" if others and OURS in timed else "–"
        lines.append(_line([case, *(_time(found.get(name)) for name in names), ratio]))
    return "\n".join(lines)


def _sections(page: str, without: str = "") -> str:
    """Return the sections of all records of a page, except the record `without`."""
    shown = [one for one in sorted(RECORDS.glob("*.json")) if page_of(one).partition("#")[0] == page]
    return "\n\n".join(_section(one.stem, _read(one)) for one in shown if one.stem != without) + "\n"


def _section(name: str, record: Row) -> str:
    """Return the section of a record: for each run its origin, its facts and a table for each list of rows."""
    parts = [f"## {name} {{#{name}}}", f"[Record](../benchmarks/results/{name}.json)."]
    for run in (record, *record.get("later_runs", ())):
        parts += [run.get("about") or run.get("note") or "", origin(run)]
        rest = {field: value for field, value in run.items() if field not in WITHOUT_CAPTION}
        lists = {field: value for field, value in rest.items() if _is_table(value)}
        facts = _flat({field: value for field, value in rest.items() if field not in lists})
        parts.append("; ".join(f"{_title(field)}: {_cell(value)}" for field, value in facts.items() if _cell(value)))
        rows = run.get("rows", [])
        parts.append(times(rows) if name.startswith("attention-") and rows else table(rows) if rows else "")
        for field, value in lists.items():
            parts += [f"**{_title(field)}**", table(value)]
            parts += [_wrong(target) for target in value if target.get("wrong")]
    return "\n\n".join(filter(None, parts))


def _wrong(target: Row) -> str:
    """Return a table of the wrong answers of a backend, as recorded by `draftmark judge`."""
    return f"Wrong answers of `{target['target']}`:\n\n{table(target['wrong'])}"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _flat(row: Row) -> Row:
    """Return a row without nesting: each number in a field of named numbers becomes a field."""
    flat: Row = {}
    for name, value in row.items():
        if name in NOT_SHOWN or _is_table(value):
            continue
        if isinstance(value, dict) and not any(isinstance(one, (dict, list)) for one in value.values()):
            flat |= {f"{name}: {inner}": one for inner, one in value.items()}
        elif not isinstance(value, dict):
            flat[name] = str(value)[:8] if name == "commit" else value
    return flat


def _time(row: Row | None) -> str:
    if row is None or row["us"] is None:
        return "–"
    us = f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:,.0f}"
    return us + MARKS.get(row.get("tail", ""), "") + " ʳ" * bool(row.get("rounded"))


def _cell(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _title(name: str) -> str:
    return name.replace("_", " ")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _anchored(page: str, name: str) -> str:
    """Return a page with its record's anchor in the title, and a link to the record below the title."""
    title, _, rest = page.partition("\n")
    return f"{title} {{#{name}}}\n\n[Record](../benchmarks/results/{name}.json).\n{rest}\n\n"


def _backends(record: Row) -> set[str]:
    runs = (record, *record.get("later_runs", ()))
    return {row["backend"] for run in runs for row in run["rows"] if "backend" in row}


def _read(path: Path) -> Row:
    found: Row = json.loads(path.read_text(encoding="utf-8"))
    return found
