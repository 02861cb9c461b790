"""What a mutant is: a correct plugin whose hooks or step methods are changed in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from draftmark import BufferSpec, Geometry, Mode
from draftmark.batch import ForwardBatch
from draftmark.hookspecs import HOOKS, hookimpl
from draftmark.loaded import LoadedBackend
from draftmark.plugin import BackendPlugin
from draftmark.reference import ReferencePlugin
from draftmark.tree import TorchTreeOps

from . import tutorial
from .csr_backend import CsrPlugin

LAYOUTS: dict[str, BackendPlugin] = {
    "reference": ReferencePlugin(),
    "csr": CsrPlugin(),
    "tutorial": tutorial.Plugin(),
}
"""Correct backends: the batch's page table read in place, indptr with indices, and what a newcomer begins with."""
USUAL = ("reference", "csr")
ONLY = "a subclass of the tutorial's backend"
NOTES = ("layouts", "usage")
"""What a plugin tells the suite alone; a mutant changes them like hooks."""
METHODS = ("plan", "write_metadata", "write_kv", "attend")
KINDS = {"M": "known bugs", **dict.fromkeys("VWXYZLN", "the suite's authors"), **dict.fromkeys("RST", "strangers")}
"""Who thought of a mutant, by the first letter of its id. Strangers had not read the suite when they did."""
BY_CLASS = "ST"
"""First letters of those that are held against the check of their class alone."""


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        id: ``M01`` … ``M33`` as in the collection of known bugs; the first letter of others says whose they are
            (`KINDS`).
        what: the defect, in a few words.
        source: a public thread with such a bug.
        hooks: hook name (without prefix), ``layouts`` or ``usage`` → function of (geometry, result) that returns the
            broken result; one that takes three arguments is given the hook's second one too.
        patch: changes an opened backend in place.
        layouts: where the defect can be made.
        absent: layout → why it cannot, for the others.
        plugin, usage: in place of `hooks` and `patch`, a subclass of the tutorial's plugin, and its `usage`.
    """

    id: str
    what: str
    source: str
    hooks: dict[str, Callable[..., Any]] | None = None
    patch: Callable[[Any], None] | None = None
    layouts: tuple[str, ...] = USUAL
    absent: str = ""
    plugin: type[BackendPlugin] | None = None
    usage: Callable[..., dict[str, int]] | None = None

    def build(self, layout: str) -> LoadedBackend:
        """The broken plugin, loaded."""
        if self.plugin is not None:
            made = self.plugin()
            made.contract_notes = lambda: tutorial.notes(self.usage)  # type: ignore[method-assign]
            return LoadedBackend("tugboat", made)
        return LoadedBackend(layout, SimpleNamespace(**self._functions(LAYOUTS[layout])))

    def _functions(self, base: BackendPlugin) -> dict[str, Any]:
        found = {name: getattr(base, name) for name in HOOKS}
        given = base.contract_notes()
        notes = {name: getattr(given, name, _no_usage) for name in NOTES}
        changes = dict(self.hooks or {})
        if "tree_ops" in changes:  # the optional hook: both layouts leave it to the core
            found["draftmark_tree_ops"] = lambda geometry, device: TorchTreeOps(geometry)
        if self.patch is not None:
            patch = self.patch
            changes["open_backend"] = lambda geometry, backend: (patch(backend), backend)[1]
        for name, change in changes.items():
            hook = f"draftmark_{name}"
            if name in NOTES:
                notes[name] = _changed(notes[name], change)
            else:
                found[hook] = hookimpl(_changed(found[hook], change))
        found["draftmark_contract_notes"] = hookimpl(lambda: SimpleNamespace(**notes))
        return found


def _no_usage(geometry: Geometry, batch: Any) -> dict[str, int]:
    """Both layouts have no buffer of their own role."""
    return {}


def _changed(original: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)
    given = len(inspect.signature(change).parameters) - 1

    def call(*args: Any) -> Any:
        return change(*(args or (None,))[:1], original(*args), *args[1:given])

    # pluggy reads argument names, so a wrapper needs the hook's own ones.
    scope: dict[str, Any] = {"call": call}
    exec(f"def hook({', '.join(names)}):\n    return call({', '.join(names)})", scope)
    return scope["hook"]


class BrokenMutant(BaseException):
    """A mutant that no longer fits what it changes. Not an Exception: every check would take it for a kill."""


def _method(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise BrokenMutant(f"a mutant changes {type(owner).__name__}.{name}, which does not exist (any more)")
    return getattr(owner, name)


def after(backend: Any, method: str, then: Callable[..., None]) -> None:
    """Run `then` with the method's arguments after it."""
    original = _method(backend, method)

    def changed(*args: Any) -> None:
        original(*args)
        then(*args)

    setattr(backend, method, changed)


def around(backend: Any, method: str, call: Callable[..., None]) -> None:
    """Replace a method by ``call(original, *args)``."""
    original = _method(backend, method)
    setattr(backend, method, lambda *args: call(original, *args))


def new_slots(backend: Any) -> None:
    """Give the backend a slot mapping in memory of its own, in the arena and wherever it keeps it."""
    block = backend.arena._blocks["slot_mapping"]
    fresh = replace(block, tensor=torch.empty_like(block.tensor))
    backend.arena._blocks["slot_mapping"] = fresh
    if "_slots" in vars(backend):
        backend._slots = fresh.tensor


def forgets_cap(*modes: Mode) -> Callable[[Any], None]:
    """The soft cap is forgotten in these modes."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
            right = backend.geometry
            if batch.mode in modes:
                backend.geometry = replace(right, attention=replace(right.attention, logits_soft_cap=0.0))
            original(q, cache, batch, out)
            backend.geometry = right

        around(backend, "attend", call)

    return patch


def on_batch(change: Callable[[Any, ForwardBatch], ForwardBatch], *methods: str) -> Callable[[Any], None]:
    """A patch that shows another batch to some methods (all four unless named)."""

    def patch(backend: Any) -> None:
        for method in methods or METHODS:
            at = {"plan": 0, "write_metadata": 0, "write_kv": 3, "attend": 2}[method]

            def call(original: Callable[..., None], *args: Any, _at: int = at) -> None:
                args = (*args[:_at], change(backend, args[_at]), *args[_at + 1 :])
                original(*args)

            around(backend, method, call)

    return patch


def resized(name: str, shape: Callable[[Geometry, tuple[int, ...]], tuple[int, ...]]) -> dict[str, Any]:
    """A `buffers` hook that gives one buffer another shape, where it exists."""

    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, shape=shape(geometry, one.shape)) if one.name == name else one for one in specs]

    return {"buffers": change}


def shaped(**fields: Any) -> Callable[[Any], None]:
    """A patch that gives the opened backend another attention shape; values may be functions of the right one."""

    def patch(backend: Any) -> None:
        attention = backend.geometry.attention
        new = {name: value(attention) if callable(value) else value for name, value in fields.items()}
        backend.geometry = replace(backend.geometry, attention=replace(attention, **new))

    return patch
