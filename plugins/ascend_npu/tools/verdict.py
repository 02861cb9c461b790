"""Run the plugin's tests and the contract's three tiers on whatever NPU is here, and write one file that says so.

python plugins/ascend_npu/tools/verdict.py --out verdict.json              # stamped, on the emulator too
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
"""Of the emulator's schedule while the contract runs."""
PACKAGES = ("draftmark", "draftmark-ascend-npu", "torch", "torch-npu", "transformers")


def main() -> int:
    """The worse of the two runs' exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the verdict")
    parser.add_argument("--hardware", action="store_true", help="refuse to run without an NPU")
    parser.add_argument("--workers", default="2", help="pytest-xdist processes for the contract")
    parser.add_argument("--sample", type=int, default=0, help="at most so many cases of each check; 0 for all")
    args = parser.parse_args()
    device = require_hardware("make test-npu-hardware") if args.hardware else stamp()
    print(f"device: {device}", flush=True)
    emulated = machine().emulated
    record: dict[str, Any] = {"device": device, "machine": machine().record(), "versions": versions()}
    record["hardware"] = machine().hardware
    with tempfile.TemporaryDirectory() as folder:
        record["tests"] = _pytest([str(TESTS)], args.workers)
        contract = Path(folder, "contract.json")
        tier = ["--attn-backend=ascend_npu", "--attn-tier=device", f"--attn-json={contract}"]
        config = Path(folder, "pytest.ini")
        config.write_text("[pytest]\n", encoding="utf-8")
        own = ["-c", str(config), f"--rootdir={folder}", "--pyargs", "draftmark_contract"]
        # Lazy streams for the tests, a drawn schedule for the contract; hardware has its own.
        # Pools of 2**31 elements one after another: two at a time do not fit a small machine's memory.
        shared = [*own, *tier, f"--attn-journal={Path(folder, 'journal.jsonl')}", f"--attn-sample={args.sample}"]
        _pytest([*shared, "-k", "reach_past_int32"], "1", DRAFTMARK_NPU_SEED=SEED)
        # 33 requests of 8192 tokens each, by an emulator, take an hour that says nothing of a device.
        most = ["-k", "not full_size"] if emulated else []
        run = _pytest([*shared, *most], args.workers, DRAFTMARK_NPU_SEED=SEED)
        record["contract"] = json.loads(contract.read_text(encoding="utf-8")) if contract.is_file() else {}
        record["contract"] |= {"device": device, "schedule_seed": SEED if emulated else None, **run}
        record["contract"]["exercised"] = exercised(record["contract"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    said = record["contract"].get("line", "the contract gave no verdict")
    print(f"{device}: {said}\n{record['contract']['exercised']}\nwrote {args.out}")
    return int(max(record["tests"]["exit_code"], run["exit_code"]))


def _pytest(arguments: list[str], workers: str, **environment: str) -> dict[str, Any]:
    start = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers]
    command += ["--dist", "worksteal", *arguments]
    code = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    return {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}


def exercised(contract: dict[str, Any]) -> str:
    """How much of the suite was judged, and not passed by refusing."""
    results = contract.get("results", [])
    ran = [one for one in results if one["outcome"] != "refused"]
    device = [[one for one in some if one["tier"] == "device"] for some in (ran, results)]
    share = 100 * (len(results) - len(ran)) / max(1, len(results))
    return (
        f"exercised: {len(ran)} of {len(results)} items ({share:.0f} % are refusals), of the device tier "
        f"{len(device[0])} of {len(device[1])}"
    )


def versions() -> dict[str, str]:
    """Of what was run."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
