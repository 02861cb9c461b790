"""Recipe of an interpreted operation for given operand types: the builder calls that remain to be repeated.

In every operation Triton's interpreter derives types and shapes, and checks and names each value. This takes most of
its time. A recipe contains only the builder calls that compute or store data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
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
"""Builder calls without side effects, in addition to get_… calls. A call with an unused result is dropped, and a call
with constant operands runs once."""
MAX_CONSTANT_CELLS = 2**16
"""Maximum cells of a constant that a recipe keeps for all programs."""

Recipe = Callable[[Sequence[Any]], Any]
"""Function from the operands' handles to the operation's result: a tensor, or None for a store."""


class _Call(NamedTuple):
    """Holds a builder call, and the index of each of its handles among the operands, constants and earlier results.

    Attributes:
        pick: returns the tuple of its handles from the list of all values.
    """

    run: Callable[..., Any]
    positions: tuple[int, ...]
    pick: Callable[[Sequence[Any]], Any]


def recipe_of(record: CallRecord, operands: Sequence[Any], made: Any) -> Recipe | None:
    """Return the recipe of an operation that ran once, or None if it cannot be repeated from its handles.

    Args:
        record: builder calls of the operation.
        operands: handles of its operands.
        made: its result.
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
    calls = [_call(_runner(step), tuple(positions[id(one)] for one in _handles(step))) for step in left]
    position = None if made is None or made.handle is None else positions[id(made.handle)]
    return (
        _store_recipe(constants, calls, made)
        if position is None
        else _tensor_recipe(len(operands), constants, calls, position, made)
    )


def set_signature(value: Any) -> object:
    """Store and return a tensor's signature: all that decides how operations treat it. Equal signatures are one object.

    The handle's dtype counts too, because a comparison yields a bool tensor with a handle of its operands' dtype.
    """
    known = value.type.name, value.handle.dtype.name, value.handle.data.dtype.str
    value.signature = _SIGNATURES.setdefault(known, object())
    return value.signature


_SIGNATURES: dict[tuple[str, str, str], object] = {}


def _store_recipe(constants: list[Any], calls: list[_Call], made: Any) -> Recipe:
    def run(operands: Sequence[Any]) -> Any:
        values = [*operands, *constants]
        for call, _, pick in calls:
            values.append(call(*pick(values)))
        return made

    return run


def _call(run: Callable[..., Any], positions: tuple[int, ...]) -> _Call:
    if len(positions) > 1:
        return _Call(run, positions, itemgetter(*positions))  # returns a tuple for two positions or more
    return _Call(run, positions, lambda values: tuple(values[one] for one in positions))


def _tensor_recipe(count: int, constants: list[Any], calls: list[_Call], position: int, made: Any) -> Recipe:
    new, tensor = object.__new__, core.tensor
    set_signature(made)
    known = {name: value for name, value in vars(made).items() if name != "handle"}

    def run(operands: Sequence[Any]) -> Any:
        values = [*operands, *constants]
        for call, _, pick in calls:
            values.append(call(*pick(values)))
        result = new(tensor)
        result.__dict__ = {**known, "handle": values[position]}
        return result

    if len(calls) != 1:
        return run
    only, among, pick = calls[0]
    if among == tuple(range(count)) and not constants:

        def run_direct(operands: Sequence[Any]) -> Any:
            result = new(tensor)
            result.__dict__ = {**known, "handle": only(*operands)}
            return result

        return run_direct

    def run_one(operands: Sequence[Any]) -> Any:
        result = new(tensor)
        result.__dict__ = {**known, "handle": only(*pick((*operands, *constants)))}
        return result

    return run_one


def _needed_steps(steps: Sequence[BuilderCall], made: Any) -> list[BuilderCall]:
    """Return the steps, except steps without a side effect that produce unused results."""
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
    """Return a function that repeats a step from its handles."""
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
