"""Operands of the interpreter's binary operations: types worked out once a pair of types, data left to NumPy's broadcasting."""

from __future__ import annotations

from numbers import Number
from typing import Any, NamedTuple

from triton.language.semantic import TritonSemantic


class Plan(NamedTuple):
    """What an operation makes of operands of two types.

    Attributes:
        constants: the operand itself where it was a number, as a scalar tensor.
        elements: the element type that an operand is converted to; None where it has it.
        types: of both operands, broadcast against each other.
    """

    constants: tuple[Any, Any]
    elements: tuple[Any, Any]
    types: tuple[Any, Any]


class Operands(TritonSemantic[Any]):
    """The language's semantic, with the types of a binary operation remembered.

    A broadcast operand keeps its data as they are: every operation on two operands is one of NumPy's, which broadcasts
    by the same rules, so the result has all of its cells.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._plans: dict[tuple[Any, ...], Plan] = {}

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
        key = (_key(lhs), _key(rhs), rules)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(lhs, rhs, *rules)
        return self._follow(plan, 0, lhs), self._follow(plan, 1, rhs)

    def _plan(self, lhs: Any, rhs: Any, *rules: bool) -> Plan:
        both = super().binary_op_type_checking_impl(lhs, rhs, *rules)
        constants, elements = [], []
        for given, made in zip((lhs, rhs), both, strict=True):
            number = isinstance(given, Number)
            constants.append(self.scalar_constant(given, made.dtype) if number else None)
            elements.append(None if number or given.dtype == made.dtype else made.dtype)
        return Plan(tuple(constants), tuple(elements), tuple(one.type for one in both))

    def _follow(self, plan: Plan, side: int, operand: Any) -> Any:
        constant, element, kind = plan.constants[side], plan.elements[side], plan.types[side]
        if constant is not None:
            operand = constant
        elif element is not None:
            operand = self.cast(operand, element)
        return operand if operand.type is kind else self.tensor(operand.handle, kind)


def _key(operand: Any) -> Any:
    return (type(operand), operand) if isinstance(operand, Number) else operand.type.name
