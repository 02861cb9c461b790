"""python -m plugins.cuda_triton.tools.sanitizers OUT: compute-sanitizer over random batches of every shape, on a GPU.

Each tool (memcheck, racecheck) runs the random batches of `tests/test_decode_verify_device.py` and
`tests/test_prefill_fp8.py` in several processes, a part of the shapes in each. OUT holds a log of each process and
`sanitizers.json`: which shapes passed under which tool, which did not end in time, and what was reported, each kind
once with how often. Nothing is excused: exit code 0 says that every shape passed under every tool, that none reported
anything, and that every process ended well.
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
SAYS = re.compile(r"(?<!=)={9}(?: (.*))?$")
"""What a tool says: the rest of a line, behind a test's name where that stands before it. pytest's rules are longer. A
report is several lines, up to one that says nothing.
"""
WHERE = re.compile(r"\+0x[0-9a-f]+|\[\d+ hazards?\]")
"""What differs between two reports of one kind: the instruction, behind which stands its line, and how often."""
ABOUT_ITSELF = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY")
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""And their options: torch and Triton ask the driver for what it may not have, which is no error of a kernel."""
HOWS = ("PASSED", "FAILED", "ERROR", "SKIPPED")
"""What pytest says behind a test's name."""


def main() -> int:
    """Run what is asked, one tool after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS))
    parser.add_argument("--batches", type=int, default=3, help="of each shape")
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth shape")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes of a tool")
    parser.add_argument("--seconds", type=float, default=1800, help="of a tool, whose processes are ended then")
    asked = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    asked.out.mkdir(parents=True, exist_ok=True)
    shapes = _shapes()[:: asked.every]
    found = {}
    for tool in asked.tools:
        found[tool] = _run(tool, shapes, asked)
        (asked.out / "sanitizers.json").write_text(json.dumps(found, indent=1) + "\n")
        left = len(shapes) - len(found[tool]["passed"])
        print(f"{tool}: {len(shapes)} shapes, {left} of them not passed, reports: {found[tool]['reports']}", flush=True)
    return 0 if all(len(one["passed"]) == len(shapes) and _clean(one) for one in found.values()) else 1


def _clean(found: dict[str, Any]) -> bool:
    """By a tool's own word too: a report that is worded as none of `reports` ends its process with REPORTED."""
    return not found["reports"] and not any(found["exit_codes"])


def _shapes() -> list[str]:
    """The ids of the tests, one a shape."""
    call = [sys.executable, "-m", "pytest", "-q", "--collect-only", *TESTS]
    said = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if line.startswith(TESTS)]


def _run(tool: str, shapes: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """One tool, over all shapes, in as many processes as there may be."""
    environment = os.environ | {"DRAFTMARK_BATCHES": str(asked.batches)}
    if tool == "memcheck":  # where torch keeps what was freed, a read behind a tensor's end is one of torch's memory
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    until, processes, logs = time.monotonic() + asked.seconds, [], []
    for number in range(min(asked.workers, len(shapes))):
        call = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--error-exitcode", str(REPORTED)]
        call += [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        call += shapes[number :: asked.workers]
        logs.append(asked.out / f"{tool}-{number}.log")
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
                os.killpg(process.pid, signal.SIGKILL)  # what it runs under the tool too
                process.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    said = [without_reports(text) for text in texts]
    ended = {how: [shape for shape in shapes if any(f"{shape} {how}" in text for text in said)] for how in HOWS}
    return {
        "passed": ended["PASSED"],
        "failed": ended["FAILED"] + ended["ERROR"],
        "not_ended": [shape for shape in shapes if not any(shape in named for named in ended.values())],
        "exit_codes": [process.returncode for process in processes],
        "reports": dict(sum((reports(text) for text in texts), Counter())),
    }


def reports(log: str) -> Counter[str]:
    """What a tool reported, by the first two lines of each report, and further accesses of a race."""
    found: Counter[str] = Counter()
    block: list[str] = []
    for line in [*log.splitlines(), ""]:
        says = SAYS.search(line)
        told = " ".join(WHERE.sub("", says[1] or "").split()) if says else ""
        if told and not told.startswith(ABOUT_ITSELF):
            block.append(told)
        elif not told and block:
            kind = [*block[:2], *(more for more in block[2:] if more.startswith("and "))]
            found[" | ".join(dict.fromkeys(kind))] += 1
            block = []
    return found


def without_reports(log: str) -> str:
    """What pytest said, whose line of a test a report may have cut in two."""
    return re.sub(rf"{SAYS.pattern}\n?", "", log, flags=re.MULTILINE)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of what ends the processes
    sys.exit(main())
