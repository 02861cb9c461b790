"""What the adapter assumes of SGLang, release by release: a failure here names what moved."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest
from scheduler import in_a_fork, on_a_cpu

from draftmark_sglang.hooks import HOOKS, REFUSALS
from draftmark_sglang.plugin import ADDERS, CHOICES


def _source(target: str) -> str:
    module, name = target.rsplit(".", 1)
    function = inspect.unwrap(getattr(pkgutil.resolve_name(module), name))
    return textwrap.dedent(inspect.getsource(function))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_targets_exist(hook: object) -> None:
    """Every hooked function is where it was."""
    assert callable(pkgutil.resolve_name(hook.target))  # type: ignore[attr-defined]


def test_the_refusal_of_trees_is_eagles_last_statement() -> None:
    """Nothing follows that a swallowed refusal would skip."""
    body = ast.parse(_source("sglang.srt.arg_groups.speculative_hook._handle_eagle_family")).body[0].body  # type: ignore[attr-defined]
    assert REFUSALS[0] in ast.unparse(body[-1])


def test_after_the_refusal_of_ngram_trees_only_dp_attention_is_checked() -> None:
    """Which the adapter refuses by itself."""
    body = ast.parse(_source("sglang.srt.arg_groups.speculative_hook._handle_ngram")).body[0].body  # type: ignore[attr-defined]
    at = next(n for n, one in enumerate(body) if "and produces incorrect results" in ast.unparse(one))
    assert len(body) == at + 2 and "dp attention" in ast.unparse(body[-1])


def test_candidates_are_numbered_as_parents_are_read() -> None:
    """`tree_info[2]` is the candidate's number plus topk² · (step - 1) + topk."""
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


def test_ngram_masks_have_a_switch() -> None:
    """A module constant that `_prepare_for_speculative_decoding` reads when it runs."""
    from sglang.srt.speculative import ngram_worker

    assert ngram_worker.USE_FULL_MASK in (True, False)
    assert "USE_FULL_MASK" in inspect.getsource(ngram_worker.NGRAMWorker._prepare_for_speculative_decoding)


def test_draft_extend_graphs_go_by_class() -> None:
    """Only instances of a list of classes are captured, and TritonAttnBackend, an abstract class, is on it."""
    from abc import ABCMeta

    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative import eagle_worker_v2

    assert isinstance(TritonAttnBackend, ABCMeta)
    assert "TritonAttnBackend" in inspect.getsource(eagle_worker_v2)


def test_names_can_be_added() -> None:
    """One of the two places has the functions that add to the command line's choices."""
    found = []
    for place in CHOICES:
        try:
            found.append(hasattr(importlib.import_module(place), ADDERS[0]))
        except ModuleNotFoundError:
            continue
    assert any(found)


def test_a_hook_that_did_not_take_hold_is_refused(target: str, eagle: str) -> None:
    """SGLang logs a failed hook and goes on; the backend does not."""

    def start() -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
        HookRegistry._patched.discard(HOOKS[3].target)
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

    with pytest.raises(
        RuntimeError, match=r"select_top_k_tokens did not take hold, without which a branch cannot know"
    ):
        in_a_fork(start)
