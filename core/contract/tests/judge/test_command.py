"""Tests of the command `draftmark judge` on a fake engine with every outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from draftmark_contract.check import Tier
from draftmark_contract.contract_tests import ContractTests
from draftmark_contract.runner import judging, pool
from draftmark_contract.runner.against import Earlier, compare
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.run import RunOptions, run
from draftmark_contract.runner.subject import Kind, Listed, Opened, Opening
from draftmark_contract.runner.verdict import Verdict, Word
from draftmark_contract.schema import schema_text

LIMITED = """
import resource, sys
from draftmark_tools.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""
"""Program that runs a command line with a limit on the size of files, which acts like a disk that fills."""
Run = Callable[..., subprocess.CompletedProcess[str]]


def _python_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftmark: Callable[..., Any]) -> Run:
    """Return a function that runs the command with the fake engine on its path.

    The command runs in this process, which has imported everything, unless `apart` is True or its files are limited.
    """
    info = tmp_path / "fake_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judges]\nfake = fake_engine:ENGINE\n")
    for name in [name for name in os.environ if name.startswith(("TRITON_", "PTXAS"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_FAKE", "1")
    monkeypatch.setenv("PYTHONPATH", _python_path(tmp_path))
    for folder in (Path(__file__).parent, tmp_path):
        monkeypatch.syspath_prepend(str(folder))

    def run(*arguments: str, most_bytes: int | None = None, apart: bool = False) -> subprocess.CompletedProcess[str]:
        if most_bytes is None and not apart:
            said = draftmark("judge", *arguments)
            return subprocess.CompletedProcess(arguments, said.code, said.out, said.err)
        limited = ["-c", LIMITED, str(most_bytes)] if most_bytes else ["-m", "draftmark_tools.cli"]
        command = [sys.executable, *limited, "judge", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_no_argument_lists_engines_and_missing_packages(judge: Run) -> None:
    """Without arguments, the command lists engines; a backend that lacks a package is listed with its pip command."""
    said = judge()
    assert said.returncode == 0, said.stderr
    assert "fake: fake 1.0" in said.stdout
    assert "fake:ABSENT" in said.stdout and "pip install no-such-module" in said.stdout


def test_outcomes_are_counted_separately(judge: Run, tmp_path: Path) -> None:
    """An item that crashes counts as wrong and later items still run; items that cannot run do not count as right."""
    said = judge("fake:MIXED", "--json", str(tmp_path / "verdict.json"))
    assert said.returncode == 1, said.stderr
    assert "fake:MIXED does not conform to draftmark contract" in said.stdout
    assert ": 2 passed, 1 refused, 0 declared, 1 unjudged, 4 failed" in said.stdout
    assert "  fake 1.0, cpu\n  broken rules: 22, 26, " in said.stdout
    assert "refused: 1 x head_size not supported" in said.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    counts = {"passed": 2, "refused": 1, "declared": 0, "unjudged": 1, "failed": 4, "not_run": 0}
    assert verdict["counts"] == counts and verdict["kind"] == "layer" and verdict["backend"] == "fake:MIXED"
    ended = {row["item"]: row for row in verdict["results"]}
    assert "the process with code 9" in ended["padding.changes_no_live_byte[dies]"]["message"]
    assert "a kernel's own words" in ended["repeats.give_the_same_bits[raises]"]["message"]
    assert ended["history.equals_a_fresh_state[shrinks]"]["outcome"] == "passed"
    left = verdict["rules_left_out"]
    assert left["proof.needed_is_declared"] == "nothing is declared that could be proved"
    assert "numerics.match_float64" not in left


def test_finding_names_rule_bugs_batch_and_command(judge: Run) -> None:
    """The first wrong item of a rule is printed in full, and its command reproduces the failure."""
    said = judge("fake:MIXED", "-k", "match_float64")
    for part in (
        "numerics.match_float64[verify]",
        "numerics.match_float64 (rule 22): Every live output row matches float64 within rounding",
        "checked here as: the builder and the layer run one step",
        "batch: r0: L=3 rows=1",
        "got: 1.5",
        "expected: 2.5 ± 0.1",
        "bugs of this class: vllm#43961, ROCm/ATOM#1591",
        "run it again: draftmark judge fake:MIXED --item 'numerics.match_float64[verify]'",
        "also: [extend]",
    ):
        assert part in said.stdout, part
    alone = judge("fake:MIXED", "--item", "numerics.match_float64[verify]")
    assert alone.returncode == 1 and "0 passed, 0 refused, 0 declared, 0 unjudged, 1 failed" in alone.stdout


def test_html_writes_a_page_with_every_wrong_rule(judge: Run, tmp_path: Path) -> None:
    """The page names every wrong rule, the item that ended its process, and the reason why an item was not served."""
    said = judge("fake:MIXED", "--html", str(tmp_path / "report.html"))
    assert said.returncode == 1, said.stderr
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in ("1. numerics.match_float64", "padding.changes_no_live_byte", "repeats.give_the_same_bits"):
        assert part in text
    assert "head_size not supported" in text and "the process with code 9" in text


def test_correct_backend_exits_with_0(judge: Run) -> None:
    """A correct backend exits with 0, and the engine's environment variables reach the judging process."""
    said = judge("fake:RIGHT")
    assert said.returncode == 0, said.stdout
    assert "2 rules of fake:RIGHT conform to draftmark contract" in said.stdout and ": 2 passed, " in said.stdout


def test_run_without_a_runnable_item_exits_with_1(judge: Run) -> None:
    """A run in which no item can run exits with 1, because exit code 0 would promise a tested backend."""
    said = judge("fake:MIXED", "--item", "graphs.replay_equals_eager[decode]")
    assert "0 passed, " in said.stdout and "unjudged: 1 x there is no graph on a CPU" in said.stdout
    assert said.returncode == 1
    assert "fake:MIXED has no verdict" in said.stdout and "and none of them could run here" in said.stdout
    refused = judge("fake:MIXED", "--item", "numerics.serve_what_is_not_refused[head-80]")
    assert refused.returncode == 1, refused.stdout
    assert "1 x head_size not supported" in refused.stdout and "refuses all of them" in refused.stdout
    empty = judge("fake:EMPTY")
    assert empty.returncode == 1 and "fake:EMPTY has no verdict" in empty.stdout
    assert "because it has no item" in empty.stdout


def test_part_without_a_failure_gives_no_verdict(judge: Run, tmp_path: Path) -> None:
    """A run of some items that pass exits with 2 and writes nothing; --allow-part exits with 0 and writes the JSON."""
    part = ("fake:package.Two", "--sample", "1", "--json", str(tmp_path / "v.json"))
    said = judge(*part, "--record", str(tmp_path / "r.json"))
    assert said.returncode == 2 and "has no verdict on" in said.stdout, said
    assert "because only 1 of 2 items ran: 1 passed, " in said.stdout
    assert "not written, because the run gives no verdict; run every item, or add --allow-part" in said.stderr
    assert not list(tmp_path.glob("*.json"))
    said = judge(*part, "--allow-part")
    assert said.returncode == 0 and "has no verdict on" in said.stdout and not said.stderr, said
    record = json.loads((tmp_path / "v.json").read_text())
    assert (record["verdict"], record["counts"]["not_run"]) == ("has no verdict", 1)
    said = judge(*part, "--allow-part", "--record", str(tmp_path / "r.json"))
    assert said.returncode == 2 and "--allow-part cannot be used with --record" in said.stderr, said


def test_stopped_run_gives_no_verdict(judge: Run, tmp_path: Path) -> None:
    """If the system kills the process or the disk is full, the exit code is 2 and nothing is recorded."""
    for item, words in {
        "numerics.match_float64[killed]": "SIGKILL ended a process of the run during numerics.match_float64[killed]",
        "numerics.match_float64[disk]": "in numerics.match_float64[disk] a file cannot be written (full: unnamed)",
        "numerics.match_float64[memory]": "in numerics.match_float64[memory] memory ran out (MemoryError)",
    }.items():
        said = judge("fake:STOPPED", "--item", item, "--json", str(tmp_path / "verdict.json"))
        assert (
            said.returncode == 2
            and f"fake:STOPPED has no verdict on draftmark contract 1.5, because {words}" in said.stdout
        ), said
        assert not (tmp_path / "verdict.json").exists()


def test_interrupted_run_gives_no_verdict(judge: Run, tmp_path: Path) -> None:
    """Ctrl-C ends the run without a verdict."""
    item = "numerics.match_float64[interrupts]"
    said = judge("fake:STOPPED", "--item", item, "--json", str(tmp_path / "v.json"), apart=True)
    assert said.returncode == 2 and ", because the run was interrupted" in said.stdout, said
    assert not (tmp_path / "v.json").exists()


def test_journal_that_cannot_be_written_gives_no_verdict(judge: Run, tmp_path: Path) -> None:
    """If the journal cannot be written because the disk is full, the run ends; a later run continues it."""
    said = judge("fake:MIXED", "--journal", str(tmp_path / "run.jsonl"), most_bytes=2000)
    assert said.returncode == 2 and "fake:MIXED has no verdict" in said.stdout, said
    assert "cannot be written" in said.stdout and "nothing is recorded" in said.stdout
    said = judge("fake:MIXED", "--journal", str(tmp_path / "run.jsonl"))
    assert said.returncode == 1 and ": 2 passed, 1 refused, 0 declared, 1 unjudged, 4 failed" in said.stdout, said


def test_full_disk_leaves_no_half_file(judge: Run, tmp_path: Path) -> None:
    """If the disk is full, the counts are printed, one sentence names the file, and an earlier file stays unchanged."""
    path = tmp_path / "verdict.json"
    path.write_text("earlier")
    said = judge("fake:RIGHT", "--json", "/dev/full")
    assert said.returncode == 2 and ": 2 passed, " in said.stdout
    assert said.stderr == (
        "draftmark judge: /dev/full was not written: No space left on device; free space there or name another file, "
        "then run again\n"
    )
    said = judge("fake:RIGHT", "--json", str(path), most_bytes=4000)
    assert said.returncode == 2 and path.read_text() == "earlier", said


def test_first_wrong_item_ends_the_run_with_x(judge: Run) -> None:
    """With -x the run ends at the first wrong item, even if that item ends its own process."""
    said = judge("fake:MIXED", "-x")
    assert said.returncode == 1 and ": 1 passed, 0 refused, 0 declared, 0 unjudged, 1 failed" in said.stdout, (
        said.stdout
    )
    said = judge("fake:MIXED", "-x", "-k", "changes_no_live_byte")
    assert said.returncode == 1 and ": 0 passed, 0 refused, 0 declared, 0 unjudged, 1 failed" in said.stdout, (
        said.stdout
    )


def test_record_has_machine_and_fits_the_schema(judge: Run, tmp_path: Path) -> None:
    """Both records have the processor, versions and compilers' variables, and fit the published schema."""
    judge("fake:MIXED", "--json", str(tmp_path / "verdict.json"), "--record", str(tmp_path / "short.json"))
    record, short = (json.loads((tmp_path / name).read_text()) for name in ("verdict.json", "short.json"))
    for one in (record, short):
        jsonschema.Draft202012Validator(json.loads(schema_text())).validate(one)
    assert short["facts"] == record["facts"] and short["checks"]["padding.changes_no_live_byte"] == {"failed": 1}
    assert {"draftmark", "draftmark-contract", "fake-engine"} <= set(record["runs"][0]["versions"])
    assert record["runs"][0]["cpu"]["name"] and record["runs"][0]["environment"] == {"TRITON_FAKE": "1"}


def test_sample_limits_items_per_rule(judge: Run) -> None:
    """`--sample 1` runs one item of each rule, even if the rule has three."""
    said = judge("fake:MIXED", "--sample", "1")
    assert ": 2 passed, 1 refused, 0 declared, 1 unjudged, 2 failed" in said.stdout, said.stdout


def test_list_runs_no_item(judge: Run) -> None:
    """`--list` runs no item, not even one that would end the process."""
    said = judge("fake:MIXED", "--list")
    assert said.returncode == 0 and "padding.changes_no_live_byte[dies]  (rule 26)" in said.stdout
    assert "8 items" in said.stdout


def test_list_names_the_items_that_a_run_would_run(judge: Run) -> None:
    """`--list` selects as a run does, and refuses a selection that a run refuses."""
    said = judge("fake:MIXED", "--list", "-k", "match_float64")
    assert said.returncode == 0 and said.stdout.splitlines()[-1] == "3 items", said.stdout
    assert judge("fake:MIXED", "--list", "--sample", "1").stdout.splitlines()[-1] == "6 items"
    named = judge("fake:MIXED", "--list", "--item", "padding.changes_no_live_byte[dies]").stdout
    assert named.splitlines() == ["padding.changes_no_live_byte[dies]  (rule 26)", "1 item"], named
    for wrong in (("-k", "nothing"), ("--item", "a[b]"), ("-k", "and")):
        assert judge("fake:MIXED", "--list", *wrong).returncode == 2, wrong


def test_class_of_another_package_is_judged_on_any_device(judge: Run) -> None:
    """An engine resolves a class that it does not list, and the class may be judged on any device."""
    said = judge("fake:package.Right", "--device", "mydev:1")
    assert said.returncode == 0 and "2 rules of fake:package.Right conform" in said.stdout, said
    assert "names no backend of an engine" in judge("fake:Unknown").stderr


HANGS = "fake:package.Hangs"
LIMIT_S = 3.0


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Verdict]:
    """Return a function that judges a layer with a limit of 3 s. The layer's first item hangs in native code."""
    from draftmark_contract.judge.layer import opening

    monkeypatch.setattr(pool, "GRACE_S", 0.5)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    info = tmp_path / "fake_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judges]\nfake = fake_engine:ENGINE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from .fake_engine import ENGINE

    opened = opening(ENGINE, "package.Hangs", "cpu", LIMIT_S)
    return lambda: run(HANGS, opened, RunOptions(limit=LIMIT_S), "draftmark judge")


@pytest.mark.long
def test_hang_in_native_code_fails(hanging: Callable[[], Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the time limit does not end is ended; its item fails, and the next item still runs."""
    monkeypatch.setattr(pool, "LIMIT_S", LIMIT_S)
    verdict = hanging()
    assert [one.outcome for one in verdict.results] == [Outcome.FAILED, Outcome.PASSED], verdict
    assert "took longer than 3 s in native code" in verdict.results[0].message and not verdict.error


def test_limit_below_the_default_one_gives_no_verdict(hanging: Callable[[], Verdict]) -> None:
    """An item that a short limit ends is unjudged, and the run has no verdict."""
    verdict = hanging()
    assert [one.outcome for one in verdict.results] == [Outcome.UNJUDGED, Outcome.PASSED]
    assert "longer than the limit of 3 s" in verdict.error and "larger limit" in verdict.results[0].message
    assert verdict.word is Word.NONE and verdict.exit_code() == 2 and not verdict.recorded(allow_part=True)


@pytest.mark.long
def test_short_limit_fails_no_test_of_the_pytest_form(hanging: Callable[[], Verdict]) -> None:
    """The pytest form skips an item that a short limit ends, and says that there is no verdict."""

    class Hangs(ContractTests):
        subject, limit = HANGS, LIMIT_S

    session = Hangs.session()
    try:
        first, second = session.selected()
        with pytest.raises(pytest.skip.Exception, match="unjudged: took longer than the limit of 3 s"):
            Hangs().test_contract(first)
        Hangs().test_contract(second)
        verdict = session.verdict()
    finally:
        session.end()
    assert verdict.word is Word.NONE and verdict.exit_code(allow_part=True) == 2
    assert "larger limit" in verdict.line and "1 passed, 0 refused, 0 declared, 1 unjudged, 0 failed" in verdict.line


@pytest.mark.parametrize(("outcome", "judged"), [(Outcome.FAILED, True), (Outcome.PASSED, False)])
def test_failed_item_gives_a_verdict_whatever_the_limit(outcome: Outcome, judged: bool) -> None:
    """A short limit that leaves one item unjudged takes the verdict only from a run without a failed item."""
    short = pool.Pool(Opening("unopened", {}), LIMIT_S)
    short.late = ["a[late]"]
    reason = short.too_short([Result("a[late]", "host", Outcome.UNJUDGED), Result("b[c]", "host", outcome)])
    assert (reason == "") is judged, reason


def of_layer(items: Iterable[str]) -> judging.Suite:
    """Return the suite of a layer with these items."""
    opened = Opened("fake:RIGHT", Kind.LAYER, "draftmark judge fake:RIGHT")
    return judging.Suite(opened, [Listed(item, Tier.HOST) for item in items])


def test_comparison_sorts_every_change() -> None:
    """A new fault or a lost item is worse, a corrected or newly served item is better; selected runs lose no item."""
    before = dict.fromkeys(("a[1]", "a[2]", "b[1]"), "passed")
    before |= {"b[2]": "failed", "b[3]": "failed", "c[1]": "refused"}
    now = {"a[1]": "passed", "a[2]": "failed", "b[2]": "passed", "b[3]": "refused", "c[1]": "passed", "d[1]": "failed"}
    results = [Result(item, "host", Outcome(outcome)) for item, outcome in now.items()]
    earlier = Earlier("old.json", "fake 1.0", before)
    found = compare(judging.judge(of_layer(now), results), earlier)
    worse = {"a[2]": "passed", "b[1]": "passed", "d[1]": "not run"}
    assert {item: one[0] for item, one in found.worse.items()} == worse
    assert set(found.better) == {"b[2]", "b[3]", "c[1]"} and found.still_failing == ()
    part = compare(judging.judge(of_layer([*now, "e[1]"]), results), earlier)
    assert set(part.worse) == {"a[2]", "d[1]"}


@pytest.mark.long
def test_against_reports_what_became_better_or_worse(judge: Run, tmp_path: Path) -> None:
    """Only an item that became worse gives exit code 1; the JSON has every change and fits the schema."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    judge("fake:MIXED", "--json", str(old))
    said = judge("fake:MIXED", "--against", str(old))
    assert said.returncode == 0 and "0 items worse, 0 better, 4 still failing" in said.stdout, said.stdout

    record = json.loads(old.read_text())
    now = {"numerics.match_float64[decode]": "failed", "repeats.give_the_same_bits[raises]": "passed"}
    now["graphs.replay_equals_eager[decode]"] = "passed"
    for row in record["results"]:
        row["outcome"] = now.get(row["item"], row["outcome"])
    old.write_text(json.dumps(record))
    said = judge("fake:MIXED", "--against", str(old), "--json", str(new))
    assert said.returncode == 1 and "2 items worse, 1 better, 3 still failing" in said.stdout, said.stdout
    assert "worse: repeats.give_the_same_bits[raises]: passed → failed" in said.stdout
    written = json.loads(new.read_text())
    jsonschema.Draft202012Validator(json.loads(schema_text())).validate(written)
    change = {"item": "numerics.match_float64[decode]", "before": "failed", "after": "passed"}
    assert written["against"]["better"] == [change]
    some = judge("fake:MIXED", "--against", str(old), "-k", "match_float64")
    assert some.returncode == 0 and "0 items worse, 1 better, 2 still failing" in some.stdout, some.stdout


def test_against_needs_a_verdict_of_the_same_target(judge: Run, tmp_path: Path) -> None:
    """Before anything runs, a file that is no verdict of the target is rejected."""
    path = tmp_path / "old.json"
    assert "is no verdict with every item" in judge("fake:RIGHT", "--against", str(path)).stderr
    judge("fake:RIGHT", "--json", str(path))
    said = judge("fake:MIXED", "--against", str(path))
    assert said.returncode == 2 and "judges fake:RIGHT, not fake:MIXED" in said.stderr, said.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fake",), "names no backend of an engine; fake has RIGHT, MIXED, BROKEN, EMPTY, STOPPED, ABSENT"),
        (("fake:RIHGT",), "did you mean fake:RIGHT?"),
        (("other:X",), "'other:X' names no engine; there are"),
        (("fake:ABSENT",), "needs packages that are not installed: pip install no-such-module"),
        (("fake:RIGHT", "--device", "npu"), "can be judged on cpu, cuda"),
        (("fake:RIGHT", "--item", "numerics.match_float64[decod]"), "close to it are numerics.match_float64[decode]"),
        (("fake:RIGHT", "--sample", "-1"), "--sample is -1, but it must be 0 or more"),
        (("fake:RIGHT", "-k", "nothing"), "-k 'nothing' selects no item"),
        (("fake:RIGHT", "--json", "no/such/folder/file"), "lies in a folder that does not exist"),
        (("--json", "verdict.json"), "--json needs a target, e.g. vllm:TRITON_ATTN"),
        (("-k", "graphs"), "-k needs a target"),
        (("fake:RIGHT", "--html", "no/such/folder/file"), "lies in a folder that does not exist"),
    ],
)
def test_wrong_arguments_exit_with_2(judge: Run, arguments: tuple[str, ...], sentence: str) -> None:
    """A wrong argument exits with 2 and one sentence that contains the remedy."""
    said = judge(*arguments)
    assert said.returncode == 2 and sentence in said.stderr, said.stderr


def test_backend_that_does_not_open_has_no_verdict(judge: Run, tmp_path: Path) -> None:
    """If a backend does not open, the command prints the engine's reason once, exits with 2 and records nothing."""
    said = judge("fake:BROKEN", "--json", str(tmp_path / "v.json"))
    assert said.returncode == 2 and not (tmp_path / "v.json").exists()
    assert said.stdout == (
        "fake:BROKEN has no verdict on draftmark contract 1.5, because its library cannot be loaded; reinstall it: "
        "nothing is recorded\n"
    )


def test_older_verdicts_are_compared(judge: Run, tmp_path: Path) -> None:
    """A verdict with the judge's older words (right, wrong and so on) can still be compared."""
    old = tmp_path / "old.json"
    words = {"numerics.match_float64[decode]": "wrong", "history.equals_a_fresh_state[shrinks]": "right"}
    rows = [{"item": item, "outcome": outcome, "message": "", "seconds": 0.1} for item, outcome in words.items()]
    record = {"schema": 1, "target": "fake:RIGHT", "facts": {"engine": "fake 0.9"}, "machine": {"date": "2026-01-01"}}
    old.write_text(json.dumps({**record, "results": rows}))
    said = judge("fake:RIGHT", "--against", str(old))
    assert said.returncode == 0 and "(fake 0.9, 2026-01-01): 0 items worse, 1 better, 0 still" in said.stdout, said
    assert "better: numerics.match_float64[decode]: failed → passed" in said.stdout
