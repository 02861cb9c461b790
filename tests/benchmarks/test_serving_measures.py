"""Tests of the serving benchmark: workloads, measures, and compilations that a server logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.client import ServerError, body, tokens_so_far
from benchmarks.serving.compilations import HOOK, OURS, Mark, Watch
from benchmarks.serving.measures import mean_of_longest, measured, percentile
from benchmarks.serving.servers import Server, options
from benchmarks.serving.stalls import by_mode, stalls, with_seconds
from benchmarks.serving.workload import FIRST_ID, PERIOD, draw
from tests.benchmarks.small_cases import WORKLOAD


def test_workload_is_reproducible() -> None:
    """The same seed gives the same requests, another seed gives others."""
    assert draw(WORKLOAD, 512) == draw(WORKLOAD, 512) != draw(replace(WORKLOAD, seed=2), 512)


def test_requests_are_within_their_limits() -> None:
    """Arrivals increase with the given mean; lengths and token ids are in their ranges and log-uniform."""
    requests = draw(WORKLOAD, 512)
    arrivals = [one.at_s for one in requests]
    assert arrivals == sorted(arrivals) and 0.7 < arrivals[-1] / (WORKLOAD.gap_s * len(requests)) < 1.3
    lengths = sorted(len(one.prompt) for one in requests)
    assert lengths[0] >= 50 and lengths[-1] <= 900
    assert 150 < lengths[100] < 300, "the median of a log-uniform length is the geometric mean of its limits"
    assert all(8 <= one.new_tokens <= 16 for one in requests)
    assert {token for one in requests for token in one.prompt} <= set(range(FIRST_ID, 512))


def test_repetitive_prompt_repeats_its_first_tokens() -> None:
    """A repetitive prompt has period `PERIOD`, and only there new tokens are restricted to those of the prompt."""
    requests = draw(WORKLOAD, 1 << 20)
    kinds = {one.repeats: one for one in requests if len(one.prompt) > 2 * PERIOD}
    assert all((one.prompt[PERIOD:] == one.prompt[:-PERIOD]) == one.repeats for one in kinds.values())
    assert set(body(kinds[True], True)["allowed_token_ids"]) == set(kinds[True].prompt)
    assert "allowed_token_ids" not in body(kinds[False], True) and "allowed_token_ids" not in body(kinds[True], False)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.99, 10), (1.0, 10)])
def test_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    """A percentile is a value that occurred: the smallest that the share of all values does not exceed."""
    assert percentile(range(10, 0, -1), share) == value


def test_mean_of_the_longest_values() -> None:
    """The mean of the largest 1 % of the values is returned; of fewer than 100 values, the largest one."""
    assert mean_of_longest(range(300)) == 298 and mean_of_longest([2.0, 5.0]) == 5.0


def an_answer(at_s: float, chunks: list[tuple[float, int]], **more: Any) -> dict[str, Any]:
    """Return a client's answer to a request of 100 prompt tokens and 4 new ones."""
    return {"at_s": at_s, "prompt_tokens": 100, "new_tokens": 4, "chunks": chunks, **more}


def test_measures_of_two_answers() -> None:
    """A time to first token starts at the arrival; the worst step is the longest time between two chunks."""
    found = measured([an_answer(1.0, [(1.5, 1), (1.6, 4)]), an_answer(2.0, [(2.1, 2), (2.9, 3), (3.0, 4)])])
    assert found == {
        "requests": 2, "failed": 0, "prompt_tokens": 200, "tokens": 8, "seconds": 2.0, "tokens_per_s": 4.0,
        "tokens_per_chunk": 1.6, "first_token_p50_ms": 100.0, "first_token_p99_ms": 500.0,
        "first_token_worst_ms": 500.0, "between_p50_ms": 100.0, "between_p99_ms": 800.0, "between_worst_ms": 800.0,
        "between_longest_ms": 800.0,
    }  # fmt: skip


def test_failed_and_short_answers_are_not_measured() -> None:
    """An answer that failed or lacks tokens is counted with its reason, and its tokens count for nothing."""
    good = an_answer(0.0, [(1.0, 4)])
    bad = [an_answer(0.0, [(9.0, 4)], failed="ServerError: gone"), an_answer(0.0, [(9.0, 3)]), an_answer(0.0, [])]
    found = measured([good, *bad])
    assert found["failed"] == 3 and found["why"] == "ServerError: gone" and found["tokens"] == 4 == found["seconds"] * 4
    assert measured(bad[1:]) == {"requests": 2, "failed": 2, "why": "an answer has fewer tokens than requested"}


