"""Tests of the recorded throughput of vLLM with its own backends and ours, and of the tables made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.gather import gather
from benchmarks.vllm.tables import drafts, pairs, summary, table, tables, texts, write
from benchmarks.vllm.turns import levelled

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "vllm-h200.json").read_text())
PHASES = {"decode", "verify", "mixed", "prefill"}
WITH_DRAFTS = {"verify", "mixed"}
"""Phases with drafts; a mixed step may also decode without drafts."""


def test_each_row_has_its_description() -> None:
    """A row has case, phase, backend, page size, GPUs and speed; its run has versions, commit and a description."""
    for row in RECORD["rows"]:
        assert row["phase"] in PHASES and row["page_size"] % 16 == 0 and row["num_gpus"] in (1, 2)
        measured = row.get("median_tokens_per_s", row["tokens_per_s"])
        assert measured in row["all"] and measured > 0 and row["tokens_per_s"] > 0, row
        assert (row.get("drafter") in ("ngram", "eagle3")) is bool(row["drafts"])
        assert row["phase"] in WITH_DRAFTS if row["drafts"] else row["phase"] != "verify"
    for name in {row["run"] for row in RECORD["rows"] + RECORD["equality"]}:
        run = RECORD["runs"][name]
        assert run["about"] and run["commit"] != "unknown" and ("H200" in run["device"] or "H100" in run["device"])
        assert {"vllm", "torch", "triton", "draftmark-vllm", "draftmark-cuda-triton"} <= set(run["versions"])


def test_speeds_follow_from_the_turns() -> None:
    """A recorded speed that differs from the median is the speed that `levelled` computes from all turns."""
    for name in RECORD["runs"]:
        rows = [row for row in RECORD["rows"] if row["run"] == name and "median_tokens_per_s" in row]
        again = levelled([{**row, "tokens_per_s": row["median_tokens_per_s"]} for row in rows])
        assert [row["tokens_per_s"] for row in again] == [row["tokens_per_s"] for row in rows]
    assert any("median_tokens_per_s" in row for row in RECORD["rows"])


def test_rows_are_unique_and_have_a_peer() -> None:
    """Every row of our backends has a row of a vLLM backend in its run, and no row is recorded twice."""
    for name in RECORD["runs"]:
        rows = [row for row in RECORD["rows"] if row["run"] == name]
        keys = [(r["case"], r["phase"], r["backend"], r["page_size"], r["num_gpus"], r.get("drafter")) for r in rows]
        assert len(set(keys)) == len(keys)
        assert len(list(pairs(rows))) == len([row for row in rows if row["backend"].startswith("CUSTOM:")])


def test_no_recorded_text_is_wrong() -> None:
    """Each token is the model's best one within rounding error. Float32 texts are equal to the model's."""
    assert {bool(row.get("temperature")) for row in RECORD["equality"]} == {True, False}
    for row in RECORD["equality"] + RECORD["drafting"]:
        assert not row["wrong_texts"] and ("temperature" in row or row["furthest_below_best"] <= row["bound"])
        assert row["equal"] + row["near_ties"] == row["texts"]
        assert row["dtype"] != "float32" or row["equal"] == row["texts"]


def test_page_shows_the_summary_of_the_record() -> None:
    """docs/vllm.md has the summary that `python -m benchmarks.vllm.tables` writes."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert write(page, summary(RECORD)) == page


def test_tables_have_every_row() -> None:
    """Each row of our backends has a line in the tables."""
    ours = [row for row in RECORD["rows"] if row["backend"].startswith("CUSTOM:")]
    lines = [line for line in tables(RECORD).splitlines() if line.startswith(tuple(f"| {phase}" for phase in PHASES))]
    assert len(lines) - len(RECORD["runs"]) <= len(ours) <= len(lines)


def row(backend: str, speed: float, **more: Any) -> dict[str, Any]:
    """Return a row of one benchmark case with this backend and speed."""
    usual = {"case": "16x1k", "phase": "decode", "page_size": 16, "num_gpus": 1, "all": [speed, 2 * speed]}
    return {"backend": backend, "tokens_per_s": speed, **usual, **more}


def test_peer_is_the_best_of_vllms_own() -> None:
    """A row's peer is the fastest vLLM backend in the same case. A ratio below the target is printed in bold."""
    rows = [row("CUSTOM:a", 90.0, all=[90.0, 80.0]), row("FLASH_ATTN", 100.0), row("TRITON_ATTN", 95.0)]
    rows += [row("CUSTOM:a", 97.0, phase="prefill"), row("FLASH_ATTN", 100.0, phase="prefill")]
    rows += [row("CUSTOM:a", 1.0, page_size=64)]
    shared, _, *head, first, second = table(rows).splitlines()
    assert shared == "All rows: `a`, pages of 16, 1 GPU." and len(head) == 2
    lines = [first, second]
    assert "| FLASH_ATTN | 100 | **0.900** | 0.40 … 0.90 |" in lines[0]
    assert "| 0.970 |" in lines[1]


