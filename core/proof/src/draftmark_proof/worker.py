"""Worker process that answers z3 queries, one JSON line each, until its input ends.

It is a separate process, which can be killed, because z3 can exceed its limits.

Query: ``{"smt2": text, "effort": steps, "cpu_seconds": s, "inputs": [names]}``.
Answer: ``{"status": "sat" | "unsat" | "unknown", "model": {name: value}}``.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from typing import Any

import z3


def answer(query: dict[str, Any]) -> dict[str, Any]:
    """Solve one query in a new z3 context, so that earlier queries change neither the answer nor the model."""
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set("rlimit", query["effort"])
    solver.set("random_seed", 0)
    solver.from_string(query["smt2"])
    status = str(solver.check())
    model: dict[str, int] = {}
    if status == "sat":
        found = solver.model()
        model = {name: _value(found, z3.Int(name, context)) for name in query["inputs"]}
    return {"status": status, "model": model}


def _value(model: Any, name: Any) -> int:
    return int(model.eval(name, model_completion=True).as_long())


def end_after(cpu_seconds: int) -> None:
    """Let the system kill this process (SIGXCPU) after it has used this much more processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def main() -> None:
    """Read queries from stdin, solve them, and print the answers until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        query = json.loads(line)
        end_after(query["cpu_seconds"])
        print(json.dumps(answer(query)), flush=True)


if __name__ == "__main__":
    main()
