"""Operands of the interpreted language's binary operations, without the copies that Triton spreads them to."""

from __future__ import annotations

from typing import Any

from triton.language.semantic import TritonSemantic


class Operands(TritonSemantic):  # type: ignore[misc]
    """The language's semantic, but that a broadcast operand of a binary operation keeps its data as they are.

    Each such operation is one of NumPy's, which broadcasts by the same rules, so that a result has all of its cells.
    """

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> tuple[Any, Any]:
        """Both operands in the type in which an operation computes."""
        left, right = super().binary_op_type_checking_impl(lhs, rhs, *rules, **more)
        return self._with_type(lhs, left), self._with_type(rhs, right)

    def _with_type(self, operand: Any, made: Any) -> Any:
        """`mma_operand` with the type of what Triton made of it."""
        if not isinstance(operand, self.tensor):
            operand = self.scalar_constant(operand, made.dtype)
        elif operand.dtype != made.dtype:
            operand = self.cast(operand, made.dtype)
        return self.tensor(operand.handle, made.type)