def test_summary_takes_the_later_run_of_a_case() -> None:
    """If two runs measured a case, the later one counts; the summary has one cell for each kind of work."""
    runs = {name: {"about": name, "device": "NVIDIA H200", "commit": "c", "versions": {}} for name in ("a", "b")}
    rows = [row("CUSTOM:a", 90.0) | {"run": "a"}, row("FLASH_ATTN", 100.0) | {"run": "a"}]
    rows += [row("CUSTOM:a", 110.0) | {"run": "b"}, row("FLASH_ATTN", 100.0) | {"run": "b"}]
    rows += [{**one, "page_size": 64, "tokens_per_s": 100.0} for one in rows[2:]]
    assert summary({"runs": runs, "rows": rows}).splitlines()[2:] == [
        "| Llama 3 8B | 1 x H200 | `a` | 1.000–1.100 (2) |"
    ]


def test_different_properties_are_columns() -> None:
    """Page sizes get a column if they differ; properties that all rows share are named above the table."""
    rows = [row("CUSTOM:a", 90.0), row("FLASH_ATTN", 100.0)]
    rows += [{**one, "page_size": 64} for one in rows]
    shared, _, head, _, *lines = table(rows).splitlines()
    assert shared == "All rows: `a`, 1 GPU." and "| requests x tokens | pages | tokens/s |" in head
    assert [line.split(" | ")[2] for line in lines] == ["pages of 16", "pages of 64"]


def test_other_kv_dtype_is_shown() -> None:
    """The KV dtype is named above the table or in a column. Rows of different KV dtypes are not compared."""
    rows = [row("CUSTOM:a", 90.0, kv_dtype="fp8"), row("FLASH_ATTN", 100.0, kv_dtype="fp8")]
    assert table(rows).splitlines()[0] == "All rows: `a`, pages of 16, KV in fp8, 1 GPU."
    both = [*rows, row("CUSTOM:a", 90.0), row("FLASH_ATTN", 120.0)]
    _, _, head, _, *lines = table(both).splitlines()
    assert "| KV |" in head and [line.split(" | ")[2] for line in lines] == ["KV in fp8", ""]
    assert "| **0.900** |" in lines[0] and "| **0.750** |" in lines[1]


def test_texts_and_drafts_have_their_own_tables() -> None:
    """Each engine has one line in the table of compared texts and one in the table of drafts."""
    said = {"dtype": "bfloat16", "texts": 8, "equal": 7, "near_ties": 1, "wrong_texts": []}
    trees = {"drafts": 6, "drafter": "eagle3", "trees": True, "tokens_per_round": 2.914, "step_ms": 3.5}
    row = {"backend": "CUSTOM:a", "page_size": 16, "tokens_per_s": 1234.5, **said, **trees}
    found = texts({"equality": [row, {"backend": "B", "page_size": 64, "num_gpus": 2, "drafts": 0, **said}]})
    assert "| `a` | bfloat16 | 16 | 1 | EAGLE-3, trees of 6 | 8 | 7 | 1 | 0 |" in found
    assert "| B | bfloat16 | 64 | 2 | none | 8 | 7 | 1 | 0 |" in found
    over = texts({"equality": [{"backend": "B", "page_size": 64, "kv_dtype": "fp8", "drafts": 0, **said}]})
    assert "| B | bfloat16, KV in fp8 | 64 | 1 | none | 8 | 7 | 1 | 0 |" in over
    compared = texts(
        {"equality": [{"backend": "B", "page_size": 16, "num_gpus": 2, "debug": True, "drafts": 0, **said}]}
    )
    assert "| B | bfloat16 | 16 | 2, ranks compared | none | 8 | 7 | 1 | 0 |" in compared
    assert "| `a` | EAGLE-3, trees of 6 | V1 | 7 | 2.91 | 3.50 | 1,234 | 7 of 8 |" in drafts(
        {"drafting": [row | {"runner": "V1"}]}
    )


def test_run_replaces_one_of_its_name() -> None:
    """A new run replaces the recorded run with the same name; other runs stay."""
    result = {"device": "d", "commit": "c", "versions": {}, "equality": [], "rows": [row("A", 1.0)], "profiles": []}
    one = gather(gather({}, result, "x", "first"), result, "y", "second")
    again = gather(one, {**result, "rows": [row("B", 2.0)], "commit": "e"}, "x", "third")
    assert [(found["run"], found["backend"]) for found in again["rows"]] == [("y", "A"), ("x", "B")]
    assert again["runs"]["x"] == {"about": "third", "device": "d", "commit": "e", "versions": {}}


