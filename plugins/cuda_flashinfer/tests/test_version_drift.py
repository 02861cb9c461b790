"""Drift tests: the installed FlashInfer still has the internals that the plugin relies on."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata as md
import re
from pathlib import Path

import pytest

from draftmark_cuda_flashinfer import latent_vendor, vendor
from draftmark_cuda_flashinfer.version import DISTRIBUTION, TESTED, installed

pytestmark = pytest.mark.skipif(installed() is None, reason=f"{DISTRIBUTION} is not installed")


def package() -> Path:
    """Return the folder of the installed FlashInfer without importing it."""
    return Path(str(md.distribution(DISTRIBUTION).locate_file("flashinfer")))


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"flashinfer.prefill no longer has a function {name}; find its replacement, then change vendor.py"
    return found[0]


def parameters(of: ast.FunctionDef) -> list[str]:
    return [one.arg for one in of.args.args]


def binding(name: str, file: str = "batch_prefill_jit_binding.cu") -> list[str]:
    """Return the parameter names of one of FlashInfer's exported C++ functions."""
    text = (package() / "data" / "csrc" / file).read_text()
    body = re.search(rf"{name}\((.*?)\);", text, re.DOTALL)
    assert body, f"{name} is no longer exported; find its replacement, then change vendor.py"
    arguments = body.group(1).replace("ADDITIONAL_FUNC_PARAMS", "")
    return [part.split()[-1] for part in arguments.split(",")]


def test_installed_version_is_the_tested_one():
    """The installed FlashInfer is the version `TESTED`, for which workspaces and arguments were checked."""
    assert installed() == TESTED, (
        f"{DISTRIBUTION} {installed()} is installed; record a device verdict with it, then change TESTED in version.py"
    )


def test_plan_arguments_match():
    """FlashInfer's `plan` takes the 20 positional arguments that the plugin passes, in that order."""
    assert binding("BatchPrefillWithKVCachePlan") == list(vendor.PLAN_ARGUMENTS), "plan's arguments moved"


def test_workspace_size_arguments_match():
    """FlashInfer's `workspace_size` takes the 18 positional arguments that the plugin passes, in that order."""
    got = binding("BatchPrefillWithKVCacheWorkspaceSize")
    assert got == ["device_buffer", *vendor.WORKSPACE_ARGUMENTS], "workspace_size's arguments moved"


def test_paged_run_arguments_match():
    """FlashInfer's `paged_run` requires exactly the parameters that the plugin passes by name."""
    tree = ast.parse((package() / "prefill.py").read_text())
    run = function(function(tree, "get_batch_prefill_module"), "paged_run")
    required = parameters(run)[: len(run.args.args) - len(run.args.defaults)]
    assert required == list(vendor.RUN_ARGUMENTS), "paged_run's arguments moved"


def test_module_factory_arguments_match():
    """`get_batch_prefill_module(backend, *args)` passes its arguments to `gen_batch_prefill_module` in order."""
    tree = ast.parse((package() / "jit" / "attention" / "modules.py").read_text())
    assert parameters(function(tree, "gen_batch_prefill_module")) == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_qk", "head_dim_vo", "pos_encoding_mode",
        "use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction",
    ], "the factory's arguments moved"  # fmt: skip


@pytest.mark.parametrize("file", ["batch_mla_binding.cu", "batch_mla_sm90_binding.cu"])
def test_mla_arguments_match(file):
    """Both MLA modules take the positional arguments that the plugin passes to `plan` and `run`, in that order."""
    of = "BatchMLAPagedAttentionSM90" if "sm90" in file else "BatchMLAPagedAttention"
    assert binding(f"{of}Plan", file) == list(latent_vendor.PLAN_ARGUMENTS), "the MLA plan's arguments moved"
    assert binding(f"{of}Run", file) == list(latent_vendor.RUN_ARGUMENTS), "the MLA run's arguments moved"


def test_mla_factory_arguments_match():
    """`flashinfer.jit.gen_batch_mla_module` takes the arguments that the plugin passes, in that order."""
    tree = ast.parse((package() / "jit" / "attention" / "modules.py").read_text())
    assert parameters(function(tree, "gen_batch_mla_module")) == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_ckv", "head_dim_kpe", "use_profiler",
    ], "the factory's arguments moved"  # fmt: skip
    assert "gen_batch_mla_module" in (package() / "jit" / "__init__.py").read_text()


def test_no_private_name_is_used():
    """The plugin reads no name with an underscore of FlashInfer's modules and of their results."""
    for path in Path(vendor.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer"):
                names = [one.name for one in node.names]
                assert path.name in ("vendor.py", "latent_vendor.py"), f"{path.name} imports {names} from {node.module}"
                assert not any(name.startswith("_") for name in names), names
    trees = [ast.parse(Path(one.__file__).read_text()) for one in (vendor, latent_vendor)]
    used = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    foreign = {n.attr for n in used if not (isinstance(n.value, ast.Name) and n.value.id == "self")}
    assert not {attr for attr in foreign if attr.startswith("_")}


def test_merge_takes_two_states_in_place():
    """`merge_state_in_place(v, s, v_other, s_other, mask=None)` is exported at the package's top."""
    tree = ast.parse((package() / "cascade.py").read_text())
    got = parameters(function(tree, "merge_state_in_place"))
    assert got[:4] == ["v", "s", "v_other", "s_other"], "merge_state_in_place moved"
    assert "merge_state_in_place" in (package() / "__init__.py").read_text()


def test_plan_layout_matches_the_sizes():
    """FlashInfer's plan allocates the arrays that partition.py counts, in that order."""
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
    "MLAPlan": "77168fbb29743f3daef027554274e947826ae2758b605e599bd789d5ab1dcb06",
    "packed_causal_kv_end": "38043e2d1569a35c84ed4c606e04043553c584030ad8abd4b577b51e1a398d4c",
    "PrefillPlanImpl": "bdceaa8b03bb3bd520b468793b3ef9b507b2cfb146e2a2819abc1e8d6e3b7359",
}
"""sha256 of each function's text without white space."""


@pytest.mark.parametrize("name", READ)
def test_partition_source_is_unchanged(name):
    """FlashInfer's partition functions have their recorded hashes, because a size can change without a new name."""
    include = package() / "data" / "include" / "flashinfer"
    file = "utils.cuh" if name == "FA2DetermineCtaTileQ" else "attention/scheduler.cuh"
    text = (include / file).read_text()
    start = text.index(f" {name}(")
    body = "".join(text[start : text.index("\n}\n", start)].split())
    assert hashlib.sha256(body.encode()).hexdigest() == READ[name], (
        f"{name} of {file} differs from the one of {TESTED}, on which partition.py, latent_plan.py and conftest.py "
        "rely; compare the two, run the device tests, then record the hash"
    )
