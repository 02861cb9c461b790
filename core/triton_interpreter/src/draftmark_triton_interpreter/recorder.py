"""Recording subclass of the interpreter's builder: it lists the builder calls of one operation.

The calls depend on the operands' types and constants, never on the values in tensors. So `recipe` can repeat recorded
calls with other data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

INNER_METHODS = ("binary_op", "cast_impl", "ternary_op", "unary_op")
"""Builder methods that most public methods call to compute; some take a NumPy function as an argument."""


class BuilderCall(NamedTuple):
    """One call of a builder method.

    Attributes:
        name: method name.
        args: arguments, including handles.
        made: returned handle, or None.
    """

    name: str
    args: tuple[Any, ...]
    made: Any


class CallRecord:
    """Records the builder calls of one operation.

    A call is not recorded if it returns the result of a recorded inner call. It is recorded if its result comes from
    elsewhere, such as NumPy, or if it is a store, which has no result.

    Args:
        operands: distinct handles of the operation's operands.

    Attributes:
        steps: recorded calls, in order.
        complete: whether repeating `steps` has the full effect of the operation.
    """

    def __init__(self, operands: Sequence[Any]) -> None:
        self.steps: list[BuilderCall] = []
        self.complete = True
        # The dict keeps the handles alive, because Python can reuse the id of a deleted object.
        self._handles = {id(one): one for one in operands}
        self._depth = 0

    def call(self, builder: Recorder, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a builder method, and record the call unless its inner calls cover it."""
        before = len(self.steps)
        self._depth += 1
        made = method(builder, *args, **kwargs)
        self._depth -= 1
        if isinstance(made, TensorHandle):
            kept = id(made) in self._handles or self._keep(before, BuilderCall(name, args, made), kwargs)
        elif made is None and name.startswith("create_"):
            kept = self._keep(before, BuilderCall(name, args, None), kwargs)
        else:
            kept = not isinstance(made, (list, tuple))  # types and options need no record
        # An inner call that cannot be repeated does not matter yet: its outer call can be recorded instead.
        self.complete = self.complete and (kept or self._depth > 0)
        return made

    def produced(self, handle: Any) -> bool:
        """Check whether a handle is an operand or a recorded call's result. None, a store's result, counts too."""
        return handle is None or id(handle) in self._handles

    def _keep(self, before: int, step: BuilderCall, kwargs: dict[str, Any]) -> bool:
        for inner in self.steps[before:]:
            self._handles.pop(id(inner.made), None)
        del self.steps[before:]
        if kwargs or not all(map(self._is_plain, step.args)):
            return False
        self.steps.append(step)
        self._handles[id(step.made)] = step.made
        return True

    def _is_plain(self, value: Any) -> bool:
        """Check whether a repeated call can pass an argument: a known handle, or a value without handles."""
        if isinstance(value, (list, tuple)):
            return not any(isinstance(one, TensorHandle) for one in value)
        return not isinstance(value, TensorHandle) or id(value) in self._handles


class Recorder(InterpreterBuilder):  # type: ignore[misc]
    """Builder with the state and behavior of the interpreter's builder, which also records every call.

    Attributes:
        record: record of the running operation; None between operations.
    """

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record: CallRecord | None = None
        # The recorder shares its state with the interpreter's builder, so both report the same program id and grid.
        self.__dict__ = interpreter_builder.__dict__  # type: ignore[misc]


def _recorded_method(name: str, method: Callable[..., Any]) -> Any:
    def called(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.record is None:
            return method(self, *args, **kwargs)
        return self.record.call(self, name, method, args, kwargs)

    return called


for _name in dir(InterpreterBuilder):
    if _name.startswith(("create_", "get_")) or _name in INNER_METHODS:
        setattr(Recorder, _name, _recorded_method(_name, getattr(InterpreterBuilder, _name)))
