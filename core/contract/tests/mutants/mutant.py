"""`Mutant`: a correct plugin with one defect in a hook or step method; also helpers that patch a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from draftmark import BufferSpec, Geometry, Mode
from draftmark.batch import ForwardBatch
from draftmark.hookspecs import HOOKS, PREFIX, STATE_HOOKS, hookimpl, hooks_of
from draftmark.loaded import LoadedBackend
from draftmark.plugin import BackendPlugin
from draftmark.registry import load
from draftmark.tree import TorchTreeOps
from draftmark_contract.notes import notes_of
from draftmark_cuda_triton import TritonPlugin
from draftmark_reference import ReferencePlugin

from .designs import tutorial
from .designs.csr_plugin import CsrPlugin
from .standalone.installed import install

LAYOUTS: dict[str, BackendPlugin] = {
    "reference": ReferencePlugin(),
    "csr": CsrPlugin(),
    "tutorial": tutorial.Plugin(),
    "cuda_triton": TritonPlugin(),
}
"""Correct backends to mutate, by layout.

``reference`` reads the batch's page table in place, ``csr`` copies it to an indptr and indices, ``tutorial`` is the
backend of the tutorial, ``cuda_triton`` schedules tiles on the device and runs in Triton's interpreter here.
"""
USUAL = ("reference", "csr")
ONLY = "a subclass of the tutorial's backend"
NOTES = ("layouts", "usage")
"""Contract notes: functions that a plugin declares to the suite only. Mutants can change them as they change hooks."""
METHODS = ("plan", "write_metadata", "write_kv", "attend")
KINDS = {
    "M": "known bugs",
    **dict.fromkeys("VWXYZLNPBJQGIUKHFAEDC", "the suite's authors"),
    **dict.fromkeys("ORST", "outside authors"),
}
"""Origin of a mutant, by the first letter of its id."""
BY_CLASS = "ST"
"""First letters of the ids that must be killed by the check of their class; no other check runs on them."""


@dataclass(frozen=True)
class Mutant:
    """A correct backend with one defect.

    Attributes:
        id: ``M01`` … ``M33`` as in the collection of known bugs; other first letters name the author's group (`KINDS`).
        what: one sentence that says what the wrong code does, without a full stop.
        source: a public issue about a bug of this kind, or the reason for the mutant.
        hooks: hook name without ``draftmark_``, ``layouts`` or ``usage`` → function of (geometry, result) that returns
            the broken result. A function with three parameters also receives the hook's second argument.
        patch: function that changes an opened backend in place.
        layouts: keys of `LAYOUTS` in which the defect is possible.
        absent: the reason why the defect is impossible in the other layouts.
        plugin: a subclass of the tutorial's plugin; replaces `hooks` and `patch`.
        usage: the `usage` function of `plugin`.
        standalone: ``"module:class"`` of a plugin that other processes load too; replaces all other fields.
        state_patch: function that changes an opened backend of recurrent state in place.
        base: correct plugin to change instead of the one of the layout.
        of_state: True for a defect of recurrent state, which only the checks of recurrent state can find.
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
    standalone: str = ""
    state_patch: Callable[[Any], None] | None = None
    base: BackendPlugin | None = None
    of_state: bool = False

    @property
    def origin(self) -> str:
        """Group of its author; outside authors had not read the suite."""
        return KINDS[self.id[0]]

    def build(self, layout: str) -> LoadedBackend:
        """Return the loaded plugin with this defect, in one metadata layout."""
        if self.standalone:
            return load(self.id.lower())
        if self.plugin is not None:
            return tutorial.loaded(self.plugin, self.usage)
        base = self.base or LAYOUTS[layout]
        return LoadedBackend(base.info.name, SimpleNamespace(**self._functions(base)))

    def _functions(self, base: BackendPlugin) -> dict[str, Any]:
        names = (*HOOKS, *(f"{PREFIX}{name}" for name in STATE_HOOKS))
        found = {name: vars(hooks_of(base))[name] for name in names}
        given = notes_of(base)
        notes = {name: getattr(given, name, _no_usage) for name in NOTES}
        roles = getattr(given, "roles", {})
        changes = dict(self.hooks or {})
        if "tree_ops" in changes:  # the base plugins of the mutants do not implement this optional hook
            found["draftmark_tree_ops"] = lambda geometry, device: TorchTreeOps(geometry)
        if self.patch is not None:
            patch = self.patch
            changes["open_backend"] = lambda geometry, backend: (patch(backend), backend)[1]
        if self.state_patch is not None:
            state_patch = self.state_patch
            changes["open_state"] = lambda geometry, backend: (state_patch(backend), backend)[1]
        for name, change in changes.items():
            hook = f"draftmark_{name}"
            if name in NOTES:
                notes[name] = _changed(notes[name], change)
            else:
                found[hook] = hookimpl(_changed(found[hook], change))
        found["contract_notes"] = lambda: SimpleNamespace(**notes, roles=roles)
        return found


