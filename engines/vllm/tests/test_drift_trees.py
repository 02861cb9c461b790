"""What trees rely on in each release of the supported range: names and arguments of runner V1 and of its proposer.

These are no interface of vLLM's, so this is what says that a release moved them.
"""

from __future__ import annotations

import ast

import pytest

from engines.common.tests.released import Read, arguments
from engines.vllm.tests.test_drift import EACH, OURS, class_of, methods

RUNNER, PROPOSER = "v1/worker/gpu_model_runner.py", "v1/spec_decode/llm_base_proposer.py"


def our_methods(file: str) -> dict[str, ast.FunctionDef]:
    """Methods of a file's first class of ours."""
    tree = ast.parse((OURS / "trees" / file).read_text())
    return methods(next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)))


@EACH
@pytest.mark.parametrize("method", ["_prepare_inputs", "_sample", "propose_draft_token_ids"])
def test_the_runner_calls_what_is_overridden(read: Read, method: str) -> None:
    """By these names, and with these arguments first."""
    source = read(RUNNER)
    theirs, ours = methods(class_of(source, "GPUModelRunner"))[method], our_methods("runner.py")[method]
    taken = arguments(ours)
    assert arguments(theirs)[: len(taken)] == taken
    assert f"self.{method}(" in source


@EACH
def test_metadata_is_built_behind_the_inputs(read: Read) -> None:
    """Between the two a step's trees are announced."""
    execute = methods(class_of(read(RUNNER), "GPUModelRunner"))["execute_model"]
    called = [
        node.func.attr
        for node in ast.walk(execute)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert {"_prepare_inputs", "_build_attention_metadata"} <= set(called)


@EACH
def test_the_runner_has_what_is_read_of_it(read: Read) -> None:
    """Its attributes, and the drafts that it takes from a proposer of the user's."""
    source = read(RUNNER)
    for name in ("positions", "input_ids", "input_batch", "requests", "use_async_scheduling", "uses_mrope", "drafter"):
        assert f"self.{name}" in source, name
    assert "self.slot_mapping = " in read("v1/worker/block_table.py")
    assert "create_custom_proposer" in source


@EACH
def test_the_proposer_samples_where_a_comb_takes_more(read: Read) -> None:
    """One step's drafts come from one method, and the number of steps is given or an attribute."""
    theirs = [node for node in ast.walk(ast.parse(read(PROPOSER))) if isinstance(node, ast.ClassDef)]
    found = next(one for one in map(methods, theirs) if "propose" in one)
    assert arguments(found["_sample_draft_tokens"])[0] == "hidden_states"
    assert arguments(found["propose"])[0] == "num_speculative_tokens"
    assert "take_last_draft_probs" in found
