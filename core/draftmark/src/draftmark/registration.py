"""Import of a plugin's entry point, and checks of its hooks before the first hook call. Does not import torch."""

from __future__ import annotations

import importlib.metadata as md
import inspect
from typing import Any

import pluggy

from .errors import BackendLoadError, LoadFailure
from .hookspecs import HOOKS, OPTIONAL_HOOKS, PREFIX, SPECS, hook_arguments, hooks_of
from .plugin import BackendPlugin
from .version import CONTRACT_MAJOR, CONTRACT_MINOR


def plugin_of(entry: md.EntryPoint) -> object:
    """Import the object that an entry point names; create an instance if the object is a class.

    Raises:
        BackendLoadError: the import raised, or the class lacks a method.
    """
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as error:  # a plugin may raise anything during import
        raise BackendLoadError(
            entry.name,
            LoadFailure.IMPORT_ERROR,
            f"importing {entry.value} raised {one_line(error)}",
            "reinstall the plugin, and keep vendor imports inside open_backend, graph_state and tree_ops",
        ) from error
    return _instance(entry.name, plugin) if isinstance(plugin, type) else plugin


def register(name: str, plugin: object) -> Any:
    """Register `plugin` in its own plugin manager, check its hooks, and return them."""
    manager = pluggy.PluginManager("draftmark")
    manager.add_hookspecs(SPECS)
    if isinstance(plugin, BackendPlugin):
        _check_methods(name, plugin)
    else:
        _require_hooks(name, plugin, manager)
    try:
        manager.register(hooks_of(plugin) if isinstance(plugin, BackendPlugin) else plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _validation_failure(name, error) from error
    return manager.hook


def _require_hooks(name: str, plugin: object, manager: pluggy.PluginManager) -> None:
    # hasattr comes first, because parse_hookimpl_opts of pluggy before 1.7 raises AttributeError for an absent name.
    named = [hook for hook in HOOKS if hasattr(plugin, hook)]
    present = [hook for hook in named if manager.parse_hookimpl_opts(plugin, hook) is not None]
    missing = [hook for hook in HOOKS if hook not in present]
    if missing:
        raise BackendLoadError(
            name,
            LoadFailure.MISSING_HOOK,
            f"{', '.join(missing)} not implemented",
            "derive the plugin from draftmark.BackendPlugin, or decorate all six hooks with draftmark.hookimpl",
        )


def _instance(name: str, plugin: type) -> object:
    """Return an instance of the plugin class; raise an error that names its missing abstract methods."""
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        cause = f"{plugin.__name__} does not define {', '.join(missing)}"
        raise BackendLoadError(name, LoadFailure.MISSING_HOOK, cause, "see draftmark.BackendPlugin")
    try:
        return plugin()
    except (Exception, SystemExit) as error:
        cause = f"{plugin.__name__}() raised {one_line(error)}"
        raise BackendLoadError(
            name, LoadFailure.IMPORT_ERROR, cause, "make the plugin class callable without arguments"
        ) from error


def _check_methods(name: str, plugin: BackendPlugin) -> None:
    """Check that each method accepts its hook's arguments; pluggy sees only the wrappers of `hooks_of`."""
    for hook, arguments in hook_arguments().items():
        method = getattr(plugin, hook.removeprefix(PREFIX))
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            expected = f"{hook.removeprefix(PREFIX)}({', '.join(('self', *arguments))})"
            cause = f"{method.__qualname__}{inspect.signature(method)}: {error}"
            raise BackendLoadError(name, LoadFailure.WRONG_SIGNATURE, cause, f"write {expected}") from error


def one_line(error: BaseException) -> str:
    """Return the type and text of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _validation_failure(name: str, error: pluggy.PluginValidationError) -> BackendLoadError:
    text = " ".join(str(error).split())
    if "unknown hook" in text:
        known = f"contract v{CONTRACT_MAJOR}.{CONTRACT_MINOR} has the hooks {', '.join(HOOKS + OPTIONAL_HOOKS)}"
        return BackendLoadError(name, LoadFailure.UNKNOWN_HOOK, text, known)
    expected = "; ".join(f"{hook}({', '.join(args)})" for hook, args in hook_arguments().items())
    return BackendLoadError(name, LoadFailure.WRONG_SIGNATURE, text, f"the signatures are {expected}")
