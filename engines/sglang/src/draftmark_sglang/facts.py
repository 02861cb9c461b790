"""Numbers that the adapter reads from an SGLang `ModelRunner`. Their places change between releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME = "draftmark"
"""Value for ``--attention-backend``."""


@dataclass(frozen=True)
class RunnerFacts:
    """Numbers of one runner.

    Attributes:
        device: torch device, e.g. ``"cuda:0"``.
        q_dtype, kv_dtype: torch dtype names of queries and of the KV cache.
        page_size: tokens per KV page.
        max_num_reqs: requests of the largest batch: the rows of `req_to_token` without its padding row, rounded up to
            a multiple of the TP ranks. SGLang pads batches to split them among ranks.
        context_len: tokens of the longest request that the model serves.
        max_extend_tokens: query rows of the largest prefill batch, mixed decodes included.
        algorithm: SGLang's speculative algorithm; ``""`` for none.
        topk, num_steps, num_draft_tokens: the draft shape. For NGRAM, which has no draft model, topk and num_steps
            are 1.
        is_draft: whether the runner runs the draft model.
        latent: whether the runner's model has latent attention (MLA): its KV pool stores one row for each token.
    """

    device: str
    q_dtype: str
    kv_dtype: str
    page_size: int
    max_num_reqs: int
    context_len: int
    max_extend_tokens: int
    algorithm: str = ""
    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    is_draft: bool = False
    latent: bool = False

    @property
    def verifies_trees(self) -> bool:
        """True when the target verifies draft trees that may branch."""
        return self.algorithm == "NGRAM" or self.topk > 1


def uses_draftmark(arguments: Any) -> bool:
    """Return True if draftmark is the attention backend of a server's prefill and of its decode."""
    base = getattr(arguments, "attention_backend", None)
    parts = (getattr(arguments, f"{phase}_attention_backend", None) or base for phase in ("prefill", "decode"))
    return all(part == NAME for part in parts)


def resolved(runner: Any) -> Any:
    """Return a runner's server arguments with SGLang's own defaults filled in."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(runner.server_args)


def facts_of(runner: Any) -> RunnerFacts:
    """Read the numbers of a `ModelRunner` after its KV pools are allocated."""
    arguments = resolved(runner)
    rows, context_len = int(runner.req_to_token_pool.size), int(runner.model_config.context_len)
    ranks = int(arguments.tp_size or 1)
    reqs = -(-rows // ranks) * ranks
    chunk = arguments.chunked_prefill_size
    # Without chunked prefill SGLang adds a whole prompt to a batch as long as any of the token budget is left.
    tokens = chunk if chunk is not None and chunk > 0 else (arguments.max_prefill_tokens or 0) + context_len
    return RunnerFacts(
        str(runner.device),
        str(runner.dtype).removeprefix("torch."),
        str(runner.kv_cache_dtype).removeprefix("torch."),
        int(runner.page_size),
        reqs,
        context_len,
        int(tokens) + reqs,
        arguments.speculative_algorithm or "",
        *drafts_of(arguments),
        bool(runner.is_draft_worker),
        bool(runner.use_mla_backend),
    )


def drafts_of(arguments: Any) -> tuple[int, int, int]:
    """Return topk, num_steps and num_draft_tokens of `RunnerFacts` from the server arguments."""
    algorithm = arguments.speculative_algorithm or ""
    drafts = algorithm not in ("", "NGRAM")
    return (
        int(arguments.speculative_eagle_topk or 1) if drafts else 1,
        int(arguments.speculative_num_steps or 1) if drafts else 1,
        int(arguments.speculative_num_draft_tokens or 1) if algorithm else 1,
    )
