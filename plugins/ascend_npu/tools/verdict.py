"""Runs the plugin's tests and the contract's three tiers on this machine's NPU, and writes the results to one file.

python plugins/ascend_npu/tools/verdict.py --out verdict.json              # also on the emulator; the file names it
python plugins/ascend_npu/tools/verdict.py --out verdict.json --hardware   # refuses to run on the emulator
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from draftmark_ascend_npu.device import machine, require_hardware, stamp

TESTS = Path(__file__).parent.parent / "tests"
SEED = "1"
"""Seed of the emulator's schedule while the contract runs."""
PACKAGES = ("draftmark", "draftmark-ascend-npu", "torch", "torch-npu", "transformers")


def main() -> int:
    """Run tests and contract; return the larger of their exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the verdict")
    parser.add_argument("--hardware", action="store_true", help="fail without a hardware NPU")
    parser.add_argument("--workers", default="2", help="processes for the tests and the contract")
    parser.add_argument("--sample", type=int, default=0, help="most cases of each check; 0 for all")
    args = parser.parse_args()
    device = require_hardware("verdict.py --hardware") if args.hardware else stamp()
    print(f"device: {device}", flush=True)
    emulated = machine().emulated
    record: dict[str, Any] = {"device": device, "machine": machine().record(), "versions": versions()}
    record["hardware"] = machine().hardware
    with tempfile.TemporaryDirectory() as folder:
        record["tests"] = _pytest([str(TESTS)], args.workers)
        contract = Path(folder, "contract.json")
        tier = ["ascend_npu", "--tier", "device", "--allow-part", "--json", str(contract)]
        # On the emulator the plugin's tests run with lazy streams, and the contract with a random schedule of streams.
        # Checks with pools of 2**31 elements run in one process: two pools do not fit into a small machine's memory.
        shared = [*tier, "--journal", str(Path(folder, "journal.jsonl")), "--sample", str(args.sample)]
        _contract([*shared, "-k", "reach_past_int32"], "1")
        # The full_size items have 33 requests of 8192 tokens. On the emulator they take an hour and show nothing about
        # a device.
        most = ["-k", "not full_size"] if emulated else []
        run = _contract([*shared, *most], args.workers)
        record["contract"] = json.loads(contract.read_text(encoding="utf-8")) if contract.is_file() else {}
        record["contract"] |= {"device": device, "schedule_seed": SEED if emulated else None, **run}
        record["contract"]["exercised"] = exercised(record["contract"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    line = record["contract"].get("line", "the contract gave no verdict")
    print(f"{device}: {line}\n{record['contract']['exercised']}\nwrote {args.out}")
    return int(max(record["tests"]["exit_code"], run["exit_code"]))


def _pytest(arguments: list[str], workers: str) -> dict[str, Any]:
    command = ["pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "--dist", "worksteal", *arguments]
    return _run(command)


def _contract(arguments: list[str], workers: str) -> dict[str, Any]:
    return _run(["draftmark_tools.cli", "contract", *arguments, "--workers", workers], DRAFTMARK_NPU_SEED=SEED)


def _run(module: list[str], **environment: str) -> dict[str, Any]:
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", *module]
    code = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    return {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}


def exercised(contract: dict[str, Any]) -> str:
    """Return one line with the numbers of contract items that ran, and of items that the plugin refused."""
    results = contract.get("results", [])
    ran = [one for one in results if one["outcome"] != "refused"]
    device = [[one for one in some if one["tier"] == "device"] for some in (ran, results)]
    share = 100 * (len(results) - len(ran)) / max(1, len(results))
    return (
        f"exercised: {len(ran)} of {len(results)} items ({share:.0f} % are refusals), of the device tier "
        f"{len(device[0])} of {len(device[1])}"
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages under test."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