def standalone(plugin: str, layout: str) -> dict[str, Any]:
    """Return the fields of a `Mutant` that is a plugin (``"module:class"``) of the package `standalone`."""
    return {
        "standalone": f"{__package__}.standalone.{plugin}",
        "layouts": (layout,),
        "absent": "a plugin of its own, which any process can load, has one layout",
    }


def install_standalone(mutants: Iterable[Mutant]) -> None:
    """Make the plugins of these mutants, and a correct plugin of each layout, loadable by name in any process."""
    twins = {f"twin_{layout}": f"{__package__}.standalone.bases:twin_{layout}" for layout in LAYOUTS}
    install(twins | {one.id.lower(): one.standalone for one in mutants if one.standalone})


def _no_usage(geometry: Geometry, batch: Any) -> dict[str, int]:
    """Return an empty usage, because the backends of `LAYOUTS` own no workspace buffer."""
    return {}


def _changed(original: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)
    given = len(inspect.signature(change).parameters) - 1

    def call(*args: Any) -> Any:
        return change(*(args or (None,))[:1], original(*args), *args[1:given])

    # pluggy reads argument names, so the wrapper needs the argument names of the hook.
    scope: dict[str, Any] = {"call": call}
    exec(f"def hook({', '.join(names)}):\n    return call({', '.join(names)})", scope)
    return scope["hook"]


class BrokenMutant(BaseException):
    """Raised if a mutant changes a method that does not exist. The suite would count an `Exception` as a kill."""


def _method(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise BrokenMutant(f"a mutant changes {type(owner).__name__}.{name}, which does not exist (any more)")
    return getattr(owner, name)


def after(backend: Any, method: str, then: Callable[..., None]) -> None:
    """Patch a method to call `then` with the method's arguments after the original body."""
    original = _method(backend, method)

    def changed(*args: Any) -> None:
        original(*args)
        then(*args)

    setattr(backend, method, changed)


def around(backend: Any, method: str, call: Callable[..., None]) -> None:
    """Replace a method of the backend by ``call(original, *args)``."""
    original = _method(backend, method)
    setattr(backend, method, lambda *args: call(original, *args))


def new_slots(backend: Any) -> None:
    """Move the backend's slot mapping to newly allocated memory, in the arena and in the backend's attribute."""
    fresh = backend.arena._tensors["slot_mapping"] = torch.empty_like(backend.arena["slot_mapping"])
    if "_slots" in vars(backend):
        backend._slots = fresh


def forgets_cap(*modes: Mode) -> Callable[[Any], None]:
    """Return a patch that ignores the soft cap in these modes."""

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
    """Return a patch that passes a changed batch to some methods (all four by default)."""

    def patch(backend: Any) -> None:
        for method in methods or METHODS:
            at = {"plan": 0, "write_metadata": 0, "write_kv": 3, "attend": 2}[method]

            def call(original: Callable[..., None], *args: Any, _at: int = at) -> None:
                args = (*args[:_at], change(backend, args[_at]), *args[_at + 1 :])
                original(*args)

            around(backend, method, call)

    return patch


def resized(name: str, shape: Callable[[Geometry, tuple[int, ...]], tuple[int, ...]]) -> dict[str, Any]:
    """Return a `buffers` hook that changes the shape of one buffer if the buffer exists."""

    def change(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [replace(one, shape=shape(geometry, one.shape)) if one.name == name else one for one in specs]

    return {"buffers": change}


def shaped(**fields: Any) -> Callable[[Any], None]:
    """Return a patch that changes fields of the opened backend's attention shape.

    A callable value receives the correct attention shape.
    """

    def patch(backend: Any) -> None:
        attention = backend.geometry.attention
        new = {name: value(attention) if callable(value) else value for name, value in fields.items()}
        backend.geometry = replace(backend.geometry, attention=replace(attention, **new))

    return patch
