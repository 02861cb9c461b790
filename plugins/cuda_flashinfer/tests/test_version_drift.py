"""What of FlashInfer's inside this plugin touches; each test fails with a sentence when that moves."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata as md
import re
from pathlib import Path

import pytest

from draftmark_cuda_flashinfer import vendor
from draftmark_cuda_flashinfer.version import DISTRIBUTION, TESTED, installed

pytestmark = pytest.mark.skipif(installed() is None, reason=f"{DISTRIBUTION} is not installed")


def package() -> Path:
    """The installed package's folder; it is not imported."""
    return Path(str(md.distribution(DISTRIBUTION).locate_file("flashinfer")))


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"flashinfer.prefill has no function {name} any more; find what took its place, then vendor.py"
    return found[0]


def parameters(of: ast.FunctionDef) -> list[str]:
    return [one.arg for one in of.args.args]


def binding(name: str) -> list[str]:
    """Parameter names of an exported C++ function."""
    text = (package() / "data" / "csrc" / "batch_prefill_jit_binding.cu").read_text()
    body = re.search(rf"{name}\((.*?)\);", text, re.DOTALL)
    assert body, f"{name} is exported no longer; find what took its place, then vendor.py"
    return [part.split()[-1] for part in body.group(1).split(",")]


def test_the_version_is_the_one_that_was_judged():
    """Workspaces, arguments and the device verdict are of one version; another needs its own first."""
    assert installed() == TESTED, (
        f"{DISTRIBUTION} {installed()} is installed; record a device verdict with it, then move TESTED in version.py"
    )


def test_plan_takes_the_arguments_that_are_given_by_position():
    """`plan`: 20 by position. One more, one less or one moved, and a graph would be planned for something else."""
    assert binding("BatchPrefillWithKVCachePlan") == list(vendor.PLAN_ARGUMENTS), "plan's arguments moved"


def test_workspace_size_takes_the_arguments_that_are_given_by_position():
    """`workspace_size`: 18 by position."""
    got = binding("BatchPrefillWithKVCacheWorkspaceSize")
    assert got == ["device_buffer", *vendor.WORKSPACE_ARGUMENTS], "workspace_size's arguments moved"


def test_paged_run_takes_the_arguments_that_are_given_by_name():
    """`paged_run`: those without a default are all passed by name, and no other exists without one."""
    tree = ast.parse((package() / "prefill.py").read_text())
    run = function(function(tree, "get_batch_prefill_module"), "paged_run")
    required = parameters(run)[: len(run.args.args) - len(run.args.defaults)]
    assert required == list(vendor.RUN_ARGUMENTS), "paged_run's arguments moved"


def test_the_factory_takes_the_shape_in_the_order_that_is_given():
    """`get_batch_prefill_module(backend, *args)` hands its arguments to `gen_batch_prefill_module` as they come."""
    tree = ast.parse((package() / "jit" / "attention" / "modules.py").read_text())
    assert parameters(function(tree, "gen_batch_prefill_module")) == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_qk", "head_dim_vo", "pos_encoding_mode",
        "use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction",
    ], "the factory's arguments moved"  # fmt: skip


def test_no_private_name_is_touched():
    """Nothing with an underscore is read from FlashInfer: neither of a module nor of what it returns."""
    for path in Path(vendor.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer"):
                names = [one.name for one in node.names]
                assert path.name == "vendor.py", f"{path.name} imports {names} from {node.module}"
                assert not any(name.startswith("_") for name in names), names
    used = [n for n in ast.walk(ast.parse(Path(vendor.__file__).read_text())) if isinstance(n, ast.Attribute)]
    foreign = {n.attr for n in used if not (isinstance(n.value, ast.Name) and n.value.id == "self")}
    assert not {attr for attr in foreign if attr.startswith("_")}


def test_the_merge_is_in_place_and_takes_two_states():
    """`merge_state_in_place(v, s, v_other, s_other, mask=None)`, exported at the top."""
    tree = ast.parse((package() / "cascade.py").read_text())
    got = parameters(function(tree, "merge_state_in_place"))
    assert got[:4] == ["v", "s", "v_other", "s_other"], "merge_state_in_place moved"
    assert "merge_state_in_place" in (package() / "__init__.py").read_text()


def test_the_plans_layout_is_the_one_that_is_sized():
    """The sizes in partition.py follow these allocations, in this order."""
    text = (package() / "data" / "include" / "flashinfer" / "attention" / "scheduler.cuh").read_text()
    plan = text[text.index("inline cudaError_t PrefillPlanImpl(") : text.index("inline cudaError_t PrefillPlan(")]
    names = re.findall(r'"(batch_prefill_\w+)"', plan)
    assert names == [
        "batch_prefill_request_indices", "batch_prefill_qo_tile_indices", "batch_prefill_kv_tile_indices",
        "batch_prefill_o_indptr", "batch_prefill_kv_chunk_size_ptr", "batch_prefill_total_num_rows",
        "batch_prefill_tmp_v", "batch_prefill_tmp_s", "batch_prefill_merge_indptr", "batch_prefill_block_valid_mask",
    ], "the plan allocates other arrays, or in another order; partition.py must follow"  # fmt: skip


READ = {
    "FA2DetermineCtaTileQ": "be5415da7593202b6f4cfc94c8fe1af4540f527f2210e26c8487e9122b659aea",
    "PrefillBinarySearchKVChunkSize": "d5da0ab6ddd53e87568ecbdacefd2ead93c1dcb5cf9c25d2694929462b8cf429",
    "PrefillSplitQOKVIndptr": "1e5b392746b606ea06bf5ca24e5640f8485058c6eb7940888deb6bc8430640ed",
    "PrefillPlanImpl": "bdceaa8b03bb3bd520b468793b3ef9b507b2cfb146e2a2819abc1e8d6e3b7359",
}
"""sha256 of each function's text without white space."""


@pytest.mark.parametrize("name", READ)
def test_the_partition_is_the_one_that_was_read(name):
    """A size may move while the arrays keep their names: 0.7.2 divided the partials by the group, 0.6.18 did not."""
    include = package() / "data" / "include" / "flashinfer"
    file = "utils.cuh" if name == "FA2DetermineCtaTileQ" else "attention/scheduler.cuh"
    text = (include / file).read_text()
    start = text.index(f" {name}(")
    body = "".join(text[start : text.index("\n}\n", start)].split())
    assert hashlib.sha256(body.encode()).hexdigest() == READ[name], (
        f"{name} of {file} differs from the one of {TESTED}: partition.py and conftest's count rest on that one; read "
        "it again, run the device tests, then record the hash"
    )
