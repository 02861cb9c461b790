"""Ask z3 in a process that is killed when it overruns."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

GRACE_S = 1.0


@dataclass
class Answer:
    """``unsat``, ``sat`` with a model, or ``unknown``."""

    status: str
    model: dict[str, int] = field(default_factory=dict)


class Solver:
    """One worker process, started when first asked and again after it was killed. Close it when done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, problem: str, inputs: list[str], seconds: float) -> Answer:
        """Is the problem (SMT-LIB text, see `problem.smt2`) satisfiable?"""
        query = {"smt2": problem, "seconds": seconds, "inputs": inputs}
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(query) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], seconds + GRACE_S)
            line = process.stdout.readline() if ready else ""
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
