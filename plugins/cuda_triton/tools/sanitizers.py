"""Run compute-sanitizer over random batches of every shape of the device tests, on a GPU.

    python -m plugins.cuda_triton.tools.sanitizers OUT

Each tool (memcheck, racecheck) runs the random batches of `tests/test_decode_verify_device.py` and
`tests/test_prefill_fp8.py`. Several processes run at once, and each has a part of the shapes. OUT receives a log of
each process and `sanitizers.json`. For each tool it lists the shapes that passed, failed or did not end in time, the
exit codes, and the number of reports of each kind. Exit code 0 means that every shape passed under every tool, no tool
reported anything, and every process ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TESTS = tuple(
    f"plugins/cuda_triton/tests/{name}.py::test_random_batches"
    for name in ("test_decode_verify_device", "test_prefill_fp8")
)
REPORTED = 86
"""Exit code of a process in which a tool has reported something."""
TOOL_LINE = re.compile(r"(?<!=)={9}(?: (.*))?$")
"""Output of a tool, possibly after a test's name in the same line. A report ends with an empty line of this form.

pytest's own rules consist of more than nine equals signs.
"""
VARYING = re.compile(r"\+0x[0-9a-f]+|\[\d+ hazards?\]")
"""Parts in which two reports of one kind differ: the offset of the instruction, and the number of hazards."""
HEADERS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")
"""Starts of the tool's lines that belong to no report."""
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""Tools with their options. API errors are no errors of a kernel: torch and Triton make driver calls that may fail."""
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
"""Outcomes that pytest prints after a test's name."""


def main() -> int:
    """Run the selected tools, one after the other, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS))
    parser.add_argument("--batches", type=int, default=3, help="random batches of each shape")
    parser.add_argument("--every", type=int, default=1, help="run only every n-th shape")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes of a tool")
    parser.add_argument("--seconds", type=float, default=1800, help="time limit of a tool; its processes then end")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    args.out.mkdir(parents=True, exist_ok=True)
    shapes = _shapes()[:: args.every]
    found = {}
    for tool in args.tools:
        found[tool] = _run(tool, shapes, args)
        (args.out / "sanitizers.json").write_text(json.dumps(found, indent=1) + "\n")
        left = len(shapes) - len(found[tool]["passed"])
        print(f"{tool}: {len(shapes)} shapes, {left} not passed, reports: {found[tool]['reports']}", flush=True)
    return 0 if all(len(one["passed"]) == len(shapes) and _clean(one) for one in found.values()) else 1


def _clean(found: dict[str, Any]) -> bool:
    """Return True if no report was parsed, and no process ended with an error or with the exit code REPORTED."""
    return not found["reports"] and not any(found["exit_codes"])


def _shapes() -> list[str]:
    """Return the pytest ids of the tests, one for each shape."""
    call = [sys.executable, "-m", "pytest", "-q", "--collect-only", *TESTS]
    output = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if line.startswith(TESTS)]


def _run(tool: str, shapes: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run one tool over all shapes in `args.workers` processes, and return its entry of sanitizers.json."""
    environment = os.environ | {"DRAFTMARK_BATCHES": str(args.batches)}
    if tool == "memcheck":
        # With torch's memory cache, a read after the end of a tensor would hit memory that torch still owns, unnoticed.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    until, processes, logs = time.monotonic() + args.seconds, [], []
    for number in range(min(args.workers, len(shapes))):
        call = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--error-exitcode", str(REPORTED)]
        call += [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        call += shapes[number :: args.workers]
        logs.append(args.out / f"{tool}-{number}.log")
        with logs[-1].open("wb") as log:
            processes.append(
                subprocess.Popen(call, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # kills the tool and the pytest process that it runs
                process.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    outputs = [without_reports(text) for text in texts]
    ended = {
        outcome: [shape for shape in shapes if any(f"{shape} {outcome}" in text for text in outputs)]
        for outcome in OUTCOMES
    }
    return {
        "passed": ended["PASSED"],
        "failed": ended["FAILED"] + ended["ERROR"],
        "not_ended": [shape for shape in shapes if not any(shape in named for named in ended.values())],
        "exit_codes": [process.returncode for process in processes],
        "reports": dict(sum((reports(text) for text in texts), Counter())),
    }


def reports(log: str) -> Counter[str]:
    """Count the reports of a log by kind. A kind is a report's first two lines and the further accesses of a race."""
    found: Counter[str] = Counter()
    block: list[str] = []
    for line in [*log.splitlines(), ""]:
        match = TOOL_LINE.search(line)
        text = " ".join(VARYING.sub("", match[1] or "").split()) if match else ""
        if text and not text.startswith(HEADERS):
            block.append(text)
        elif not text and block:
            kind = [*block[:2], *(more for more in block[2:] if more.startswith("and "))]
            found[" | ".join(dict.fromkeys(kind))] += 1
            block = []
    return found


def without_reports(log: str) -> str:
    """Return pytest's output without the tool's reports, which can split the line of a test."""
    return re.sub(rf"{TOOL_LINE.pattern}\n?", "", log, flags=re.MULTILINE)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # exits through the finally block of _run
    sys.exit(main())
