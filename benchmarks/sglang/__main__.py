"""Starts every server of `cases`, measures one after the other, and writes the rows.

python -m benchmarks.sglang OUT.json [--ready SECONDS] [--all SECONDS]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .cases import LAYERS, MEASURED, write_models


def main() -> None:
    """Measure for as long as there is time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ready", type=float, default=600, help="seconds within which a server must have started")
    parser.add_argument("--all", type=float, default=1800, help="seconds for everything")
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    write_models(folder)
    servers = [_start(number, folder) for number in range(len(MEASURED))]
    left = list(range(len(servers)))
    try:
        while left and time.monotonic() - began < options.all:
            number = _next(left, servers, folder, time.monotonic() - began > options.ready)
            if number is None:
                time.sleep(0.1)
                continue
            left.remove(number)
            print(f"{time.monotonic() - began:6.1f} s: {MEASURED[number][1]} {MEASURED[number][0].name}", flush=True)
            (folder / f"turn.{number}").touch()
            while servers[number].poll() is None and not (folder / f"done.{number}").exists():
                if time.monotonic() - began > options.all:
                    break
                time.sleep(0.02)
            _write(options.out, folder, servers)
    finally:
        for server in servers:
            server.kill()
        _write(options.out, folder, servers)


def _start(number: int, folder: Path) -> subprocess.Popen[bytes]:
    log = (folder / f"log.{number}").open("wb")
    command = [sys.executable, "-m", "benchmarks.sglang.worker", str(number), str(folder)]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _next(left: list[int], servers: list[subprocess.Popen[bytes]], folder: Path, late: bool) -> int | None:
    """The next server to measure; none while one that starts would be disturbed or would disturb, unless it is late."""
    for number in [one for one in left if servers[one].poll() is not None]:
        left.remove(number)
    ready = [one for one in left if (folder / f"ready.{one}").exists()]
    if not late and len(ready) < len(left):
        return None
    for number in [one for one in left if one not in ready]:
        servers[number].kill()
    return ready[0] if ready else None


def _write(out: Path, folder: Path, servers: list[subprocess.Popen[bytes]]) -> None:
    import torch

    rows, missing = [], {}
    for number, (case, backend) in enumerate(MEASURED):
        file = folder / f"rows.{number}.json"
        found = json.loads(file.read_text()) if file.exists() else []
        rows += found
        if not found:
            log = (folder / f"log.{number}").read_text(errors="replace").strip().splitlines()
            missing[f"{backend} {case.name} page {case.page_size}"] = log[-12:]
    device = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    about = dict(device=device, torch=torch.__version__, num_layers=LAYERS, rows=rows, not_measured=missing)
    out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
