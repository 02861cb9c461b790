"""No length formula branches on a value: all formulas run on symbolic integers that raise in a condition."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import pytest

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode, ceil_div, maximum, minimum
from draftmark_reference import sizing

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "max": max, "min": min}


@dataclass(frozen=True, eq=False)
class Symbol:
    """Symbolic integer: a variable, or an operator with two operands. A comparison or condition raises TypeError."""

    op: str
    args: tuple[Any, ...]

    def __bool__(self):
        raise TypeError(f"a formula branches on {self}")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__  # type: ignore[assignment]
    __index__ = __int__ = __hash__ = __bool__  # type: ignore[assignment]

    def value(self, names: dict[str, int]) -> int:
        """Return the value of the expression for the numbers in `names`."""
        if self.op == "name":
            return names[self.args[0]]
        return OPERATORS[self.op](*(a.value(names) if isinstance(a, Symbol) else a for a in self.args))


def _binary(op, swap=False):
    return lambda self, other: Symbol(op, (other, self) if swap else (self, other))


for _op, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv")):
    setattr(Symbol, f"__{_name}__", _binary(_op))
    setattr(Symbol, f"__r{_name}__", _binary(_op, swap=True))
Symbol.__dm_max__ = _binary("max")
Symbol.__dm_min__ = _binary("min")

NUMBERS = {
    "heads": 2,
    "V": 6,
    "dim": 8,
    "P": 3,
    "k": 4,
    "S": 5,
    "D": 6,
    "R": 7,
    "C": 29,
    "E": 11,
    "B": 9,
    "step": 2,
}
FORMULAS = {
    "max_tail": lambda g, s: g.max_tail,
    "max_prefix_len": lambda g, s: g.max_prefix_len,
    "max_kv_len": lambda g, s: g.max_kv_len,
    "max_pages_per_req": lambda g, s: g.max_pages_per_req,
    "pages_for": lambda g, s: g.pages_for(s, g.max_tail),
    "null_pages": lambda g, s: g.null_pages(unique_slots=True),
    "max_reqs": lambda g, s: g.max_reqs,
    "max_rows_any": lambda g, s: g.max_rows_any,
    "mask_words": lambda g, s: g.mask_words,
    "num_draft_steps": lambda g, s: g.num_draft_steps,
    "page_bytes": lambda g, s: g.page_bytes,
    "row_bytes": lambda g, s: g.row_bytes,
    "query_width": lambda g, s: g.query_width,
    "output_width": lambda g, s: g.output_width,
    **{f"rows of {mode.value}": lambda g, s, mode=mode: g.max_rows(mode) for mode in Mode},
    **{f"q_len of {mode.value}": lambda g, s, mode=mode: g.extent(mode, s).q_len for mode in Mode},
    **{f"tail_len of {mode.value}": lambda g, s, mode=mode: g.extent(mode, s).tail_len for mode in Mode},
}


def geometry_of(n: dict[str, Any], overlap: bool, **attention: Any) -> Geometry:
    """Return a geometry with its fields taken from `n`, without validation; `attention` adds fields of that part."""
    return Geometry(
        AttentionShape(n["heads"] * 2, n["heads"], n["dim"], n["P"], "float32", "float32", 1.0, **attention),
        DraftShape(n["k"], n["S"], n["D"]),
        Limits(n["R"], n["C"], n["E"], (n["B"], 3), overlap),
        DeviceProfile(),
        tuple(Mode),
    )


SYMBOLS = {name: Symbol("name", (name,)) for name in NUMBERS}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_on_symbols_equals_the_formula_on_ints(name, overlap):
    """Each formula builds an expression without a truth test; its value equals the result for plain ints."""
    formula = FORMULAS[name]
    result = formula(geometry_of(SYMBOLS, overlap), SYMBOLS["step"])
    number = formula(geometry_of(NUMBERS, overlap), NUMBERS["step"])
    assert (result.value(NUMBERS) if isinstance(result, Symbol) else result) == number


@pytest.mark.parametrize("latent", [False, True])
def test_a_value_width_may_be_a_symbol(latent):
    """Bytes of rows and widths of outputs multiply a symbolic value_dim, latent or not."""
    found = {}
    for n in (SYMBOLS, NUMBERS):
        geometry = geometry_of(n, False, value_dim=n["V"], latent=latent)
        found[n is NUMBERS] = geometry.row_bytes, geometry.page_bytes, geometry.output_width
    assert tuple(one.value(NUMBERS) for one in found[False]) == found[True]
    row = 2 * (8 + (0 if latent else 6)) * 4
    assert found[True] == (row, 3 * row, 2 * 2 * 6)


def test_the_reference_sizing_runs_on_symbols():
    """The reference backend computes buffer shapes and bytes from symbolic integers."""
    specs = sizing.buffers(geometry_of(SYMBOLS, True))
    numbers = sizing.buffers(geometry_of(NUMBERS, True))
    assert [spec.nbytes.value(NUMBERS) for spec in specs] == [spec.nbytes for spec in numbers]


def test_a_symbol_has_no_truth_value():
    """A symbol raises on every branch, so the tests above cannot pass by accident."""
    s = SYMBOLS["k"]
    for branch in (bool, int, lambda s: s > 1, lambda s: s == 1, lambda s: max(s, 1), lambda s: range(s)):
        with pytest.raises(TypeError):
            branch(s)


def test_maximum_and_minimum_mix_ints_and_symbols():
    """`maximum` and `minimum` accept ints and symbols together, in any order."""
    s = SYMBOLS["k"]
    assert maximum(1, 9, s, 2).value({"k": 4}) == 9
    assert minimum(s, 3).value({"k": 4}) == 3
    assert ceil_div(s, 3).value({"k": 4}) == 2
