"""Ask z3 in a process of its own, which ends when z3 overruns: by work done, never by the clock.

A busy machine makes an answer late, not another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

STEPS_PER_S = 1_000_000
"""What z3 counts in a second of a slow processor."""


@dataclass
class Answer:
    """``unsat``, ``sat`` with a model, or ``unknown``."""

    status: str
    model: dict[str, int] = field(default_factory=dict)


class Solver:
    """One worker process, started when first asked and again after it ended. Close it when done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, problem: str, inputs: list[str], effort: int, cpu_seconds: int | None = None) -> Answer:
        """Say whether the problem (SMT-LIB text, see `problem.smt2`) is satisfiable.

        Args:
            problem: what to solve.
            inputs: names of the integers whose values a model tells.
            effort: z3's `rlimit`, a count of its own steps: the same answer on every machine.
            cpu_seconds: processor time after which the worker ends in code that counts no steps; an order of magnitude
                above what the effort takes unless given.

        Returns:
            The answer; ``unknown`` when either limit is met.
        """
        seconds = 10 + 10 * effort // STEPS_PER_S if cpu_seconds is None else cpu_seconds
        query = {"smt2": problem, "effort": effort, "cpu_seconds": seconds, "inputs": inputs}
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(query) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            return Answer("unknown")
        return Answer(**json.loads(line))

    def close(self) -> None:
        """Kill the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            # By path, so that starting it does not import draftmark: z3 is all it needs.
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self._process
