"""Drift tests: every accepted FlashInfer release has the internals that the plugin relies on."""

from __future__ import annotations

import ast
import hashlib
import random
import re
import tomllib
from pathlib import Path

import pytest
import torch

from draftmark import AttentionShape
from draftmark_cuda_flashinfer import latent_vendor, partition, vendor, version
from draftmark_cuda_flashinfer.partition import Partition
from draftmark_cuda_flashinfer.version import ACCEPTED, DISTRIBUTION, RANGE
from draftmark_testing.flashinfer_releases import each_flashinfer_release
from plugins.cuda_flashinfer.tests.planner import SCHEDULER, UTILS, Planner

EACH = each_flashinfer_release(ACCEPTED)


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"flashinfer.prefill no longer has a function {name}; find its replacement, then change vendor.py"
    return found[0]


def parameters(of: ast.FunctionDef) -> list[str]:
    return [one.arg for one in of.args.args]


def binding(release, name: str, file: str = "batch_prefill_jit_binding.cu") -> list[str]:
    """Return the parameter names of one of FlashInfer's exported C++ functions."""
    text = release.read(f"data/csrc/{file}")
    body = re.search(rf"{name}\((.*?)\);", text, re.DOTALL)
    assert body, f"{name} is no longer exported; find its replacement, then change vendor.py"
    arguments = body.group(1).replace("ADDITIONAL_FUNC_PARAMS", "")
    return [part.split()[-1] for part in arguments.split(",")]


def further(release) -> list[str]:
    """Return the arguments of `plan` and `workspace_size` that the release has and 0.7.0 has not."""
    later = ACCEPTED.index(release.version) >= ACCEPTED.index("0.7.4")
    return list(vendor.ARGUMENTS_SINCE_0_7_4) if later else []


def test_pip_installs_the_accepted_releases():
    """The extra `runtime` has the bounds of `ACCEPTED`."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    extra = tomllib.loads(file.read_text())["project"]["optional-dependencies"]["runtime"]
    assert f"{DISTRIBUTION}{RANGE}" in extra


@EACH
def test_release_is_accepted(release):
    """The installed FlashInfer and each wheel is in `ACCEPTED`, for which workspaces and arguments were checked."""
    assert release.version in ACCEPTED, (
        f"{DISTRIBUTION} {release.version} is installed; run these tests and a device verdict, then add it to ACCEPTED"
    )


@EACH
def test_plan_arguments_match(release):
    """FlashInfer's `plan` takes the positional arguments that the plugin passes, in that order."""
    expected = [*vendor.PLAN_ARGUMENTS, *further(release)]
    assert binding(release, "BatchPrefillWithKVCachePlan") == expected, "plan's arguments moved"


@EACH
def test_workspace_size_arguments_match(release):
    """FlashInfer's `workspace_size` takes the positional arguments that the plugin passes, in that order."""
    got = binding(release, "BatchPrefillWithKVCacheWorkspaceSize")
    expected = ["device_buffer", *vendor.WORKSPACE_ARGUMENTS, *further(release)]
    assert got == expected, "workspace_size's arguments moved"


@pytest.mark.parametrize("installed", [*ACCEPTED, None])
def test_as_many_arguments_are_passed_as_named(monkeypatch, installed):
    """For each release the plugin passes one value for each named argument; without FlashInfer, as for the newest."""
    monkeypatch.setattr(version, "installed", lambda: installed)
    shape = AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
    indptr = torch.zeros(2, dtype=torch.int32)
    passed = vendor._arguments(shape, vendor.Request(indptr, indptr, 1, 16, True, -1, Partition(True, -1, 1, 0, 0)))
    names = vendor.WORKSPACE_ARGUMENTS
    assert len(passed) == len(names) + (installed in ("0.7.4", None))


@EACH
def test_paged_run_arguments_match(release):
    """FlashInfer's `paged_run` requires exactly the parameters that the plugin passes by name."""
    tree = ast.parse(release.read("prefill.py"))
    run = function(function(tree, "get_batch_prefill_module"), "paged_run")
    required = parameters(run)[: len(run.args.args) - len(run.args.defaults)]
    assert required == list(vendor.RUN_ARGUMENTS), "paged_run's arguments moved"


@EACH
def test_module_factory_arguments_match(release):
    """`get_batch_prefill_module(backend, *args)` passes its arguments to `gen_batch_prefill_module` in order."""
    tree = ast.parse(release.read("jit/attention/modules.py"))
    assert parameters(function(tree, "gen_batch_prefill_module"))[:11] == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_qk", "head_dim_vo", "pos_encoding_mode",
        "use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction",
    ], "the factory's arguments moved"  # fmt: skip


@EACH
@pytest.mark.parametrize("file", ["batch_mla_binding.cu", "batch_mla_sm90_binding.cu"])
def test_mla_arguments_match(release, file):
    """Both MLA modules take the positional arguments that the plugin passes to `plan` and `run`, in that order."""
    of = "BatchMLAPagedAttentionSM90" if "sm90" in file else "BatchMLAPagedAttention"
    assert binding(release, f"{of}Plan", file) == list(latent_vendor.PLAN_ARGUMENTS), "the MLA plan's arguments moved"
    assert binding(release, f"{of}Run", file) == list(latent_vendor.RUN_ARGUMENTS), "the MLA run's arguments moved"


@EACH
def test_mla_factory_arguments_match(release):
    """`flashinfer.jit.gen_batch_mla_module` takes the arguments that the plugin passes, in that order."""
    tree = ast.parse(release.read("jit/attention/modules.py"))
    assert parameters(function(tree, "gen_batch_mla_module")) == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_ckv", "head_dim_kpe", "use_profiler",
    ], "the factory's arguments moved"  # fmt: skip
    assert "gen_batch_mla_module" in release.read("jit/__init__.py")


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


