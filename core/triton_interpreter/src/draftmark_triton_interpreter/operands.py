"""Operands of interpreted binary operations, without the broadcast copies that Triton makes."""

from __future__ import annotations

from typing import Any

from triton.language.semantic import TritonSemantic


class Operands(TritonSemantic):  # type: ignore[misc]
    """Triton's operation rules, except that binary operations do not expand the data of a broadcast operand.

    The interpreter runs each binary operation as a NumPy function. NumPy broadcasts by Triton's rules, so results have
    the full shape.
    """

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> tuple[Any, Any]:
        """Return both operands, cast to the operation's type but not expanded to the common shape."""
        left, right = super().binary_op_type_checking_impl(lhs, rhs, *rules, **more)
        return self._with_type(lhs, left), self._with_type(rhs, right)

    def _with_type(self, operand: Any, made: Any) -> Any:
        """Return `operand` with the type of `made` (the operand as Triton converted it), but with unexpanded data."""
        if not isinstance(operand, self.tensor):
            operand = self.scalar_constant(operand, made.dtype)
        elif operand.dtype != made.dtype:
            operand = self.cast(operand, made.dtype)
        return self.tensor(operand.handle, made.type)
