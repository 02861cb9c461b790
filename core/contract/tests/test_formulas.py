"""Tests that each length formula of the contract is written once, in its oracle, and agrees with `Geometry`."""

from __future__ import annotations

import re
from pathlib import Path

import draftmark_contract
from draftmark import Mode
from draftmark_contract.cases.geometries import behaviours
from draftmark_contract.oracle import formulas
from draftmark_contract.sizing.geometries import odd_geometries, tight_geometries
from draftmark_contract.sizing.state import served

SOURCE = Path(draftmark_contract.__file__).parent
COPY = re.compile(
    r"num_steps - [12]\b|\*(\w+\.)*capture_batch_sizes(, 1)?\)|page_size - 1\) //|// (\w+\.)*page_size\) \*"
)
"""Start of a copied length formula: steps of a round, a page count, or requests of the largest batch."""
GEOMETRIES = [*behaviours().values(), *(case.value for case in (*odd_geometries(), *tight_geometries()))]


def test_no_formula_is_written_twice() -> None:
    """Every module of the contract imports length formulas from oracle/formulas.py."""
    files = [file for file in SOURCE.rglob("*.py") if file.name != "formulas.py"]
    found = [
        f"{file.relative_to(SOURCE)}: {line.strip()}" for file in files for line in _lines(file) if COPY.search(line)
    ]
    assert found == []


def test_no_length_comes_from_the_geometry() -> None:
    """The oracle, the cases, the harness and the sizing checks call none of `Geometry`'s formulas."""
    own = re.compile(r"geometry\.(max_\w+|pages_for|null_pages|extent|mask_words|num_draft_steps)\b")
    files = [file for room in ("oracle", "cases", "harness", "sizing") for file in (SOURCE / room).glob("*.py")]
    assert [f"{file.name}: {line.strip()}" for file in files for line in _lines(file) if own.search(line)] == []


def test_oracle_and_geometry_agree() -> None:
    """The oracle's formulas and those of `Geometry`, written independently, give equal numbers."""
    for geometry in GEOMETRIES:
        mine = (formulas.max_tail(geometry), formulas.max_prefix(geometry), formulas.max_pages(geometry))
        assert mine == (geometry.max_tail, geometry.max_prefix_len, geometry.max_pages_per_req)
        assert formulas.max_requests(geometry) == geometry.max_reqs
        for unique in (False, True):
            assert formulas.null_pages(geometry, unique) == geometry.null_pages(unique)
        for mode in geometry.modes:
            if mode is not Mode.EXTEND:
                assert formulas.rows_and_tail(geometry, mode, 1) == tuple(vars(geometry.extent(mode, 1)).values())


def test_oracle_and_state_geometry_agree() -> None:
    """The oracle's elements of a state, and its largest batch, are those of `StateGeometry`."""
    for case in served():
        geometry = case.value
        assert formulas.state_numel(geometry) == geometry.state_numel
        assert formulas.max_requests(geometry) == geometry.max_reqs


def _lines(file: Path) -> list[str]:
    """Return a file's lines of code; lines that begin with a string are skipped because they are prose."""
    return [line for line in file.read_text().splitlines() if not re.search(r'^\s*("|f")', line)]
