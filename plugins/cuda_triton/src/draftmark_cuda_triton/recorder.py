"""The interpreter's builder, noting what one operation of the language asks of it.

What an operation asks depends on its operands' types and on its numbers, never on what a tensor holds. So what was
noted once can be asked again of other data; `recipe` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

INNER = ("binary_op", "cast_impl", "ternary_op", "unary_op")
"""Methods that most of the builder's public ones end in, some with NumPy's function as an argument."""


class Step(NamedTuple):
    """One call of the builder.

    Attributes:
        name: the method. args: its arguments, handles among them. made: the handle that came back, or None.
    """

    name: str
    args: tuple[Any, ...]
    made: Any


class Notes:
    """The calls that one operation makes.

    Of a call that only makes others, those are kept. Of a call whose result comes from elsewhere (from NumPy), the call
    itself is, and so is one without a result: it stores.

    Args:
        operands: the handles that the operation is given, no two the same.

    Attributes:
        steps: the calls, in order. complete: whether they are all that happened.
    """

    def __init__(self, operands: Sequence[Any]) -> None:
        self.steps: list[Step] = []
        self.complete = True
        # The handles themselves: the identity of one that is gone may be another's.
        self._known = {id(one): one for one in operands}
        self._depth = 0

    def call(self, builder: Recorder, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one of the builder's methods, and note it unless all it did is noted already."""
        before = len(self.steps)
        self._depth += 1
        made = method(builder, *args, **kwargs)
        self._depth -= 1
        if isinstance(made, TensorHandle):
            noted = id(made) in self._known or self._note(before, Step(name, args, made), kwargs)
        elif made is None and name.startswith("create_"):
            noted = self._note(before, Step(name, args, None), kwargs)
        else:
            noted = not isinstance(made, (list, tuple))  # a type, or an option
        # What is done with a handle made by hand is left to the call around this one, if there is one.
        self.complete = self.complete and (noted or self._depth > 0)
        return made

    def has(self, handle: Any) -> bool:
        """Whether a handle came from a call that was noted, or was given; a store's is None."""
        return handle is None or id(handle) in self._known

    def _note(self, before: int, step: Step, kwargs: dict[str, Any]) -> bool:
        for inner in self.steps[before:]:
            self._known.pop(id(inner.made), None)
        del self.steps[before:]
        if kwargs or not all(map(self._is_plain, step.args)):
            return False
        self.steps.append(step)
        self._known[id(step.made)] = step.made
        return True

    def _is_plain(self, value: Any) -> bool:
        """Whether a later call can be given the same: a known handle, or what holds none."""
        if isinstance(value, (list, tuple)):
            return not any(isinstance(one, TensorHandle) for one in value)
        return not isinstance(value, TensorHandle) or id(value) in self._known


class Recorder(InterpreterBuilder):  # type: ignore[misc]
    """Works as the interpreter's builder does, with its state, and tells `notes` of every call.

    Attributes:
        notes: of the operation under way; None between operations.
    """

    __slots__ = ("notes",)

    def __init__(self) -> None:
        self.notes: Notes | None = None
        # One grid, whoever is asked for the program's place in it.
        self.__dict__ = interpreter_builder.__dict__  # type: ignore[misc]


def _told(name: str, method: Callable[..., Any]) -> Any:
    def called(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.notes is None:
            return method(self, *args, **kwargs)
        return self.notes.call(self, name, method, args, kwargs)

    return called


for _name in dir(InterpreterBuilder):
    if _name.startswith(("create_", "get_")) or _name in INNER:
        setattr(Recorder, _name, _told(_name, getattr(InterpreterBuilder, _name)))
