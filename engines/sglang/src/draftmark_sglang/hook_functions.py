"""Functions that SGLang calls at draftmark's hooks. The module `hooks` lists them with their reasons."""

from __future__ import annotations

from types import WrapperDescriptorType
from typing import Any

from .facts import NAME, uses_draftmark
from .hooks import HOOKS

REFUSALS = ("speculative_eagle_topk > 1 with page_size > 1", "is unstable and produces incorrect results for paged")
"""Parts of the two error messages with which SGLang rejects trees at page sizes above 1."""

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Server arguments that name the target's attention backend."""


def add_draft_backends(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """Add draftmark to the map from name to factory (AROUND hook on `DraftBackendFactory._create_backend`)."""
    from .draft_steps import DraftSteps

    # From SGLang 0.5.18 on, factories must return (name, backend); this variable exists only in those releases.
    stamped = "stamps_children" in original.__code__.co_varnames
    steps = "decode" in backend_map["triton"].__name__

    def create() -> Any:
        made = DraftSteps.of(factory) if steps else _draft_extend_backend(factory)
        return (NAME, made) if stamped else made

    return original(factory, backend_name, {**backend_map, NAME: create}, *rest, **named)


def _draft_extend_backend(factory: Any) -> Any:
    """Create the draft model's own backend, which runs prefill and the draft extend of accepted tokens.

    SGLang captures a CUDA graph of draft extend only for instances of listed classes, such as `TritonAttnBackend`. That
    class is abstract, so `DraftmarkBackend` is registered as a virtual subclass. It inherits no method.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from .backend import DraftmarkBackend

    TritonAttnBackend.register(DraftmarkBackend)
    return DraftmarkBackend(factory.draft_model_runner)


def allow_trees_on_pages(original: Any, server_args: Any) -> Any:
    """Accept trees at page sizes above 1 when draftmark serves (AROUND hook on the last check of server arguments).

    SGLang's check accepts only a fixed list of its own backends.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        return original(server_args)
    except ValueError as error:
        if not any(part in str(error) for part in REFUSALS) or not uses_draftmark(resolved_view(server_args)):
            raise
        return None


def allow_listed_models(original: Any, server_args: Any) -> Any:
    """Accept draftmark for a model that allows Triton (AROUND hook on SGLang's model-specific argument checks).

    A few models, such as gpt-oss, list the backends that support their attention. draftmark supports what SGLang's
    Triton backend supports there (sinks, windows), or rejects it with a reason (`refusals`). So the check runs again
    with Triton's name.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        return original(server_args)
    except AssertionError as error:
        if NAME not in str(error) or "triton" not in str(error) or not uses_draftmark(resolved_view(server_args)):
            raise
    original_names, write = {name: getattr(server_args, name) for name in BACKENDS}, _plain_setter(type(server_args))
    try:
        for name, value in original_names.items():
            write(server_args, name, "triton" if value == NAME else value)
        return original(server_args)
    finally:
        for name, value in original_names.items():
            write(server_args, name, value)


def _plain_setter(kind: type) -> Any:
    """Return the `__setattr__` that bypasses a class's guards: `object`'s, or msgspec's for structs (since 0.5.20)."""
    return next(own for one in kind.__mro__ if isinstance(own := vars(one).get("__setattr__"), WrapperDescriptorType))


def record_parents(result: Any, i: int, *arguments: Any, **named: Any) -> None:
    """Record the parent of each new branch (AFTER hook on `select_top_k_tokens`); SGLang itself returns no parents."""
    from .draft_steps import ACTIVE_ROUND

    if ACTIVE_ROUND.steps is not None:
        ACTIVE_ROUND.steps.record_parents(i, result[3][2])


def skip_copies(original: Any, *arguments: Any, **named: Any) -> None:
    """Skip SGLang's copies of the prefix's last page (AROUND hook on `duplicate_prefix_tail_to_draft_branches`).

    draftmark's branches share that page. SGLang selects the copies with a boolean index, which makes the host wait
    twice per round.
    """
    from .draft_steps import ACTIVE_ROUND

    if ACTIVE_ROUND.steps is None:
        original(*arguments, **named)


def use_small_masks(worker: Any, server_args: Any, *arguments: Any, **named: Any) -> None:
    """Use tree masks of D × D draft tokens, without prefix columns (BEFORE hook on `NGRAMWorker.__init__`)."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.speculative import ngram_worker

    if uses_draftmark(resolved_view(server_args)):
        ngram_worker.USE_FULL_MASK = False


def add_last_feature(result: Any, model: Any, *arguments: Any, **named: Any) -> Any:
    """Append the hidden state after the last layer and norm, for heads that read it (AFTER `LlamaModel.forward`).

    SGLang collects a hidden state just before the following layer runs, and no layer follows the last one.
    """
    from .heads import LAST_FEATURE

    if not LAST_FEATURE.enabled or len(model.layers) not in model.layers_to_capture:
        return None
    hidden, features = result if isinstance(result, tuple) else (result, [])
    features.append(hidden)
    return hidden, features


def use_state_backend(original: Any, runner: Any, full_attn_backend: Any) -> Any:
    """Run recurrent layers on draftmark's backend (AROUND hook on `attn_backend_wrapper`)."""
    from .linear import hybrid_backend

    return hybrid_backend(original, runner, full_attn_backend)


def size_state_slots(original: Any, configurator: Any, total_rest_memory: Any) -> Any:
    """Size slots without states of draft tokens (AROUND hook on `KVCacheConfigurator._handle_max_mamba_cache`)."""
    from .state_memory import size_without_snapshots

    return size_without_snapshots(original, configurator, total_rest_memory)


def leave_out_snapshots(pool: Any, **named: Any) -> Any:
    """Allocate slots without states of draft tokens (BEFORE hook on `MambaPool.__init__`)."""
    from .state_memory import active_states

    if active_states() is None:
        return None
    return (pool,), {**named, "speculative_num_draft_tokens": None}


def commit_states(
    original: Any, target_worker: Any, batch: Any, accept_lens: Any, accept_index: Any, *rest: Any, **named: Any
) -> Any:
    """Move recurrent states over the accepted nodes (AROUND hook on `commit_mamba_states_after_verify`)."""
    backend = target_worker.model_runner.attn_backend
    states = getattr(getattr(backend, "full_attn_backend", None), "states", None)
    if states is None:
        return original(target_worker, batch, accept_lens, accept_index, *rest, **named)
    if not batch.forward_mode.is_idle() and accept_index.numel():
        states.commit(accept_lens, accept_index, batch.mamba_track_indices)
    return None


def register_hooks() -> None:
    """Register every hook with SGLang, which applies them after it has loaded all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for one in HOOKS:
        HookRegistry.register(one.installed_target(), globals()[one.function], HookType[one.kind])
