"""Tests of SGLang behaviour on which the adapter's hooks depend, in a running SGLang.

`../test_drift.py` checks the properties that SGLang's source files show.
"""

from __future__ import annotations

import inspect
import pkgutil
import textwrap
from typing import Any

import pytest
from scheduler import generate, in_a_fork, on_a_cpu

from draftmark_sglang.hooks import HOOKS
from draftmark_sglang_judge.in_process import eagle_arguments


def _source(target: str) -> str:
    module, name = target.rsplit(".", 1)
    function = inspect.unwrap(getattr(pkgutil.resolve_name(module), name))
    return textwrap.dedent(inspect.getsource(function))


def test_candidate_numbers_give_parents() -> None:
    """In a draft step, SGLang reports candidate c as c + topk² · (step - 1) + topk (`tree_info[2]`)."""
    source = _source("sglang.srt.speculative.spec_utils.select_top_k_tokens")
    assert "i == 0" in source
    import torch
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    scores = torch.tensor([[0.9, 0.1]])
    probabilities = torch.tensor([[0.5, 0.4], [0.6, 0.3]])
    tokens = torch.tensor([[1, 2], [3, 4]])
    hidden = torch.zeros(2, 1)
    _, _, _, info = inspect.unwrap(select_top_k_tokens)(2, probabilities, tokens, hidden, scores, 2)
    assert sorted((info[2] - (4 + 2)).flatten().tolist()) == [0, 1]


def test_draft_extend_graphs_need_a_listed_class() -> None:
    """SGLang captures draft extend for instances of listed classes, and the list has the abstract TritonAttnBackend."""
    from abc import ABCMeta

    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative import eagle_worker_v2

    assert isinstance(TritonAttnBackend, ABCMeta)
    assert "TritonAttnBackend" in inspect.getsource(eagle_worker_v2)


def test_prefix_page_is_not_copied(target: str, eagle: str) -> None:
    """At page sizes above 1, no round of a tree copies the prefix's last page to its branches."""

    def served() -> Any:
        from sglang.srt.speculative import eagle_worker_common

        def copies(*arguments: Any) -> None:
            raise AssertionError("the prefix's last page is copied")

        eagle_worker_common.duplicate_prefix_tail_to_draft_branches = copies
        return generate([[3, 5, 7, 9]], 8, model_path=target, attention_backend="draftmark", page_size=16, **drafts)

    drafts = dict(eagle_arguments(eagle, 4, 3, 8))
    assert in_a_fork(served)["verifies"] > 0


def test_missing_hook_is_rejected(target: str, eagle: str) -> None:
    """The backend raises an error for a hook that SGLang failed to apply; SGLang itself only logs the failure."""

    def start() -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
        hook = next(one for one in HOOKS if "select_top_k_tokens" in one.target)
        HookRegistry._patched.discard(hook.installed_target())
        on_a_cpu(
            model_path=target,
            attention_backend="draftmark",
            page_size=16,
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=eagle,
            speculative_eagle_topk=2,
            speculative_num_steps=2,
            speculative_num_draft_tokens=4,
        )

    with pytest.raises(RuntimeError, match=r"select_top_k_tokens is not applied, so the parents of draft branches"):
        in_a_fork(start)
