"""Cache for functions of Triton's language: each is evaluated once per combination of operand types and constants.

Triton's evaluation of an operation never depends on the values in a tensor. Kernels branch on values only by `if` and
`range`, which are not functions of the language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime.interpreter import TensorHandle

from .operands import Operands
from .recipe import Recipe, recipe_of, set_signature
from .recorder import CallRecord, Recorder

PLAIN = frozenset({bool, float, str, type(None)})
"""Argument types that enter a key by their `repr`, since 0.0 == -0.0 and 1 == True but they are different arguments."""


class NoKey(Exception):
    """Raised if an argument of an operation cannot be part of a cache key."""


class Operations:
    """Caches recorded operations of the language's functions while a kernel is interpreted."""

    def __init__(self) -> None:
        self._builder = Recorder()
        self._semantic = Operands(self._builder)
        self._recipes: dict[tuple[Any, ...], Recipe | None] = {}

    def cached(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a cache of recorded operations, by operand types and constants."""
        recipes, builder, semantic = self._recipes, self._builder, self._semantic
        tensor, dtype = core.tensor, core.dtype

        def computed(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                kwargs.pop("_semantic", None)
            if builder.record is not None:  # inner call of an operation that is being recorded
                return function(*args, _semantic=semantic, **kwargs)
            if len(args) == 2 and not kwargs and type(args[0]) is tensor:  # most operations: the same key, sooner
                first, second = args[0].__dict__, args[1]
                if type(second) is tensor:
                    last = second.__dict__
                    recipe = recipes.get((function, first.get("signature"), last.get("signature")))
                    if recipe is not None:
                        return recipe((first["handle"], last["handle"]))
                elif type(second) is int:
                    recipe = recipes.get((function, first.get("signature"), second))
                    if recipe is not None:
                        return recipe((first["handle"],))
                elif type(second) is dtype:
                    recipe = recipes.get((function, first.get("signature"), dtype, second.name))
                    if recipe is not None:
                        return recipe((first["handle"],))
            key: list[Any] = [function]
            handles: list[Any] = []
            try:
                for one in args:
                    kind = type(one)
                    if kind is tensor:
                        known = one.__dict__
                        key.append(known["signature"] if "signature" in known else set_signature(one))
                        handles.append(known["handle"])
                    elif kind is int:
                        key.append(one)
                    else:
                        _append_key(one, key, handles)
                for name, one in kwargs.items():
                    key.append(name)
                    _append_key(one, key, handles)
            except NoKey:
                return function(*args, _semantic=semantic, **kwargs)
            whole = tuple(key)
            try:
                recipe = recipes[whole]
            except KeyError:
                return self._record(function, whole, args, kwargs)
            return function(*args, _semantic=semantic, **kwargs) if recipe is None else recipe(handles)

        return computed

    def _record(self, function: Callable[..., Any], key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """Run an operation and store its recipe."""
        operands: list[Any] = []
        args = _with_own_handles(args, operands)
        kwargs = {name: _with_own_handles(one, operands) for name, one in kwargs.items()}
        self._builder.record = record = CallRecord(operands)
        try:
            made = function(*args, _semantic=self._semantic, **kwargs)
        finally:
            self._builder.record = None
        self._recipes[key] = recipe_of(record, operands, made)
        return made


def _append_key(value: Any, key: list[Any], handles: list[Any]) -> None:
    """Append an argument's part of the cache key to `key`, and its tensor handles to `handles`.

    Raises:
        NoKey: the argument is not a tensor, number, type or sequence of these.
    """
    kind = type(value)
    if kind is core.tensor:
        key.append(value.__dict__.get("signature") or set_signature(value))
        handles.append(value.handle)
    elif kind is int:
        key.append(value)
    elif kind in PLAIN:
        key.append(repr(value))
    elif kind is slice and value.start is value.stop is value.step is None:
        key.append(slice)
    elif kind is core.constexpr:
        key.append(core.constexpr)
        _append_key(value.value, key, handles)
    elif isinstance(value, core.dtype):
        key += (core.dtype, value.name)
    elif kind in (list, tuple, core.tuple):
        key += (kind, len(value))
        for one in value:
            _append_key(one, key, handles)
    else:
        raise NoKey


def _with_own_handles(value: Any, handles: list[Any]) -> Any:
    """Return the argument with new tensor handles, appended to `handles`, so that equal operands have distinct ones."""
    kind = type(value)
    if kind is core.tensor:
        handles.append(TensorHandle(value.handle.data, value.handle.dtype))
        return core.tensor(handles[-1], value.type)
    if kind in (list, tuple):
        return kind(_with_own_handles(one, handles) for one in value)
    return value
