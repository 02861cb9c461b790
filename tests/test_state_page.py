"""Tests that the sizes in docs/state.md are those of the formulas."""

from __future__ import annotations

import math
from pathlib import Path

from draftmark import DraftShape, Limits, StateGeometry
from draftmark_tools.cli.state_arguments import MODELS
from draftmark_tools.cli.state_schemes import SCHEMES
from draftmark_tools.models import state_facts

PAGE = Path(__file__).parent.parent / "docs" / "state.md"


def gib(count: int) -> str:
    """Return GiB with one digit, or none from 100 on; a half is rounded up."""
    size = count / 2**30
    return f"{size:.1f}" if size < 99.95 else f"{math.floor(size + 0.5):,}"


def test_the_table_has_the_bytes_of_the_formulas() -> None:
    """Each row of the table has the bytes held and moved at D = 8 and 64."""
    facts = state_facts(MODELS["qwen3-next"])
    small, large = (
        StateGeometry.create(
            facts.shape, Limits(64, 4096), DraftShape(num_draft_tokens=nodes), num_layers=len(facts.layers)
        )
        for nodes in (8, 64)
    )
    schemes = {one.name: one for one in SCHEMES}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    rows = {row[0].split(" (")[0]: row[2:] for row in cells if row and row[0].split(" (")[0] in schemes}
    assert len(rows) == 5
    for name, found in rows.items():
        one = schemes[name]
        expected = [gib(one.held(small)), gib(one.held(large)), gib(one.moved(small, 3)), gib(one.moved(large, 3))]
        assert found == expected, name
