"""Symbolic integers, which run a plugin's sizing code inside a proof.

z3's own integers cannot be used directly: they have no ``//``, and ``bool(x == 1)`` is silently False. A `Sym` divides
by divisors >= 1 (each divisor becomes an obligation) and forks the run at a comparison (`explore`). Any other operation
raises an error that names the core helper to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import z3


class SymbolicUse(Exception):
    """Sizing code used an operation on an integer that a proof cannot follow."""


class Context:
    """Holds the variables, definitions and facts of the symbols in one run of the sizing code.

    Attributes:
        inputs: named variables, by name.
        facts: assumptions about the inputs.
        extremes: ``(m, definition)`` of each maximum or minimum; `m` is a fresh variable.
        divisions: ``(a, b, q)`` of each a // b; `q` is a fresh variable.
        products: ``(a, b, a * b)`` of each product of two unknowns.
        decide: chooses the side of a branch; None outside of `explore`.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.facts: list[Any] = []
        self.extremes: list[tuple[Any, Any]] = []
        self.divisions: list[tuple[Any, Any, Any]] = []
        self.products: list[tuple[Any, Any, Any]] = []
        self.decide: Callable[[Any], bool] | None = None
        self._quotients: dict[tuple[int, int], Any] = {}
        self._fresh = 0

    def variable(self, name: str, low: int) -> Sym:
        """Return a new input that is >= `low`."""
        self.inputs[name] = z3.Int(name)
        self.facts.append(self.inputs[name] >= low)
        return Sym(self.inputs[name], self)

    def fresh(self, prefix: str) -> Any:
        """Return a new z3 integer with a unique name, for a quotient, a maximum or a minimum."""
        self._fresh += 1
        return z3.Int(f"{prefix}!{self._fresh}")

    def assume(self, fact: Cond) -> None:
        """Add a fact about the inputs."""
        self.facts.append(fact.term)

    def divide(self, a: Any, b: Any) -> Any:
        """Return the variable that stands for the quotient a // b. Equal operands share one variable."""
        key = (a.get_id(), b.get_id())
        if key not in self._quotients:
            self._quotients[key] = self.fresh("quotient")
            self.divisions.append((a, b, self._quotients[key]))
        return self._quotients[key]

    def obligations(self) -> list[Any]:
        """Return the claims that each divisor is >= 1. Without these claims a proof with ``//`` could be vacuous."""
        return [b >= 1 for _, b, _ in self.divisions if not z3.is_int_value(b)]

    def copy(self) -> Context:
        """Return a copy of the context. Variables and facts added to the copy do not change this context."""
        own = Context()
        own.inputs, own.facts, own.extremes = dict(self.inputs), list(self.facts), list(self.extremes)
        own.divisions, own.products = list(self.divisions), list(self.products)
        own._quotients, own._fresh = dict(self._quotients), self._fresh
        return own


def _term(value: Any) -> Any:
    if isinstance(value, Sym):
        return value.term
    if isinstance(value, int):
        return z3.IntVal(int(value))
    raise SymbolicUse(f"{value!r} ({type(value).__name__}) is combined with a geometry value; use integers only")


def _is(value: Any, number: int) -> bool:
    return bool(z3.is_int_value(value) and value.as_long() == number)


class Cond:
    """A comparison of symbols. An `if` on it runs the code once per truth value."""

    def __init__(self, term: Any, context: Context) -> None:
        self.term = term
        self.context = context

    def __bool__(self) -> bool:
        if self.context.decide is None:
            raise SymbolicUse("a condition on geometry values; use draftmark.maximum, minimum or ceil_div")
        return self.context.decide(z3.simplify(self.term))

    def __and__(self, other: Any) -> Cond:
        return Cond(z3.And(self.term, _condition(other)), self.context)

    def __or__(self, other: Any) -> Cond:
        return Cond(z3.Or(self.term, _condition(other)), self.context)

    def __invert__(self) -> Cond:
        return Cond(z3.Not(self.term), self.context)

    __rand__, __ror__ = __and__, __or__


def _condition(value: Any) -> Any:
    return value.term if isinstance(value, Cond) else z3.BoolVal(bool(value))


