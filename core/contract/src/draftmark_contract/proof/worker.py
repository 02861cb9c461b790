"""Answers z3 queries, one JSON line each, until its input ends. A process of its own, because z3 overruns its limits.

Query: ``{"smt2": text, "seconds": s, "inputs": [names]}``.
Answer: ``{"status": "sat" | "unsat" | "unknown", "model": {name: value}}``.
"""

from __future__ import annotations

import json
import sys

import z3


def answer(query: dict[str, object]) -> dict[str, object]:
    """Solve one query."""
    solver = z3.Solver()
    solver.set("timeout", int(1000 * float(str(query["seconds"]))))
    solver.set("random_seed", 0)
    solver.from_string(str(query["smt2"]))
    status = str(solver.check())
    model: dict[str, int] = {}
    if status == "sat":
        found = solver.model()
        names = query["inputs"]
        assert isinstance(names, list)
        model = {name: found.eval(z3.Int(name), model_completion=True).as_long() for name in names}
    return {"status": status, "model": model}


def main() -> None:
    """Read, solve, write."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
