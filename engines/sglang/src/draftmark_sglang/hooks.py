"""All hooks on SGLang. Each states the function that SGLang calls, and what is missing without it.

SGLang logs a failed hook and continues, so `refusals` calls `missing_hooks` when a backend is built. A drift
test checks in every supported release that each hooked function exists and is as its hook assumes.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from draftmark_engines import warn_missing_hook

FUNCTIONS = "draftmark_sglang.hook_functions"
"""Module with the functions of the hooks."""
SPECULATIVE = "sglang.srt.speculative"


@dataclass(frozen=True)
class Hook:
    """One hook on SGLang.

    Attributes:
        target: dotted path of the hooked function or class.
        kind: name of SGLang's `HookType`.
        function: name of the function in the module `hook_functions` that SGLang calls at the hook.
        algorithms: speculative algorithms that need the hook; ``""`` for decoding without drafts.
        why: problem that occurs without the hook.
        old_target: dotted path in older releases; ``""`` if the path did not change.
    """

    target: str
    kind: str
    function: str
    algorithms: tuple[str, ...]
    why: str
    old_target: str = ""

    def installed_target(self) -> str:
        """Return the target's dotted path in the installed release."""
        module = self.target.rpartition(".")[0]
        return self.target if not self.old_target or importlib.util.find_spec(module) is not None else self.old_target


EAGLE = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
HOOKS = (
    Hook(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "AROUND",
        "allow_listed_models",
        ("", *EAGLE, "NGRAM"),
        "SGLang rejects models that list their attention backends",
        "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
    ),
    Hook(
        f"{SPECULATIVE}.draft_utils.DraftBackendFactory._create_backend",
        "AROUND",
        "add_draft_backends",
        EAGLE,
        "the draft model has no draftmark backend",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_eagle_family",
        "AROUND",
        "allow_trees_on_pages",
        EAGLE,
        "SGLang rejects trees at page sizes above 1",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_ngram",
        "AROUND",
        "allow_trees_on_pages",
        ("NGRAM",),
        "SGLang rejects n-gram trees at page sizes above 1",
    ),
    Hook(
        f"{SPECULATIVE}.spec_utils.select_top_k_tokens",
        "AFTER",
        "record_parents",
        EAGLE,
        "the parents of draft branches are unknown",
    ),
    Hook(
        f"{SPECULATIVE}.eagle_worker_common.duplicate_prefix_tail_to_draft_branches",
        "AROUND",
        "skip_copies",
        EAGLE,
        "the host waits in every round of a tree at page sizes above 1",
    ),
    Hook(
        f"{SPECULATIVE}.ngram_worker.NGRAMWorker.__init__",
        "BEFORE",
        "use_small_masks",
        ("NGRAM",),
        "n-gram masks grow with the prefix",
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "AROUND",
        "use_state_backend",
        ("", *EAGLE, "NGRAM"),
        "recurrent layers run on SGLang's own backend",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        "AROUND",
        "size_state_slots",
        (*EAGLE, "NGRAM"),
        "fewer requests of a hybrid model fit",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
        "BEFORE",
        "leave_out_snapshots",
        (*EAGLE, "NGRAM"),
        "SGLang allocates a recurrent state for each draft token",
    ),
    Hook(
        f"{SPECULATIVE}.spec_utils.commit_mamba_states_after_verify",
        "AROUND",
        "commit_states",
        (*EAGLE, "NGRAM"),
        "recurrent states do not follow the accepted drafts",
    ),
    Hook(
        "sglang.srt.models.llama.LlamaModel.forward",
        "AFTER",
        "add_last_feature",
        ("EAGLE3",),
        "a draftmark head cannot read the target's last hidden state",
    ),
)


def missing_hooks(arguments: Any) -> list[Hook]:
    """Return the hooks that a run with these server arguments needs and that SGLang did not apply.

    A warning names each other hook that SGLang did not apply, since runs with other arguments need it.
    """
    algorithm = getattr(arguments, "speculative_algorithm", None) or ""
    needed = []
    for one in unapplied_hooks():
        if algorithm in one.algorithms:
            needed.append(one)
        else:
            runs = ", ".join(filter(None, one.algorithms))
            warn_missing_hook("SGLang", f"the hook on {one.installed_target()}", f"runs with {runs} will be refused")
    return needed


def unapplied_hooks() -> list[Hook]:
    """Return the hooks that SGLang did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = {one.installed_target(): one for one in HOOKS}
    ours = {
        target
        for target, one in targets.items()
        if any((its[1].__module__, its[1].__name__) == (FUNCTIONS, one.function) for its in HookRegistry._hooks[target])
    }
    applied = ours & HookRegistry._patched
    return [one for target, one in targets.items() if target not in applied]