class Sym:
    """A symbolic integer: a z3 term, and the context that collects its definitions."""

    def __init__(self, term: Any, context: Context) -> None:
        self.term = term
        self.context = context

    def _new(self, term: Any) -> Sym:
        return Sym(term, self.context)

    def __repr__(self) -> str:
        return str(z3.simplify(self.term)).replace("\n", " ")

    def __hash__(self) -> int:
        return int(self.term.hash())

    # -- arithmetic operators of a symbol -----------------------------------------------------------------

    def __add__(self, other: Any) -> Sym:
        return self if _is(_term(other), 0) else self._new(self.term + _term(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Sym:
        return self if _is(_term(other), 0) else self._new(self.term - _term(other))

    def __rsub__(self, other: Any) -> Sym:
        return self._new(_term(other) - self.term)

    def __neg__(self) -> Sym:
        return self._new(-self.term)

    def __pos__(self) -> Sym:
        return self

    def __mul__(self, other: Any) -> Sym:
        factor = _term(other)
        if _is(factor, 1):
            return self
        if not z3.is_int_value(factor) and not z3.is_int_value(self.term):
            self.context.products.append((self.term, factor, self.term * factor))
        return self._new(self.term * factor)

    def __rmul__(self, other: Any) -> Sym:
        return self.__mul__(other)

    def __floordiv__(self, other: Any) -> Sym:
        return self if _is(_term(other), 1) else self._new(self.context.divide(self.term, _term(other)))

    def __rfloordiv__(self, other: Any) -> Sym:
        return self._new(_term(other)).__floordiv__(self)

    def __mod__(self, other: Any) -> Sym:
        return self.__sub__(self.__floordiv__(other).__mul__(other))

    def __rmod__(self, other: Any) -> Sym:
        return self._new(_term(other)).__mod__(self)

    def __divmod__(self, other: Any) -> tuple[Sym, Sym]:
        return self // other, self % other

    def __pow__(self, exponent: Any) -> Any:
        if not isinstance(exponent, int) or not 0 <= exponent <= 4:
            self._refuse(f"** {exponent!r}", "write the product out")
        result: Any = 1
        for _ in range(exponent):
            result = self * result
        return result

    def __rshift__(self, bits: Any) -> Sym:
        return self.__floordiv__(1 << self._bits(bits))

    def __lshift__(self, bits: Any) -> Sym:
        return self.__mul__(1 << self._bits(bits))

    def __and__(self, mask: Any) -> Sym:
        if isinstance(mask, int) and mask >= 0 and (mask + 1) & mask == 0:
            return self.__mod__(mask + 1)
        if isinstance(mask, int) and mask < 0 and (-mask) & (-mask - 1) == 0:
            return self.__floordiv__(-mask).__mul__(-mask)
        self._refuse(f"& {mask!r}", "round with ceil_div(x, n) * n")

    def __abs__(self) -> Sym:
        return self.__dm_max__(-self)

    def _bits(self, bits: Any) -> int:
        if not isinstance(bits, int):
            self._refuse("a shift by a symbolic count", "multiply or divide by a constant")
        return int(bits)

    # -- methods that draftmark.maximum and minimum call --------------------------------------------------

    def __dm_max__(self, other: Any) -> Sym:
        return self._extreme(other, lambda m, x: m >= x, "max")

    def __dm_min__(self, other: Any) -> Sym:
        return self._extreme(other, lambda m, x: m <= x, "min")

    def _extreme(self, other: Any, bounds: Callable[[Any, Any], Any], name: str) -> Sym:
        a, b = self.term, _term(other)
        if a.eq(b):
            return self
        m = self.context.fresh(name)
        self.context.extremes.append((m, z3.And(bounds(m, a), bounds(m, b), z3.Or(m == a, m == b))))
        return self._new(m)

    # -- comparison operators of a symbol -----------------------------------------------------------------

    def __eq__(self, other: object) -> Any:
        return Cond(self.term == _term(other), self.context) if isinstance(other, (Sym, int)) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return Cond(self.term != _term(other), self.context) if isinstance(other, (Sym, int)) else NotImplemented

    def __lt__(self, other: Any) -> Cond:
        return Cond(self.term < _term(other), self.context)

    def __le__(self, other: Any) -> Cond:
        return Cond(self.term <= _term(other), self.context)

    def __gt__(self, other: Any) -> Cond:
        return Cond(self.term > _term(other), self.context)

    def __ge__(self, other: Any) -> Cond:
        return Cond(self.term >= _term(other), self.context)

    def __bool__(self) -> bool:
        return bool(self != 0)

    # -- operations that a proof cannot follow ------------------------------------------------------------

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise SymbolicUse(f"{what} on a geometry value cannot be proved; {remedy}")

    def __truediv__(self, other: Any) -> NoReturn:
        self._refuse("true division", "use draftmark.ceil_div(a, b) or a // b")

    __rtruediv__ = __truediv__

    def __index__(self) -> NoReturn:
        self._refuse("range(), slicing or hex()", "let an extent of the shape carry the count")

    def __int__(self) -> NoReturn:
        self._refuse("int()", "geometry values are integers already")

    def __float__(self) -> NoReturn:
        self._refuse("float()", "use draftmark.ceil_div instead of math.ceil")

    def __ceil__(self) -> NoReturn:
        self._refuse("math.ceil()", "use draftmark.ceil_div")

    def bit_length(self) -> NoReturn:
        """Raise `SymbolicUse`: a proof cannot follow this operation."""
        self._refuse("bit_length()", "use a bound that does not round to a power of two, or refuse the geometry")
