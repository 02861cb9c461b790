"""python -m benchmarks.vllm PLAN.json --out RESULT.json: run the engines of a plan, one after the other.

A plan is ``{"equality": [{"ours": ENGINE, "theirs": ENGINE}, …], "throughput": [{"engine": ENGINE, "cases": [CASE, …]},
…]}``, with fields of `engines.Engine` and `throughput.Case`.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from .engines import Engine, apart, say
from .equality import compare, texts
from .throughput import Case, measure

PACKAGES = ("vllm", "torch", "triton", "transformers", "draftmark", "draftmark-vllm", "draftmark-cuda-triton")


def main() -> None:
    """Run a plan; what is left when `--seconds` are over is named as not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "draftmark-vllm-models"))
    parser.add_argument("--seconds", type=float, default=3600, help="start no engine after as many")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    plan, result = json.loads(asked.plan.read_text()), _head()
    import vllm  # noqa: F401  # once, before the processes are forked

    for pair in plan.get("equality", ()):
        if time.monotonic() < until:
            row = _equality(Engine(**pair["ours"]), Engine(**pair["theirs"]), asked.models)
            result["equality"].append(row)
            say(row)
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
    for one in plan.get("throughput", ()):
        engine = Engine(**one["engine"])
        if time.monotonic() > until:
            result["not_run"].append(one)
            continue
        found = apart(measure([Case(**case) for case in one["cases"]]), engine, asked.models)
        for row in found if isinstance(found, list) else [found]:
            result["rows" if "phase" in row else "failed"].append(row)
            say(row)
        result["device"] = result["device"] or _device()
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


def _equality(ours: Engine, theirs: Engine, models: Path) -> dict[str, Any]:
    about = {
        "ours": ours.backend,
        "theirs": theirs.backend,
        "dtype": ours.dtype,
        "page_size": ours.page_size,
        "drafts": ours.drafts,
        "eager": ours.eager,
    }
    one, other = (apart(texts, engine, models) for engine in (ours, theirs))
    failed = next((found for found in (one, other) if not isinstance(found, list)), None)
    return {**about, **(failed or compare(one, other, exact=ours.dtype == "float32"))}


def _head() -> dict[str, Any]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = md.version(name)
        except md.PackageNotFoundError:
            continue
    head = {"schema": 1, "device": "", "commit": os.environ.get("DRAFTMARK_COMMIT", "unknown"), "versions": versions}
    return {**head, "equality": [], "rows": [], "failed": [], "not_run": []}


def _device() -> str:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


if __name__ == "__main__":
    main()
