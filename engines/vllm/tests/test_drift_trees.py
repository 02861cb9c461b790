"""Tests of the private vLLM interfaces that draft trees rely on, in each supported release: runner V1, proposer.

They are not public, so these tests detect a release that changes a name or an argument.
"""

from __future__ import annotations

import ast

import pytest

from engines.common.tests.released import Read, arguments
from engines.vllm.tests.test_drift import EACH, SOURCES, class_of, methods

RUNNER, PROPOSER = "v1/worker/gpu_model_runner.py", "v1/spec_decode/llm_base_proposer.py"


def our_methods(file: str) -> dict[str, ast.FunctionDef]:
    """Return the methods of the first class in a file of the adapter, by name."""
    tree = ast.parse((SOURCES / "trees" / file).read_text())
    return methods(next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)))


@EACH
@pytest.mark.parametrize("method", ["_prepare_inputs", "_sample", "propose_draft_token_ids"])
def test_runner_calls_the_overridden_methods(read: Read, method: str) -> None:
    """The runner calls each overridden method, and passes our arguments first."""
    source = read(RUNNER)
    theirs, ours = methods(class_of(source, "GPUModelRunner"))[method], our_methods("runner.py")[method]
    taken = arguments(ours)
    assert arguments(theirs)[: len(taken)] == taken
    assert f"self.{method}(" in source


@EACH
def test_metadata_is_built_after_the_inputs(read: Read) -> None:
    """vLLM's runner builds metadata after it prepares inputs. In between, `TreeRunner` sets the step's trees."""
    execute = methods(class_of(read(RUNNER), "GPUModelRunner"))["execute_model"]
    called = [
        node.func.attr
        for node in ast.walk(execute)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert {"_prepare_inputs", "_build_attention_metadata"} <= set(called)


@EACH
def test_runner_has_the_attributes_that_are_read(read: Read) -> None:
    """The runner has the attributes that trees read, and accepts a custom proposer."""
    source = read(RUNNER)
    for name in ("positions", "input_ids", "input_batch", "requests", "use_async_scheduling", "uses_mrope", "drafter"):
        assert f"self.{name}" in source, name
    assert "self.slot_mapping = " in read("v1/worker/block_table.py")
    assert "create_custom_proposer" in source


@EACH
def test_proposer_samples_in_one_method(read: Read) -> None:
    """In vLLM's proposer one method samples the drafts of a step, and `propose` has the number of steps first."""
    theirs = [node for node in ast.walk(ast.parse(read(PROPOSER))) if isinstance(node, ast.ClassDef)]
    found = next(one for one in map(methods, theirs) if "propose" in one)
    assert arguments(found["_sample_draft_tokens"])[0] == "hidden_states"
    assert arguments(found["propose"])[0] == "num_speculative_tokens"
    assert "take_last_draft_probs" in found
