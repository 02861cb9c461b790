"""Runs z3 in a child process that ends when z3 exceeds its limits.

The limits count work instead of time, so a busy machine delays an answer but never changes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

STEPS_PER_S = 1_000_000
"""z3 steps per second on a slow processor."""


@dataclass
class Answer:
    """Holds an answer of z3: ``unsat``, ``sat`` with a model, or ``unknown``."""

    status: str
    model: dict[str, int] = field(default_factory=dict)


class Solver:
    """Runs queries in a worker process, which starts at the first query and again after it ended. Call `close` last."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, problem: str, inputs: list[str], effort: int, cpu_seconds: int | None = None) -> Answer:
        """Return whether the problem is satisfiable.

        Args:
            problem: SMT-LIB text, see `problem.smt2`.
            inputs: names of the integers that a model must contain.
            effort: z3's `rlimit`, a count of its own steps, so that the answer is the same on every machine.
            cpu_seconds: processor time limit, for z3 code that counts no steps. The default is ten times the time for
                `effort`.

        Returns:
            The answer; ``unknown`` if a limit is reached.
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
            # Start the worker by file path: it needs only z3, and a start as a module would import draftmark.
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self._process
