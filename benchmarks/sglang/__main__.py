"""Starts the servers of `cases` in waves (groups), measures one server after another, and writes each row at once.

python -m benchmarks.sglang OUT.json [--waves 0,1] [--ready SECONDS] [--each SECONDS]
    [--all SECONDS] [--rehearse] [--servers 0,1,4,5 --unprofiled]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .cases import SERVERS, WAVES
from .models import REAL, REHEARSED, write_models

LOG_LINES = 80
"""Lines of its log that are recorded for a server that was not measured."""


class Run:
    """The servers' processes and their measurements.

    Args:
        ready, each, all_: time limits in seconds: start of a wave, measurement of a server, and the whole run.
        after: file that `benchmarks.sglang.texts` writes at its end. Measurements begin after that, and not at all if
            draftmark gave no texts.
        unprofiled: record no kernels.
    """

    def __init__(
        self,
        out: Path,
        ready: float,
        each: float,
        all_: float,
        after: Path | None,
        rehearsed: bool,
        unprofiled: bool = False,
    ) -> None:
        self._out, self._ready, self._each, self._all = out, ready, each, all_
        self._after, self._rehearsed, self._unprofiled = after, rehearsed, unprofiled
        self._folder, self._began = Path(tempfile.mkdtemp()), time.monotonic()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._about: dict[str, str] = {}
        write_models(self._folder, REHEARSED if rehearsed else REAL)

    def waves(self, members: list[list[int]]) -> None:
        """Measure these groups of server numbers. The next group imports while a group starts, not while one runs."""
        try:
            self._spawn(members[0])
            self._about = _about()  # the servers import SGLang meanwhile
            for at, wave in enumerate(members):
                following = members[at + 1] if at + 1 < len(members) else []
                self._spawn(following)
                self._start(wave, following)
                if self._texts_failed():
                    self._print("no server of draftmark gave texts, so measurements would fail too")
                    return
                for number in wave:
                    self._measure(number)
                if not any(self._has("done", number) for number in wave):
                    self._print("no server of this wave was measured, so other waves would fail too")
                    return
        finally:
            for process in self._processes.values():
                process.kill()
            self._write()

    def _spawn(self, wave: list[int]) -> None:
        for number in wave:
            command = [sys.executable, "-m", "benchmarks.sglang.worker", str(number), str(self._folder)]
            command += ["--rehearse"] * self._rehearsed + ["--unprofiled"] * self._unprofiled
            with (self._folder / f"log.{number}").open("wb") as log:
                self._processes[number] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _start(self, wave: list[int], following: list[int]) -> None:
        """Start a group of servers while the next group imports. Kill late servers: they would disturb others."""
        for number in wave:
            (self._folder / f"go.{number}").touch()
        self._print(f"starting {', '.join(SERVERS[number].name for number in wave)}")
        limit = min(time.monotonic() + self._ready, self._began + self._all)
        while time.monotonic() < limit and (
            self._waits()
            or any(self._lacks("ready", one) for one in wave)
            or any(self._lacks("imported", one) for one in following)
        ):
            time.sleep(0.05)
        for number in wave:
            if not self._has("ready", number):
                self._print(f"not ready: {SERVERS[number].name}")
                self._processes[number].kill()
        self._write()

    def _measure(self, number: int) -> None:
        (self._folder / f"turn.{number}").touch()
        limit, rows = min(time.monotonic() + self._each, self._began + self._all), 0
        while self._alive(number) and not self._has("done", number):
            if time.monotonic() > limit:
                self._processes[number].kill()
            if len(self._rows(number)) > rows:
                rows = len(self._rows(number))
                self._write()
            time.sleep(0.05)
        self._processes[number].kill()
        self._processes[number].wait()
        self._print(f"{SERVERS[number].name}: {self._rates(number)}")
        self._write()

    def _waits(self) -> bool:
        return self._after is not None and not self._after.exists()

    def _texts_failed(self) -> bool:
        """Return True if the process `benchmarks.sglang.texts` has ended without a text from draftmark."""
        if self._after is None or not self._after.exists():
            return False
        return not any("texts" in row for row in json.loads(self._after.read_text()) if row["backend"] == "draftmark")

    def _lacks(self, what: str, number: int) -> bool:
        return self._alive(number) and not self._has(what, number)

    def _alive(self, number: int) -> bool:
        return self._processes[number].poll() is None

    def _has(self, what: str, number: int) -> bool:
        return (self._folder / f"{what}.{number}").exists()

    def _rows(self, number: int) -> list[dict[str, object]]:
        file = self._folder / f"rows.{number}.json"
        return json.loads(file.read_text()) if file.exists() else []

    def _rates(self, number: int) -> str:
        return ", ".join(
            f"{row['phase']} {row['num_reqs']}x{row['prompt_len']} {row['tokens_per_s']}" for row in self._rows(number)
        )

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s: {text}", flush=True)

    def _write(self) -> None:
        rows = [row for number in self._processes for row in self._rows(number)]
        missing = {
            SERVERS[number].name: self._log_tail(number) for number in self._processes if not self._has("done", number)
        }
        self._out.write_text(json.dumps(self._about | dict(rows=rows, not_measured=missing), indent=1))

    def _log_tail(self, number: int) -> list[str]:
        return (self._folder / f"log.{number}").read_text(errors="replace").strip().splitlines()[-LOG_LINES:]


def _about() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    return dict(device=device, torch=torch.__version__, sglang=importlib.metadata.version("sglang"))


def main() -> None:
    """Measure the selected waves (groups of servers that start together) within the time limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--waves", default=",".join(map(str, range(len(WAVES)))), help="numbers of the waves to measure"
    )
    parser.add_argument("--servers", help="numbers of the servers of one wave, instead of --waves")
    parser.add_argument("--unprofiled", action="store_true", help="record no kernels")
    parser.add_argument("--ready", type=float, default=300, help="seconds in which a wave must start")
    parser.add_argument("--each", type=float, default=120, help="seconds in which a server must be measured")
    parser.add_argument("--all", type=float, default=1800, help="seconds for the whole run")
    parser.add_argument("--after", type=Path, help="wait for this file of benchmarks.sglang.texts before measurements")
    parser.add_argument("--rehearse", action="store_true", help="use a tiny model on a CPU")
    options = parser.parse_args()
    limits = options.ready, options.each, options.all
    run = Run(options.out, *limits, options.after, options.rehearse, options.unprofiled)
    if options.servers is not None:
        run.waves([[int(one) for one in options.servers.split(",")]])
    else:
        waves = [WAVES[int(number)] for number in options.waves.split(",")]
        run.waves([[SERVERS.index(server) for server in wave] for wave in waves])


if __name__ == "__main__":
    main()
