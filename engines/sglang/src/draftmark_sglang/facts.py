"""The numbers that the adapter reads off an SGLang `ModelRunner`: in one place, since they move between releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunnerFacts:
    """One runner's numbers.

    Attributes:
        device: torch's device, e.g. ``"cuda:0"``.
        q_dtype, kv_dtype: torch dtype names.
        max_num_reqs: requests of a batch: rows of `req_to_token`, its padding row not counted, rounded up to the ranks
            among which SGLang may split a batch that it pads.
        context_len: the model's longest text.
        max_extend_tokens: query rows of the largest prefill, mixed decodes included.
        algorithm: SGLang's speculative algorithm, ``""`` for none.
        topk, num_steps, num_draft_tokens: the draft shape; of n-gram trees topk and num_steps are 1, as no draft
        model runs. is_draft: whether it runs the draft model.
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

    @property
    def verifies_trees(self) -> bool:
        """Whether the target's drafts may branch."""
        return self.algorithm == "NGRAM" or self.topk > 1


def resolved(runner: Any) -> Any:
    """A runner's server arguments with everything that SGLang decided by itself filled in."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(runner.server_args)


def facts_of(runner: Any) -> RunnerFacts:
    """Read a `ModelRunner` whose pools exist."""
    arguments = resolved(runner)
    rows, context_len = int(runner.req_to_token_pool.size), int(runner.model_config.context_len)
    ranks = int(arguments.tp_size or 1)
    reqs = -(-rows // ranks) * ranks
    chunk = arguments.chunked_prefill_size
    # Without chunks a prompt is taken whole as long as any of the budget is left.
    tokens = chunk if chunk is not None and chunk > 0 else (arguments.max_prefill_tokens or 0) + context_len
    algorithm = arguments.speculative_algorithm or ""
    drafts = algorithm not in ("", "NGRAM")
    return RunnerFacts(
        str(runner.device),
        str(runner.dtype).removeprefix("torch."),
        str(runner.kv_cache_dtype).removeprefix("torch."),
        int(runner.page_size),
        reqs,
        context_len,
        int(tokens) + reqs,
        algorithm,
        int(arguments.speculative_eagle_topk or 1) if drafts else 1,
        int(arguments.speculative_num_steps or 1) if drafts else 1,
        int(arguments.speculative_num_draft_tokens or 1) if algorithm else 1,
        bool(runner.is_draft_worker),
    )
