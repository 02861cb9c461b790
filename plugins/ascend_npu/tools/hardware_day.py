"""Runs every test and benchmark for a first day with an Ascend NPU, and packs the results into one file.

python plugins/ascend_npu/tools/hardware_day.py --out npu-hardware-day              # on an NPU, after CANN's set_env.sh
python plugins/ascend_npu/tools/hardware_day.py --out rehearsal --rehearse          # a small run on the emulator

Each step runs in its own process. The next step runs even if one fails; HARDWARE.md explains failures. Exit code 0:
every step passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from draftmark_ascend_npu.device import machine, require_hardware
from draftmark_ascend_npu.switches import FUSED, HOST_WAIT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROMPTS = ROOT / "examples" / "prompts" / "demo.txt"
DRAFTS = {"plain": "none", "ngram": "ngram", "eagle": "eagle"}


@dataclass
class Step:
    """Describes one process that the program runs.

    Attributes:
        name: name of the step and of its log.
        command: arguments, beginning with this process's Python.
        environment: additional environment variables.
        on_failure: steps that run after a failure to find the cause, such as the step with a switch.
        hardware: true if the step is useless on the emulator.
    """

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    on_failure: list[Step] = field(default_factory=list)
    hardware: bool = False


def steps(out: Path, rehearse: bool) -> list[Step]:
    """Return the steps in an order in which an earlier failure explains later ones."""
    python, cli = [sys.executable, "-W", "ignore"], [sys.executable, "-W", "ignore", "-m", "draftmark_tools.cli"]
    tests = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    sample = ["--sample", "2", "--allow-part"] if rehearse else []
    contract = [*cli, "contract", "ascend_npu", "--tier", "device", "--device", "npu", *sample]
    contract += ["--journal", str(out / "contract.jsonl"), "--json", str(out / "contract.json")]
    return [
        Step("doctor", [*cli, "doctor", "ascend_npu"]),
        Step("operators", [*tests, str(HERE.parent / "tests" / "test_operators.py")]),
        Step("forwards", [*tests, str(HERE.parent / "tests" / "test_shapes.py"), "-k", "every_forward"]),
        Step("graphs", [*tests, str(HERE.parent / "tests" / "test_graph.py")]),
        *_generations(cli, rehearse),
        Step("contract", contract),
        Step("tests", [*tests, str(HERE.parent / "tests")], hardware=True),
        Step(
            "benchmark",
            [*python, str(HERE.parent / "benchmarks" / "attention.py"), "--json", str(out / "attention.json")],
            hardware=True,
        ),
    ]


def _generations(cli: list[str], rehearse: bool) -> list[Step]:
    """Return steps that decode with SmolLM2-135M and each kind of drafts. Failed captured runs repeat with switches."""
    base = [*cli, "generate", "--backend", "ascend_npu", "--device", "npu", "--dtype", "float16", "--page-size", "128"]
    base += ["--prompts", str(PROMPTS), "--max-new-tokens", "8" if rehearse else "64", "--max-num-reqs", "4", "--check"]
    found = []
    for name, speculate in DRAFTS.items():
        eager = [*base, "--speculate", speculate]
        found.append(Step(f"smollm2-{name}", eager))
        found.append(_captured(f"smollm2-{name}-graph", [*eager, "--graph"]))
    found.append(_captured("smollm2-eagle-graph-overlap", [*base, "--speculate", "eagle", "--graph", "--overlap"]))
    return found


def _captured(name: str, command: list[str]) -> Step:
    waits = Step(f"{name}-host-wait", command, {HOST_WAIT: "1"})
    return Step(name, command, on_failure=[waits, Step(f"{name}-fused-v2", command, {FUSED: "v2"})])


def run(step: Step, out: Path) -> dict[str, object]:
    """Run one step and write its output to ``NAME.log``."""
    start = time.monotonic()
    with (out / f"{step.name}.log").open("w", encoding="utf-8") as log:
        log.write(f"$ {' '.join(step.command)}\n{step.environment or ''}\n\n")
        log.flush()
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **step.environment}
        code = subprocess.run(
            step.command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    return {"step": step.name, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}


def run_all(todo: list[Step], out: Path, emulated: bool, say: Callable[[str], None] = print) -> list[dict[str, object]]:
    """Run every step, also after a failure, and skip hardware steps on the emulator."""
    rows: list[dict[str, object]] = []
    queue = list(todo)
    while queue:
        step = queue.pop(0)
        if step.hardware and emulated:
            rows.append({"step": step.name, "exit_code": None, "seconds": 0.0})
            say(f"{step.name:<40} not on the emulator")
            continue
        rows.append(run(step, out))
        failed = rows[-1]["exit_code"] != 0
        say(f"{step.name:<40} {'FAILED' if failed else 'passed'} {rows[-1]['seconds']} s")
        queue = [*step.on_failure, *queue] if failed else queue
    return rows


def describe(out: Path) -> dict[str, object]:
    """Return the facts about this machine and its software that the result file contains."""
    from verdict import versions

    names = ("ASCEND", "DRAFTMARK", "TASK_QUEUE", "TORCH_", "PYTORCH_", "LD_LIBRARY_PATH")
    record: dict[str, object] = {"device": machine().stamp(), "machine": machine().record(), "versions": versions()}
    record["environment"] = {name: value for name, value in os.environ.items() if name.startswith(names)}
    if tool := shutil.which("npu-smi"):
        output = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=60, check=False)
        (out / "npu-smi.txt").write_text(output.stdout + output.stderr, encoding="utf-8")
    return record


def bundle(out: Path) -> Path:
    """Pack the folder of logs and results into one archive next to it, and return the archive's path."""
    file = out.with_suffix(".tar.gz")
    with tarfile.open(file, "w:gz") as archive:
        archive.add(out, arcname=out.name)
    return file


def main() -> int:
    """Run all steps, or the rehearsal on the emulator, and pack the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("npu-hardware-day"), help="a folder; FOLDER.tar.gz is written next to it"
    )
    parser.add_argument("--rehearse", action="store_true", help="run fewer cases, on the emulator or on a device")
    parser.add_argument("--steps", help="names of steps, comma-separated; default: all")
    args = parser.parse_args()
    if not args.rehearse:
        require_hardware("the hardware day")
    args.out.mkdir(parents=True, exist_ok=True)
    record = describe(args.out)
    print(f"device: {record['device']}", flush=True)
    wanted = args.steps.split(",") if args.steps else None
    todo = [step for step in steps(args.out.resolve(), args.rehearse) if wanted is None or step.name in wanted]
    record["steps"] = run_all(todo, args.out, machine().emulated, lambda line: print(line, flush=True))
    (args.out / "summary.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{record['device']}: send back {bundle(args.out)}")
    return int(any(row["exit_code"] for row in record["steps"]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