def test_lines_of_an_event_stream() -> None:
    """Only an event with a usage counts tokens; an event with an error raises."""
    event = {"choices": [{"text": "t3"}], "usage": {"completion_tokens": 7}}
    assert tokens_so_far(f"data: {json.dumps(event)}\n".encode()) == 7
    assert [tokens_so_far(line) for line in (b"\n", b": ping\n", b"data: [DONE]\n", b'data: {"usage": null}\n')] == [
        0
    ] * 4
    with pytest.raises(ServerError, match="engine is dead"):
        tokens_so_far(b'data: {"error": {"message": "engine is dead"}}\n')


def test_options_of_a_command_line() -> None:
    """Booleans are options without a value, dicts are JSON, lists are several words, and None is left out."""
    given = {"a_b": True, "c": False, "d": {"e": 1}, "f": 2, "g": None, "h": [3, 4]}
    assert options(given) == ["--a-b", "--no-c", "--d", '{"e": 1}', "--f", "2", "--h", "3", "4"]


def a_watch(folder: Path) -> Watch:
    """Return a watch of an existing folder of caches."""
    (folder / "caches").mkdir()
    return Watch(folder / "events", folder / "log", folder / "caches")


def test_compilations_after_a_mark(tmp_path: Path) -> None:
    """Events, libraries and log lines before a mark do not count; those after it do."""
    watch = a_watch(tmp_path)
    line = json.dumps({"kernel": "attend", "module": "m", "loaded": False, "ms": 1500.0}) + "\n"
    watch.events.write_text(line)
    (watch.caches / "old.so").touch()
    mark = watch.mark()
    assert watch.since(mark)["compiled"] == watch.since(mark)["libraries"] == 0
    with watch.events.open("a") as file:
        file.write(2 * line + line.replace("false", "true"))
    watch.log.write_text(f"WARNING Triton kernel JIT compilation during inference: attend. x\nkernel attend {OURS}\n")
    (watch.caches / "new.so").touch()
    assert watch.since(mark) == {
        "compiled": 2, "compile_s": 3.0, "loaded": 1, "libraries": 1, "monitor": 1, "warned": 1,
        "kernels": ["attend x2"],
    }  # fmt: skip


def test_builds_after_a_mark(tmp_path: Path) -> None:
    """The builders' times after a mark are counted by the kind of step; an engine without them has no such field."""
    watch = a_watch(tmp_path)
    assert "builds" not in watch.since(watch.mark())
    watch.builds.write_text('[["mixed", 9.0]]\n')
    mark = watch.mark()
    with watch.builds.open("a") as file:
        file.write('[["mixed", 3.0], ["decode", 1.0]]\n[["mixed", 5.0], ["mixed", 4.0]]\n')
    assert watch.since(mark)["builds"] == {"decode": [1, 1.0, 1.0], "mixed": [3, 4.0, 5.0]}


BUILDER = """
class DraftmarkBuilder:
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata.num_reqs
"""
BUILDS_OFTEN = """
from types import SimpleNamespace
from draftmark_vllm.builder import DraftmarkBuilder
steps = [(4, 5), (4, 300), (1, 300), (1, 1)] * 17
for reqs, rows in steps:
    step = SimpleNamespace(num_reqs=reqs, max_query_len=rows)
    assert DraftmarkBuilder().build(common_prefix_len=0, common_attn_metadata=step) == reqs
"""


def test_hook_times_builds_by_the_kind_of_step(tmp_path: Path) -> None:
    """Builds of a step with decodes, with prompts or with both are counted separately. A line has 32 builds."""
    watch = a_watch(tmp_path)
    (tmp_path / "draftmark_vllm").mkdir()
    for name, text in (("__init__.py", ""), ("builder.py", BUILDER)):
        (tmp_path / "draftmark_vllm" / name).write_text(text)
    variables = Server("vllm", "CUSTOM:cuda_triton").variables(watch.caches, HOOK) | watch.environment
    variables["PYTHONPATH"] = os.pathsep.join((str(HOOK), str(tmp_path)))
    subprocess.run([sys.executable, "-c", BUILDS_OFTEN], env=variables, check=True)
    found = watch.since(Mark())["builds"]
    assert {kind: count for kind, (count, *_) in found.items()} == {"decode": 32, "mixed": 16, "prompt": 16}
    assert all(0 < half <= most for _, half, most in found.values())


def a_step(mode: str, rows: int, began: float, ended: float) -> dict[str, Any]:
    """Return a step of SGLang's scheduler, as the hook writes it."""
    return {"mode": mode, "reqs": 2, "rows": rows, "began": began, "ended": ended, "host_ms": 1.0}


