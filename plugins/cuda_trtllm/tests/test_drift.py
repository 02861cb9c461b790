"""Drift tests: every accepted FlashInfer release has the functions and kernel sources that the plugin relies on.

They read FlashInfer's files as text and never import it. Without a release they are skipped.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from pathlib import Path

import pytest

import draftmark_cuda_trtllm as plugin
from draftmark_cuda_trtllm import forms, versions
from draftmark_testing.flashinfer_releases import each_flashinfer_release

EACH = each_flashinfer_release(versions.ACCEPTED)

SOURCES = Path(plugin.__file__).parent
PUBLIC = {
    "flashinfer.xqa": {"xqa"},
    "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache"},
    "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache"},
    "flashinfer.mla": {"trtllm_batch_decode_with_kv_cache_mla"},
}
"""Every function of the library that the plugin uses. None is private."""
KEYWORDS = {
    "xqa.py": ("xqa", "sinks q_scale kv_scale sliding_win_size kv_layout sm_count q_seq_len mask q_cu_seq_lens"),
    "decode.py": (
        "trtllm_batch_decode_with_kv_cache",
        "bmm1_scale bmm2_scale window_left out kv_layout multi_ctas_kv_counter_buffer max_seq_len backend "
        "q_len_per_req",
    ),
    "prefill.py": (
        "trtllm_batch_context_with_kv_cache",
        "bmm1_scale bmm2_scale window_left out kv_layout multi_ctas_kv_counter_buffer max_q_len max_kv_len batch_size "
        "cum_seq_lens_q cum_seq_lens_kv",
    ),
    "mla/_core.py": (
        "trtllm_batch_decode_with_kv_cache_mla",
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens "
        "max_seq_len out bmm1_scale bmm2_scale backend multi_ctas_kv_counter_buffer",
    ),
}
POSITIONAL = [
    *("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer", "semaphores"),
    *("num_kv_heads", "page_size"),
]
READ = {
    "mha.cu": "fac9c9a116be125b800257c455ee3abe2a2a620b2816a3c254792d3a5033ace4",
    "defines.h": "722dd1cba129d23ba532bdab69c15c7255d6870af52d0d3e1d5667734e752973",
    "mhaUtils.cuh": "9a62daf9bc47e03d68eb4ea8e650d4f72b29ad50538a07404f3a0793d5a1ade8",
    "xqa_wrapper.cu": "31fbba7d0e912091b9aa16a1fd28338372be56b4543edcf556e21e33924a34aa",
}
"""sha256 of the kernel sources that the plugin relies on beyond the documentation. `sizing` relies on the sizes of
scratch and semaphores. `forms` relies on a grid of q_rows rows that serves requests with more rows. `support` relies on
the sink index of a row in the tree form."""


def imports(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("flashinfer"):
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("flashinfer") for alias in node.names), path.name
    return found


def test_only_public_functions_are_used():
    """The plugin imports exactly the listed functions of FlashInfer, and each of them is public."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for module, names in imports(path).items():
            found.setdefault(module, set()).update(names)
    assert found == PUBLIC
    assert not any(name.startswith("_") for names in found.values() for name in names)


def test_library_is_not_imported_at_module_level():
    """No module imports FlashInfer at its top, so sizing and metadata work without it."""
    for path in SOURCES.rglob("*.py"):
        body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert not any((node.module or "").startswith("flashinfer") for node in body), path.name


@EACH
@pytest.mark.parametrize("file", KEYWORDS)
def test_functions_take_our_arguments(release, file):
    """FlashInfer's functions have each keyword that the plugin passes, and xqa keeps its positional order."""
    name, keywords = KEYWORDS[file]
    tree = ast.parse(release.read(file))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    positional = [one.arg for one in function.args.args]
    missing = set(keywords.split()) - set(positional) - {one.arg for one in function.args.kwonlyargs}
    what = f"flashinfer's {name} no longer takes {sorted(missing)}; change the call and run the device tests"
    assert not missing, what
    if name == "xqa":
        assert positional[: len(POSITIONAL)] == POSITIONAL, "flashinfer's xqa takes its tensors in another order"


@EACH
@pytest.mark.parametrize("file", READ)
def test_kernel_sources_are_known(release, file):
    """The XQA sources have the recorded hashes, because changed sources can need other scratch sizes."""
    text = release.read(f"data/csrc/xqa/{file}")
    assert hashlib.sha256(text.encode()).hexdigest() == READ[file], (
        f"xqa/{file} of {release.version} is new, and sizing.py and forms.py rely on it; "
        "compare launchMHAFlashInfer and kernel_mha_impl, run the device tests, then record the hash"
    )


@EACH
def test_tile_constants_match_the_sources(release):
    """BLOCK_ROWS and KV_TILE equal the tile sizes in FlashInfer's sources."""
    (rows,) = re.findall(r"#define M_TILESIZE (\d+)", release.read("data/csrc/xqa/defines.h"))
    text = release.read("data/csrc/xqa/mha.cu")
    assert int(rows) == forms.BLOCK_ROWS
    assert "constexpr uint3 ctaShapeInWarps = {4, 1, 2};" in text
    assert "constexpr uint2 warpTile = {64," in text
    assert forms.KV_TILE == 4 * 64


@EACH
def test_release_is_accepted(release):
    """The installed FlashInfer and each wheel is in versions.ACCEPTED. Otherwise the plugin would refuse it."""
    assert release.version in versions.ACCEPTED


def test_pip_installs_the_accepted_releases():
    """The extra `runtime` has the bounds of ACCEPTED."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    extra = tomllib.loads(file.read_text())["project"]["optional-dependencies"]["runtime"]
    assert f"{versions.DISTRIBUTION}{versions.RANGE}" in extra