def test_slow_turn_changes_no_ratio() -> None:
    """Slow turns are corrected: A stays 2 % faster than B, although one turn of A was interrupted.

    Engine C has two processes in each turn. A case with other turns stays unchanged.
    """
    cores = [100.0, 80.0, 100.0, 80.0, 100.0]
    fast, slow = [1.02 * one for one in cores], list(cores)
    fast[2], own = 60.0, [50.0, 50.0, 40.0, 40.0, 50.0, 50.0, 40.0, 40.0, 50.0, 50.0]
    usual = {"case": "16x1k", "phase": "verify", "num_gpus": 1, "drafter": "ngram", "page_size": 16}
    rows = [
        {**usual, "backend": "A", "tokens_per_s": sorted(fast)[2], "step_ms": 2.0, "all": fast},
        {**usual, "backend": "B", "tokens_per_s": 100.0, "step_ms": 2.0, "all": slow},
        {**usual, "backend": "C", "tokens_per_s": 50.0, "step_ms": 4.0, "all": own, "processes": 2},
        {**usual, "backend": "A", "tokens_per_s": 7.0, "all": [7.0], "case": "1x1k"},
    ]
    a, b, c, other = levelled(rows)
    assert rows[0]["tokens_per_s"] == pytest.approx(81.6)
    assert a["tokens_per_s"] / b["tokens_per_s"] == pytest.approx(1.02, abs=2e-3)
    assert c["tokens_per_s"] / b["tokens_per_s"] == pytest.approx(0.5, abs=2e-3)
    assert [one["all"] for one in (a, b, c)] == [one["all"] for one in rows[:3]]
    assert a["median_tokens_per_s"] == rows[0]["tokens_per_s"] and other["tokens_per_s"] == 7.0
    assert a["step_ms"] * a["tokens_per_s"] == pytest.approx(2.0 * rows[0]["tokens_per_s"], rel=1e-3)
    assert levelled([rows[0], {**rows[1], "all": slow[1:]}]) == [rows[0], {**rows[1], "all": slow[1:]}]


def test_replaced_run_may_be_kept() -> None:
    """A replaced run can be kept with all rows under another name, which is listed after the new run."""
    said = {"device": "d", "commit": "c", "versions": {}, "equality": [], "profiles": []}
    first, second, third = ([row(name, speed, all=[speed])] for name, speed in (("A", 1.0), ("A", 3.0), ("A", 2.0)))
    one = gather(gather({}, {**said, "rows": first}, "x", "first"), {**said, "rows": second}, "y", "second")
    newer = {**said, "rows": [*third, row("CUSTOM:b", 2.0, all=[2.0])], "commit": "e"}
    again = gather(one, newer, "x", "third", keep=("old", "what x was"))
    assert list(again["runs"]) == ["x", "old", "y"]
    assert again["runs"]["old"] == {**one["runs"]["x"], "about": "what x was"}
    speeds = sorted((found["run"], found["tokens_per_s"]) for found in again["rows"])
    assert speeds == [("old", 1.0), ("x", 2.0), ("x", 2.0), ("y", 3.0)]
    newest = tables({**again, "rows": [found for found in again["rows"] if found["run"] == "x"]})
    assert newest.startswith("## x\n\nthird\n\n*d · commit e*\n\nAll rows: `b`")


def test_keeping_needs_an_existing_run_and_a_free_name() -> None:
    """A run can be kept only if it exists and its new name is unused; otherwise the error has both names."""
    result = {"device": "d", "commit": "c", "versions": {}, "equality": [], "rows": [], "profiles": []}
    with pytest.raises(ValueError, match="'x' to 'old', but the record has no run 'x'; its runs are \\[\\]"):
        gather({}, result, "x", "first", keep=("old", "what x was"))
    with pytest.raises(ValueError, match="'x' to 'x', but the record has a run 'x' already"):
        gather(gather({}, result, "x", "first"), result, "x", "second", keep=("x", "what x was"))


def test_texts_are_recorded_only_with_a_judgement() -> None:
    """Generated texts can be recorded only after they were judged, and tables only into a page with marks for them."""
    result = {"equality": [{"backend": "A", "tokens": [[1]]}], "rows": []}
    with pytest.raises(ValueError, match="texts of A are not judged"):
        gather({}, result, "x", "first")
    with pytest.raises(ValueError, match="the page has no"):
        write("nothing", "made")
