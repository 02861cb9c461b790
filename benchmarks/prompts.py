"""Prompts that the decode benchmarks share."""

from __future__ import annotations

import json
from typing import Any

from .origin import PROMPTS


def fixed_set() -> list[dict[str, Any]]:
    """Return the rows of `examples/prompts/benchmark.jsonl`: ``name``, ``prompt``, and whether drafts are useful."""
    return [json.loads(line) for line in (PROMPTS / "benchmark.jsonl").read_text().splitlines() if line.strip()]
