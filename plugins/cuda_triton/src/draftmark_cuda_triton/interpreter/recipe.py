"""What one operation of the interpreted language comes to for operands of given types, ready to be done again.

Triton's interpreter works out at every operation what types become and which shapes meet, and checks and names every
value that it makes; that is most of its time. A recipe is the builder's calls that are left over from all that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton.language import core
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from .recorder import BuilderCall, CallRecord
from .shortcuts import shortcut

PURE = frozenset(
    {
        *("binary_op", "cast_impl", "ternary_op", "unary_op", "create_bitcast", "create_broadcast", "create_dot"),
        *("create_expand_dims", "create_fp_to_fp", "create_idiv", "create_make_range", "create_reshape"),
        *("create_splat", "create_trans"),
    }
)
"""Calls, beside those of numbers (get_…), that read their operands alone: unless somebody asks for their result they
are left out, and of operands that are always the same they are made once."""
MAX_CONSTANT_CELLS = 2**16
"""Cells of a constant that is kept for all programs at most."""

Recipe = Callable[[Sequence[Any]], Any]
"""From the operands' handles to the operation's result: a tensor, or None of a store."""


class _Call(NamedTuple):
    """A step and where its handles lie among the operands, constants and earlier results."""

    run: Callable[..., Any]
    positions: tuple[int, ...]


def recipe_of(record: CallRecord, operands: Sequence[Any], made: Any) -> Recipe | None:
    """The recipe of an operation that was done once.

    Args:
        record: what it did. operands: the handles that it was given. made: its result.

    Returns:
        None where it did something that cannot be done again from handles alone.
    """
    if not record.complete or not (made is None or (type(made) is core.tensor and record.produced(made.handle))):
        return None
    steps = _needed_steps(record.steps, made)
    constants: list[Any] = []
    fixed: set[int] = set()
    left: list[BuilderCall] = []
    for step in steps:
        if (
            _is_pure(step)
            and all(id(one) in fixed for one in _handles(step))
            and step.made.data.size <= MAX_CONSTANT_CELLS
        ):
            constants.append(step.made)
            fixed.add(id(step.made))
        else:
            left.append(step)
    order = [*operands, *constants, *(step.made for step in left)]
    positions = {id(one): position for position, one in enumerate(order) if one is not None}
    calls = [_Call(_runner(step), tuple(positions[id(one)] for one in _handles(step))) for step in left]
    position = None if made is None or made.handle is None else positions[id(made.handle)]
    return (
        _store_recipe(constants, calls, made) if position is None else _tensor_recipe(constants, calls, position, made)
    )


def set_signature(value: Any) -> object:
    """Keep with a tensor what stands for all of it that decides what an operation does; equal tensors share one.

    A comparison's handle is of its operands' dtype, while the tensor is of bool: that is how the interpreter has them.
    """
    known = value.type.name, value.handle.dtype.name, value.handle.data.dtype.str
    value.signature = _SIGNATURES.setdefault(known, object())
    return value.signature


_SIGNATURES: dict[tuple[str, str, str], object] = {}


def _store_recipe(constants: list[Any], calls: list[_Call], made: Any) -> Recipe:
    def run(operands: Sequence[Any]) -> Any:
        values = [*operands, *constants]
        for call, positions in calls:
            values.append(call(*[values[position] for position in positions]))
        return made

    return run


def _tensor_recipe(constants: list[Any], calls: list[_Call], position: int, made: Any) -> Recipe:
    new, tensor = object.__new__, core.tensor
    set_signature(made)
    known = {name: value for name, value in vars(made).items() if name != "handle"}

    def run(operands: Sequence[Any]) -> Any:
        values = [*operands, *constants]
        for call, positions in calls:
            values.append(call(*[values[one] for one in positions]))
        result = new(tensor)
        result.__dict__ = {**known, "handle": values[position]}
        return result

    if len(calls) != 1:
        return run
    only, among = calls[0]

    def run_one(operands: Sequence[Any]) -> Any:
        values = [*operands, *constants]
        result = new(tensor)
        result.__dict__ = {**known, "handle": only(*[values[one] for one in among])}
        return result

    return run_one


def _needed_steps(steps: Sequence[BuilderCall], made: Any) -> list[BuilderCall]:
    """The steps without those whose results nobody reads."""
    wanted = set() if made is None else {id(made.handle)}
    kept = []
    for step in reversed(steps):
        if not _is_pure(step) or id(step.made) in wanted:
            wanted |= {id(one) for one in _handles(step)}
            kept.append(step)
    return kept[::-1]


def _is_pure(step: BuilderCall) -> bool:
    return step.name in PURE or step.name.startswith("get_")


def _handles(step: BuilderCall) -> list[Any]:
    return [one for one in step.args if isinstance(one, TensorHandle)]


def _runner(step: BuilderCall) -> Callable[..., Any]:
    """A function of the step's handles that does the step."""
    found = shortcut(step)
    if found is not None:
        return found
    method = getattr(interpreter_builder, step.name)
    holes = [position for position, one in enumerate(step.args) if isinstance(one, TensorHandle)]
    literals = [None if isinstance(one, TensorHandle) else one for one in step.args]

    def run(*handles: Any) -> Any:
        args = literals.copy()
        for position, one in zip(holes, handles, strict=True):
            args[position] = one
        return method(*args)

    return run
