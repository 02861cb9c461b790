"""The hooks on SGLang, all through its own `HookRegistry`, each with what would be missing without it.

A failed hook is logged by SGLang and swallowed, so `missing_hooks` is asked when a backend is built (`refusals`). A
drift test holds each target and what is assumed of it against every supported release.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import WrapperDescriptorType
from typing import Any

from . import NAME

SPECULATIVE = "sglang.srt.speculative"
REFUSALS = ("speculative_eagle_topk > 1 with page_size > 1", "is unstable and produces incorrect results for paged")
"""Of the two sentences with which SGLang refuses trees at page sizes above 1, a part of each."""

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""The server arguments that name the target's attention backend."""


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        target: what is hooked, by its dotted path.
        kind: SGLang's `HookType`, by name.
        function: what is hooked in.
        algorithms: the speculative algorithms that need it; ``""`` for plain decoding.
        why: what is missing without it.
        before: where older releases have it.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    algorithms: tuple[str, ...]
    why: str
    before: str = ""

    def here(self) -> str:
        """The target in the installed release."""
        module = self.target.rpartition(".")[0]
        return self.target if not self.before or importlib.util.find_spec(module) is not None else self.before


def serves(arguments: Any) -> bool:
    """Whether all of a server's attention is draftmark's."""
    base = getattr(arguments, "attention_backend", None)
    parts = (getattr(arguments, f"{phase}_attention_backend", None) or base for phase in ("prefill", "decode"))
    return all(part == NAME for part in parts)


def add_draft_backends(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """AROUND `DraftBackendFactory._create_backend`: its maps from name to factory are locals, so one entry is added."""
    from .draft import decode_backend, draft_extend_backend

    stamped = "stamps_children" in original.__code__.co_varnames  # from 0.5.18 on factories return (name, backend)
    steps = "decode" in backend_map["triton"].__name__

    def create() -> Any:
        made = decode_backend(factory) if steps else draft_extend_backend(factory)
        return (NAME, made) if stamped else made

    return original(factory, backend_name, {**backend_map, NAME: create}, *rest, **named)


def allow_trees_on_pages(original: Any, server_args: Any) -> Any:
    """AROUND the last check of an algorithm's arguments: it knows SGLang's own backends alone, by name."""
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        return original(server_args)
    except ValueError as error:
        if not any(part in str(error) for part in REFUSALS) or not serves(resolved_view(server_args)):
            raise
        return None


def allow_listed_models(original: Any, server_args: Any) -> Any:
    """AROUND the checks of single models: a few, such as gpt-oss, name the backends that serve their attention.

    All that SGLang's Triton backend serves there, sinks and windows, is served here, or refused with a reason
    (`refusals`). So where a list has Triton's name the checks read that name.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        return original(server_args)
    except AssertionError as error:
        if NAME not in str(error) or "triton" not in str(error) or not serves(resolved_view(server_args)):
            raise
    given, write = {name: getattr(server_args, name) for name in BACKENDS}, _plain_setter(type(server_args))
    try:
        for name, value in given.items():
            write(server_args, name, "triton" if value == NAME else value)
        return original(server_args)
    finally:
        for name, value in given.items():
            write(server_args, name, value)


def _plain_setter(kind: type) -> Any:
    """What writes an attribute below a class's guards: `object`'s own, and since 0.5.20 that of msgspec's structs."""
    return next(own for one in kind.__mro__ if isinstance(own := vars(one).get("__setattr__"), WrapperDescriptorType))


def note_parents(result: Any, i: int, *arguments: Any, **named: Any) -> None:
    """AFTER `select_top_k_tokens`: the one place that knows whom a new branch continues."""
    from .draft_round import ACTIVE

    if ACTIVE.steps is not None:
        ACTIVE.steps.note_parents(i, result[3][2])


def skip_copies(original: Any, *arguments: Any, **named: Any) -> None:
    """AROUND `duplicate_prefix_tail_to_draft_branches`: branches that share the prefix's last page need no copies.

    SGLang finds what to copy with a boolean index, for which the host waits twice a round.
    """
    from .draft_round import ACTIVE

    if ACTIVE.steps is None:
        original(*arguments, **named)


def small_masks(worker: Any, server_args: Any, *arguments: Any, **named: Any) -> None:
    """BEFORE `NGRAMWorker.__init__`: masks of D × D, not rows of ones for the prefix, built in Python."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.speculative import ngram_worker

    if serves(resolved_view(server_args)):
        ngram_worker.USE_FULL_MASK = False


def add_last_feature(result: Any, model: Any, *arguments: Any, **named: Any) -> Any:
    """AFTER `LlamaModel.forward`: the hidden state behind the last layer and its norm, where a head asks for it.

    SGLang collects a hidden state before the layer that follows it, and none follows the last.
    """
    from .heads import LAST_FEATURE

    if not LAST_FEATURE.asked or len(model.layers) not in model.layers_to_capture:
        return None
    hidden, features = result if isinstance(result, tuple) else (result, [])
    features.append(hidden)
    return hidden, features


EAGLE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
HOOKS = (
    Hook(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "AROUND",
        allow_listed_models,
        ("", *EAGLE, "NGRAM"),
        "SGLang refuses models that list the backends of their attention",
        "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
    ),
    Hook(
        f"{SPECULATIVE}.draft_utils.DraftBackendFactory._create_backend",
        "AROUND",
        add_draft_backends,
        EAGLE,
        "the draft model has no draftmark backend",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_eagle_family",
        "AROUND",
        allow_trees_on_pages,
        EAGLE,
        "SGLang refuses trees at page sizes above 1",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_ngram",
        "AROUND",
        allow_trees_on_pages,
        ("NGRAM",),
        "SGLang refuses n-gram trees at page sizes above 1",
    ),
    Hook(
        f"{SPECULATIVE}.spec_utils.select_top_k_tokens",
        "AFTER",
        note_parents,
        EAGLE,
        "a branch cannot know whom it continues",
    ),
    Hook(
        f"{SPECULATIVE}.eagle_worker_common.duplicate_prefix_tail_to_draft_branches",
        "AROUND",
        skip_copies,
        EAGLE,
        "the host waits in every round of a tree at page sizes above 1",
    ),
    Hook(
        f"{SPECULATIVE}.ngram_worker.NGRAMWorker.__init__",
        "BEFORE",
        small_masks,
        ("NGRAM",),
        "n-gram masks grow with the prefix",
    ),
    Hook(
        "sglang.srt.models.llama.LlamaModel.forward",
        "AFTER",
        add_last_feature,
        ("EAGLE3",),
        "a head of draftmark's that reads the target's last hidden state is not given it",
    ),
)


def register_hooks() -> None:
    """Hand every hook to SGLang, which applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for one in HOOKS:
        HookRegistry.register(one.here(), one.function, HookType[one.kind])


def missing_hooks(arguments: Any) -> list[Hook]:
    """The hooks that a run with these arguments needs and that SGLang did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    algorithm = getattr(arguments, "speculative_algorithm", None) or ""
    targets = {one.here(): one for one in HOOKS}
    ours = {
        target for target, one in targets.items() if any(one.function is its[1] for its in HookRegistry._hooks[target])
    }
    applied = ours & HookRegistry._patched
    return [one for target, one in targets.items() if algorithm in one.algorithms and target not in applied]