def test_stall_has_the_steps_and_compilations_that_it_waited_for() -> None:
    """Requests that wait for the same step are one stall; short waits and earlier steps are left out."""
    answers = [
        an_answer(0.0, [(1.0, 1), (1.01, 2), (1.4, 4)], zero_unix_s=1000.0),
        an_answer(0.5, [(1.1, 1), (1.405, 4)], zero_unix_s=1000.0),
        an_answer(0.6, [(2.0, 1), (2.1, 4)], zero_unix_s=1000.0),
    ]
    steps = [
        a_step("DECODE", 2, 1000.9, 1001.0), a_step("EXTEND", 300, 1001.0, 1001.1),
        a_step("EXTEND", 500, 1001.05, 1001.38), a_step("DECODE", 2, 1001.2, 1001.39),
    ]  # fmt: skip
    compiled = [{"at": 1001.3, "ms": 120.0}, {"at": 1002.5, "ms": 99.0}]
    first, second = stalls(answers, with_seconds(steps), compiled)
    assert first == {
        "at_s": 1.01, "ms": 390.0, "requests": 2, "compiled_ms": 120.0,
        "steps": {"EXTEND": [2, 800, 0.38], "DECODE": [1, 2, 0.01]},
    }  # fmt: skip
    assert (second["at_s"], second["requests"], second["compiled_ms"], second["steps"]) == (2.0, 1, 0.0, {})
    assert by_mode(with_seconds(steps[:2])) == {"DECODE": [1, 2, 0.1], "EXTEND": [1, 300, 0.1]}


SCHEDULER = """
class Scheduler:
    def run_batch(self, batch):
        return batch.reqs
    def process_batch_result(self, batch, result):
        assert result == batch.reqs
"""
RUNS_STEPS = """
from types import SimpleNamespace
from sglang.srt.managers.scheduler import Scheduler
ran, scheduler = [], Scheduler()
for name, rows in (("EXTEND", 700), ("DECODE", None), ("DECODE", None)):
    mode = SimpleNamespace(name=name, is_extend=lambda: name == "EXTEND")
    batch = SimpleNamespace(reqs=[1, 2], forward_mode=mode, extend_num_tokens=rows)
    ran.append((batch, scheduler.run_batch(batch)))
    if len(ran) > 1:
        scheduler.process_batch_result(*ran.pop(0))
"""


def test_hook_times_the_steps_of_a_scheduler(tmp_path: Path) -> None:
    """A step is written when its result was processed, with its mode and rows, also if the next one began before."""
    watch = a_watch(tmp_path)
    folder = tmp_path
    for name in ("sglang", "srt", "managers"):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "scheduler.py").write_text(SCHEDULER)
    variables = Server("vllm", "CUSTOM:cuda_triton").variables(watch.caches, HOOK) | watch.environment
    variables["PYTHONPATH"] = os.pathsep.join((str(HOOK), str(tmp_path)))
    subprocess.run([sys.executable, "-c", RUNS_STEPS], env=variables, check=True)
    steps = watch.steps_since(Mark())
    assert [(one["mode"], one["reqs"], one["rows"]) for one in steps] == [("EXTEND", 2, 700), ("DECODE", 2, 2)]
    assert all(one["began"] <= one["ended"] for one in steps)


COMPILES = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def store_one(out_ptr):
    tl.store(out_ptr, 1)

for _ in range(2):
    triton.compile(ASTSource(store_one, {"out_ptr": "*i32"}), target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.long
def test_hook_counts_a_process_that_compiles(tmp_path: Path) -> None:
    """A process with the hook on its path reports a compiled kernel, then the same kernel as loaded."""
    watch = a_watch(tmp_path)
    (tmp_path / "compiles.py").write_text(COMPILES)
    variables = Server("vllm", "CUSTOM:cuda_triton").variables(watch.caches, HOOK) | watch.environment
    subprocess.run([sys.executable, str(tmp_path / "compiles.py")], env=variables, check=True)
    found = watch.since(Mark())
    assert found["compiled"] == found["loaded"] == 1 and found["compile_s"] > 0 and found["kernels"] == ["store_one x1"]
    assert list(watch.caches.glob("home/.triton/cache/*/store_one.json")), "the kernel lies in the server's own folder"


def test_hook_runs_the_module_that_it_hides(tmp_path: Path) -> None:
    """Another `sitecustomize` on the path still runs."""
    (tmp_path / "sitecustomize.py").write_text("print('hidden module runs')\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(HOOK), str(tmp_path)]), **a_watch(tmp_path).environment}
    done = subprocess.run([sys.executable, "-c", ""], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "hidden module runs\n"


def test_hook_keeps_an_unused_module_whose_import_fails(tmp_path: Path) -> None:
    """A listed module that raises at import has any name, as an empty class; an unlisted one still raises."""
    for name in ("unused", "used"):
        (tmp_path / f"{name}.py").write_text("KEPT = 1\nraise ImportError('no library')\n")
    code = "import unused; assert unused.KEPT == 1 and isinstance(unused.Other, type)\nimport used"
    paths = os.pathsep.join([str(HOOK), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": paths, "DRAFTMARK_COMPILATIONS": str(tmp_path / "events")}
    environment |= {"DRAFTMARK_UNUSED_MODULES": "unused"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "/used.py" in ran.stderr and ran.stderr.strip().endswith("ImportError: no library")
