"""Tests that the inputs of known SGLang failures do not change the output tokens of SGLang with draftmark.

The failures themselves are reproduced in core/draftmark/tests/regressions, and in test_released_seeds.py with the
releases that had them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler import generate, in_a_fork, on_a_cpu

from draftmark_sglang_judge.in_process import run_until_done, submit

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20]
NGRAM = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)


def _tree(eagle: str) -> dict[str, Any]:
    return dict(
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=eagle,
        speculative_eagle_topk=4,
        speculative_num_steps=4,
        speculative_num_draft_tokens=12,
    )


def _tampered(
    tamper: Callable[[Any], None], prompts: list[list[int]], max_new_tokens: int, **arguments: Any
) -> dict[str, Any]:
    """Serve prompts with `tamper` applied to each forward batch before draftmark reads it.

    Afterwards check the guard words (known bytes around each buffer) of all draftmark buffers.
    """
    from draftmark_sglang.backend import DraftmarkBackend
    from draftmark_sglang.draft_steps import DraftSteps

    seen: list[Any] = []

    def before(original: Any) -> Any:
        def call(self: Any, forward_batch: Any, *rest: Any, **named: Any) -> None:
            seen.append(self)
            tamper(forward_batch)
            original(self, forward_batch, *rest, **named)

        return call

    for one in (DraftmarkBackend, DraftSteps):
        one.init_forward_metadata_out_graph = before(one.init_forward_metadata_out_graph)
    scheduler = on_a_cpu({"DRAFTMARK_GUARD": "1"}, **arguments)
    requests = submit(scheduler, prompts, max_new_tokens)
    run_until_done(scheduler, requests)
    arenas = [arena for backend in set(seen) for arena in backend.attention.arenas]
    for arena in arenas:
        assert arena.guarded
        arena.check()
    geometry = scheduler.tp_worker.model_runner.attn_backend.attention.geometry
    return {
        "texts": [list(request.output_ids)[:max_new_tokens] for request in requests],
        "tampered": len(seen),
        "arenas": len(arenas),
        "bytes": sum(spec.nbytes for arena in arenas for spec in arena.specs),
        "columns": geometry.max_pages_per_req,
    }


def _stale_sum(batch: Any) -> None:
    batch.seq_lens_sum = 1


def _nothing_on_the_host(batch: Any) -> None:
    for name in ("seq_lens_sum", "seq_lens_cpu", "extend_prefix_lens_cpu"):
        setattr(batch, name, None)


def _leave(batch: Any) -> None:
    return None


@pytest.mark.parametrize("tamper", [_stale_sum, _nothing_on_the_host], ids=["a-26753", "b-26738"])
@pytest.mark.parametrize("speculate", ["ngram", "tree"])
def test_lengths_on_the_host(tamper: Callable[[Any], None], speculate: str, target: str, eagle: str) -> None:
    """A stale `seq_lens_sum` (sglang#26753) or missing host lengths (sglang#26738) do not change the output tokens."""
    drafts = NGRAM if speculate == "ngram" else _tree(eagle)
    served = dict(model_path=target, attention_backend="draftmark", page_size=16)
    made = in_a_fork(_tampered, tamper, PROMPTS, 20, **served, **drafts)
    plain = in_a_fork(generate, PROMPTS, 20, model_path=target, attention_backend="torch_native")
    assert made["texts"] == plain["texts"]
    assert made["tampered"] > 10 and made["arenas"] >= 1


def test_topk_does_not_multiply_the_context(target: str, eagle: str) -> None:
    """With eight draft branches no buffer grows by eight contexts, and no write leaves a buffer (sglang#27338)."""
    served = dict(model_path=target, attention_backend="draftmark", page_size=1)
    size = {}
    for topk in (1, 8):
        drafts = dict(_tree(eagle), speculative_eagle_topk=topk, speculative_num_steps=3)
        drafts["speculative_num_draft_tokens"] = 4 if topk == 1 else 12
        made = in_a_fork(_tampered, _leave, PROMPTS, 20, **served, **drafts)
        size[topk] = made["bytes"]
    context, requests = 256, 4
    assert size[8] - size[1] < 8 * context * requests * 4, "a buffer grew with topk times the context"


def test_the_end_of_the_context(target: str, eagle: str) -> None:
    """Requests that fill the context keep the right output, although draft tokens pass its end (sglang#22778)."""
    prompts = [[7] * 200, [8, 9] * 104]
    tokens = 256 - 210
    served = dict(model_path=target, attention_backend="draftmark", page_size=16)
    made = in_a_fork(_tampered, _leave, prompts, tokens, **served, **_tree(eagle))
    plain = in_a_fork(generate, prompts, tokens, model_path=target, attention_backend="torch_native")
    assert made["texts"] == plain["texts"]
    assert made["columns"] * 16 >= 256 + 12, "the page table ends at the context's end and has no room for a tail"
