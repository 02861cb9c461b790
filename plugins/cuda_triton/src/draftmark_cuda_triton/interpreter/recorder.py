"""The interpreter's builder, noting what one operation of the language asks of it.

What an operation asks depends on its operands' types and on its numbers, never on what a tensor holds. So what was
noted once can be asked again of other data; `recipe` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

INNER_METHODS = ("binary_op", "cast_impl", "ternary_op", "unary_op")
"""Methods that most of the builder's public ones end in, some with NumPy's function as an argument."""


class BuilderCall(NamedTuple):
    """One call of the builder.

    Attributes:
        name: the method. args: its arguments, handles among them. made: the handle that came back, or None.
    """

    name: str
    args: tuple[Any, ...]
    made: Any


class CallRecord:
    """The calls that one operation makes.

    Of a call that only makes others, those are kept. Of a call whose result comes from elsewhere (from NumPy), the call
    itself is, and so is one without a result: it stores.

    Args:
        operands: the handles that the operation is given, no two the same.

    Attributes:
        steps: the calls, in order. complete: whether they are all that happened.
    """

    def __init__(self, operands: Sequence[Any]) -> None:
        self.steps: list[BuilderCall] = []
        self.complete = True
        # The handles themselves: the identity of one that is gone may be another's.
        self._handles = {id(one): one for one in operands}
        self._depth = 0

    def call(self, builder: Recorder, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one of the builder's methods, and note it unless all it did is noted already."""
        before = len(self.steps)
        self._depth += 1
        made = method(builder, *args, **kwargs)
        self._depth -= 1
        if isinstance(made, TensorHandle):
            kept = id(made) in self._handles or self._keep(before, BuilderCall(name, args, made), kwargs)
        elif made is None and name.startswith("create_"):
            kept = self._keep(before, BuilderCall(name, args, None), kwargs)
        else:
            kept = not isinstance(made, (list, tuple))  # a type, or an option
        # What is done with a handle made by hand is left to the call around this one, if there is one.
        self.complete = self.complete and (kept or self._depth > 0)
        return made

    def produced(self, handle: Any) -> bool:
        """Whether a handle came from a call that was noted, or was given; a store's is None."""
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
        """Whether a later call can be given the same: a known handle, or what holds none."""
        if isinstance(value, (list, tuple)):
            return not any(isinstance(one, TensorHandle) for one in value)
        return not isinstance(value, TensorHandle) or id(value) in self._handles


class Recorder(InterpreterBuilder):  # type: ignore[misc]
    """Works as the interpreter's builder does, with its state, and tells `record` of every call.

    Attributes:
        record: of the operation under way; None between operations.
    """

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record: CallRecord | None = None
        # One grid, whoever is asked for the program's place in it.
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
