"""Operands of the interpreted language's operations: what becomes of two types is worked out once.

Triton's own semantic compares, converts and broadcasts both operands anew at every operation, which takes most of an
interpreted kernel's time. The results are the same bit by bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.semantic import TritonSemantic


class Side(NamedTuple):
    """What an operation makes of one operand.

    Attributes:
        constant: the operand as a scalar tensor, where it was a number. element: the type that its elements are
            converted to; None where they have it. type: that of the whole, broadcast against the other operand.
    """

    constant: Any
    element: Any
    type: Any


class Operands(TritonSemantic):  # type: ignore[misc]
    """The language's semantic; of operands it remembers by type, and of numbers by value, what they become.

    A broadcast operand of a binary operation keeps its data as they are: each is one of NumPy's, which broadcasts by
    the same rules, so that a result has all of its cells.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._sides: dict[tuple[Any, ...], tuple[Side, Side]] = {}
        self._alike: set[tuple[str, str]] = set()

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        """Both operands in the type in which an operation computes."""
        rules = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        key = (self._key(lhs), self._key(rhs), *rules)
        sides = self._sides.get(key)
        if sides is None:
            left, right = super().binary_op_type_checking_impl(lhs, rhs, *rules)
            sides = self._sides[key] = self._side(lhs, left), self._side(rhs, right)
        return self._follow(sides[0], lhs), self._follow(sides[1], rhs)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Both in one shape and with all of their cells, as loads, stores and selections take them."""
        key = (lhs.type.name, rhs.type.name)
        if key in self._alike:
            return lhs, rhs
        left, right = super().broadcast_impl_value(lhs, rhs)
        if left is lhs and right is rhs:
            self._alike.add(key)
        return left, right

    def _key(self, operand: Any) -> Any:
        # A number as it is written: 0.0 equals -0.0, and 1 equals True.
        return operand.type.name if isinstance(operand, self.tensor) else repr(operand)

    def _side(self, operand: Any, made: Any) -> Side:
        if not isinstance(operand, self.tensor):
            return Side(self.scalar_constant(operand, made.dtype), None, made.type)
        return Side(None, None if operand.dtype == made.dtype else made.dtype, made.type)

    def _follow(self, side: Side, operand: Any) -> Any:
        if side.constant is not None:
            operand = side.constant
        elif side.element is not None:
            operand = self.cast(operand, side.element)
        return operand if operand.type is side.type else self.tensor(operand.handle, side.type)