@EACH
def test_merge_takes_two_states_in_place(release):
    """`merge_state_in_place(v, s, v_other, s_other, mask=None)` is exported at the package's top."""
    tree = ast.parse(release.read("cascade.py"))
    got = parameters(function(tree, "merge_state_in_place"))
    assert got[:4] == ["v", "s", "v_other", "s_other"], "merge_state_in_place moved"
    assert "merge_state_in_place" in release.read("__init__.py")


@EACH
def test_plan_layout_matches_the_sizes(release):
    """FlashInfer's plan allocates the arrays that partition.py counts, in that order."""
    text = release.read(SCHEDULER)
    plan = text[text.index("inline cudaError_t PrefillPlanImpl(") : text.index("inline cudaError_t PrefillPlan(")]
    names = re.findall(r'"(batch_prefill_\w+)"', plan)
    assert names == [
        "batch_prefill_request_indices", "batch_prefill_qo_tile_indices", "batch_prefill_kv_tile_indices",
        "batch_prefill_o_indptr", "batch_prefill_kv_chunk_size_ptr", "batch_prefill_total_num_rows",
        "batch_prefill_tmp_v", "batch_prefill_tmp_s", "batch_prefill_merge_indptr", "batch_prefill_block_valid_mask",
    ], "the plan allocates other arrays, or in another order; partition.py must follow"  # fmt: skip


READ = {
    "FA2DetermineCtaTileQ": {"0.7.0.post1": "be5415da7593202b6f4cfc94c8fe1af4540f527f2210e26c8487e9122b659aea"},
    "PrefillBinarySearchKVChunkSize": {
        "0.7.0.post1": "d5da0ab6ddd53e87568ecbdacefd2ead93c1dcb5cf9c25d2694929462b8cf429",
    },
    "PrefillSplitQOKVIndptr": {
        "0.7.0.post1": "1e5b392746b606ea06bf5ca24e5640f8485058c6eb7940888deb6bc8430640ed",
        "0.7.4": "98ed18ee90ebfdaea9411a93aa8744dcdc4462c5200b99f753e31b041ce54123",
    },
    "MLAPlan": {"0.7.0.post1": "77168fbb29743f3daef027554274e947826ae2758b605e599bd789d5ab1dcb06"},
    "packed_causal_kv_end": {"0.7.0.post1": "38043e2d1569a35c84ed4c606e04043553c584030ad8abd4b577b51e1a398d4c"},
    "PrefillPlanImpl": {
        "0.7.0.post1": "721a6043f2353285d28e5d615080376f73d9e307e79293e535d818eda298f0e1",
        "0.7.1": "bdceaa8b03bb3bd520b468793b3ef9b507b2cfb146e2a2819abc1e8d6e3b7359",
        "0.7.4": "be1b3919de5f02182e37217a8dd0540814130bdf197c2df3b93a375cafe11edb",
    },
}
"""sha256 of each function's text without white space, by the first release that has the text."""


@EACH
@pytest.mark.parametrize("name", READ)
def test_partition_source_is_known(release, name):
    """FlashInfer's partition functions have their recorded hashes, because a size can change without a new name."""
    text = release.read(UTILS if name == "FA2DetermineCtaTileQ" else SCHEDULER)
    start = text.index(f" {name}(")
    body = "".join(text[start : text.index("\n}\n", start)].split())
    known = [sha for first, sha in READ[name].items() if ACCEPTED.index(first) <= ACCEPTED.index(release.version)]
    assert hashlib.sha256(body.encode()).hexdigest() == known[-1], (
        f"{name} of {release.version} is new, and partition.py, latent_plan.py and conftest.py rely on it; "
        "compare the two, run the device tests, then record the hash"
    )


@EACH
def test_plans_have_the_bytes_of_the_releases_planner(release, monkeypatch, library_plan, tmp_path_factory):
    """The release's own planner, compiled for a CPU, reserves the bytes of `partition` and of `library_plan`."""
    planner = Planner(release, tmp_path_factory.mktemp("planner"))
    monkeypatch.setattr(version, "installed", lambda: release.version)
    dice = random.Random(3)
    for _ in range(400):
        kv_heads, group, dim = dice.choice((1, 2, 8)), dice.choice((1, 4, 7, 8)), dice.choice((64, 128, 256))
        page, count, window = dice.choice((1, 16, 64)), dice.randint(1, 40), dice.choice((-1, 500))
        graph = dice.random() < 0.5
        q_len = dice.choice((1, 5, 16))
        q_lens = [q_len] * count if graph else [dice.choice((1, 5, 200)) for _ in range(count)]
        pages = [1 + dice.randrange(40000) // page for _ in range(count)]
        fixed = -1 if graph or dice.random() < 0.5 else dice.choice((1, 64, 4096))
        asked = {
            "heads": kv_heads * group, "kv_heads": kv_heads, "dim": dim, "page_size": page, "sms": 132, "graph": graph,
            "q_len": q_len if graph else 0, "window": window, "fixed": fixed,
        }  # fmt: skip
        shared = ACCEPTED.index(release.version) >= ACCEPTED.index("0.7.1")
        floats, ints, _, grid = library_plan(q_lens, pages, **asked, shared=shared)
        found = planner(q_lens, pages, **asked)
        assert found == (floats, ints, grid), asked
        if floats:
            shape = AttentionShape(kv_heads * group, kv_heads, dim, page)
            tile = partition.row_tile(sum(q_lens) * group // count, dim)
            assert partition.float_bytes(shape, grid, tile) == found[0]
