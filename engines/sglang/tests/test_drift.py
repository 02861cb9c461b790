"""Tests that supported SGLang releases still have the interfaces that the adapter uses.

The tests read source files and import nothing. They read the installed SGLang and the wheels in the folder that
DRAFTMARK_SGLANG_WHEELS names (`make engines` fills it). `cpu/test_hooks.py` checks behaviour in a running SGLang.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from draftmark_sglang import hook_functions
from draftmark_sglang.heads import PACKAGE
from draftmark_sglang.hook_functions import REFUSALS
from draftmark_sglang.hooks import FUNCTIONS, HOOKS, Hook
from draftmark_sglang.plugin import ADDERS, CHOICES
from draftmark_sglang.refusals import ARGUMENTS, ENVIRONMENT, STATE_ARGUMENTS
from draftmark_sglang.versions import SUPPORTED
from engines.common.tests.released import Read, Releases, arguments, defined, imported, offered

HANDLERS = "srt/arg_groups/speculative_hook.py"
EACH = Releases(SUPPORTED, "sglang", "DRAFTMARK_SGLANG_WHEELS").each()


OURS = Path(__file__).parents[1] / "src" / "draftmark_sglang"


def _body(function: ast.AST) -> list[ast.stmt]:
    assert isinstance(function, ast.FunctionDef)
    return function.body


@EACH
def test_imported_names_exist(read: Read) -> None:
    """Each name that the adapter imports is defined in the module from which it is imported, not re-exported."""
    names = imported(OURS, "sglang")
    assert len(names) > 30
    assert [str(one) for one in names if not offered(read, one.module, one.name)] == []


@EACH
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_hooked_functions_exist(hook: object, read: Read) -> None:
    """Each hooked function is defined at the path that the hook gives for newer or for older releases."""
    assert isinstance(hook, Hook)
    assert any(_defines(read, target) for target in filter(None, (hook.target, hook.old_target)))


def test_functions_of_hooks_exist() -> None:
    """Each hook names a function of `hook_functions`, under its own module, by which `missing_hooks` finds it."""
    found = [getattr(hook_functions, one.function) for one in HOOKS]
    assert [(one.__module__, one.__name__) for one in found] == [(FUNCTIONS, one.function) for one in HOOKS]


def _defines(read: Read, target: str) -> bool:
    parts = target.split(".")[1:]
    names = [part for part in parts if not part.islower()] or [parts[-1]]
    names += [parts[-1]] * (names[-1] != parts[-1])
    source = _or_none(read, ".".join(parts[: len(parts) - len(names)]))
    return bool(source) and isinstance(defined(source, *names), ast.FunctionDef)


@EACH
def test_targets_configuration_is_found(read: Read) -> None:
    """Each release's arguments keep the target's configuration, or `ModelConfig` makes it from nothing else."""
    if "def get_model_config(" not in read("srt/server_args.py"):
        made = defined(read("srt/configs/model_config.py"), "ModelConfig", "from_server_args")
        assert isinstance(made, ast.FunctionDef) and made.args.args[0].arg == "server_args"
        assert len(made.args.args) - len(made.args.defaults) == 1


@EACH
def test_backend_lists_contain_triton(read: Read) -> None:
    """SGLang's model checks that list attention backends contain Triton, the name that draftmark's hook passes."""
    source = _or_none(read, "srt.arg_groups.model_hook") or read("srt/server_args.py")
    for model in ("GptOssForCausalLM", "Llama4ForCausalLM", "Gemma4ForCausalLM", "Exaone4ForCausalLM"):
        branch = source.partition(f'"{model}"')[2][:2500]
        assert (
            "assert" in branch and '"triton"' in branch.partition("assert")[0] + branch.partition("assert")[2][:400]
        ), model


@EACH
def test_padded_batches_keep_live_count(read: Read) -> None:
    """DP attention stores the number of live requests before it pads a batch."""
    padded = ast.unparse(
        defined(read("srt/model_executor/forward_batch_info.py"), "ForwardBatch", "prepare_mlp_sync_batch")
    )
    assert "self._original_batch_size = self.batch_size" in padded


@EACH
def test_rejected_arguments_exist(read: Read) -> None:
    """Each server argument that the adapter rejects exists in SGLang; a renamed argument would not be rejected."""
    fields = ["device", "disagg", "exec_", "memory", "model", "parallel", "schedule", "serving", "spec"]
    places = ("server_args", *(f"arg_groups.fields.{part}" for part in fields))
    source = "".join(_or_none(read, f"srt.{place}") for place in places)
    for name in (
        *ARGUMENTS,
        *STATE_ARGUMENTS,
        "disaggregation_mode",
        "dcp_size",
        "attn_cp_size",
        "enable_dp_attention",
        "enable_torch_compile",
    ):
        assert re.search(rf"^    {name}: ", source, re.MULTILINE), name


@EACH
def test_tree_rejection_is_the_last_check(read: Read) -> None:
    """SGLang's check of tree page sizes, which a hook skips, is the last check, so the hook skips nothing else.

    With n-gram drafts one more check follows, which `refusals` repeats.
    """
    source = read(HANDLERS)
    eagle, ngram = (_body(defined(source, name)) for name in ("_handle_eagle_family", "_handle_ngram"))
    assert REFUSALS[0] in ast.unparse(eagle[-1])
    at = next(n for n, one in enumerate(ngram) if REFUSALS[1] in ast.unparse(one))
    assert len(ngram) == at + 2 and "dp attention" in ast.unparse(ngram[-1])


@EACH
def test_backend_methods_keep_their_arguments(read: Read) -> None:
    """SGLang's `AttentionBackend` has the methods that draftmark overrides, with the expected arguments."""
    source = read("srt/layers/attention/base_attn_backend.py")
    expected = {
        "init_cuda_graph_state": ["max_bs", "max_num_tokens"],
        "get_cuda_graph_seq_len_fill_value": [],
        "init_forward_metadata_out_graph": ["forward_batch", "in_capture"],
        "init_forward_metadata_in_graph": ["forward_batch"],
        "verify_mask": [],
    }
    for name, taken in expected.items():
        assert arguments(defined(source, "AttentionBackend", name)) == taken, name
    for name in ("forward_decode", "forward_extend"):
        found = arguments(defined(source, "AttentionBackend", name))
        assert found[:6] == ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"], name


@EACH
def test_verify_mask_fields_exist(read: Read) -> None:
    """SGLang's `VerifyMask` has a mode for D × D masks (QLEN_ONLY), and the fields that draftmark fills."""
    mask = ast.unparse(defined(read("srt/layers/attention/verify_mask.py"), "VerifyMask"))
    assert all(f"{field}:" in mask for field in ("buffer", "mode", "max_bs"))
    source = read("srt/speculative/eagle_utils.py")
    assert "TreeMaskMode" in source and "QLEN_ONLY" in source


@EACH
def test_window_pool_fields_exist(read: Read) -> None:
    """SGLang's `SWAKVPool` has attributes for both KV pools, each layer's pool, and the mapping of slots."""
    pool = ast.unparse(defined(read("srt/mem_cache/swa_memory_pool.py"), "SWAKVPool"))
    fields = ("layers_mapping", "full_to_swa_index_mapping", "full_kv_pool", "swa_kv_pool")
    assert all(f"self.{field}" in pool for field in fields)
    assert "(full_attn_layer_id, False)" in pool and "(swa_layer_id, True)" in pool


@EACH
def test_ngram_masks_have_a_switch(read: Read) -> None:
    """SGLang's n-gram worker reads the module constant `USE_FULL_MASK`, which a hook changes, in each round."""
    source = read("srt/speculative/ngram_worker.py")
    assert "\nUSE_FULL_MASK = " in source
    assert "USE_FULL_MASK" in ast.unparse(defined(source, "NGRAMWorker", "_prepare_for_speculative_decoding"))


@EACH
def test_hidden_states_are_collected_before_layers(read: Read) -> None:
    """SGLang collects each hidden state before a layer runs, so it never collects the last layer's output."""
    source = read("srt/models/llama.py")
    forward = ast.unparse(defined(source, "LlamaModel", "forward"))
    assert "for i in range(self.start_layer, self.end_layer)" in forward and "i in self.layers_to_capture" in forward
    assert "return (hidden_states, aux_hidden_states)" in forward
    assert "val + 1 for val in layer_ids" in ast.unparse(defined(source, "set_eagle3_layers_to_capture"))


@EACH
def test_external_model_package_is_read(read: Read) -> None:
    """SGLang's model registry reads the package name of the draft heads from an environment variable."""
    assert "envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()" in read("srt/models/registry.py")
    assert "EntryClass" in read("srt/models/registry.py") and importlib.util.find_spec(PACKAGE)


@EACH
def test_names_can_be_added_to_the_command_line(read: Read) -> None:
    """One of the modules in `CHOICES` has the function that adds a backend name."""
    assert any(re.search(rf"^(def )?{ADDERS[0]}\b", _or_none(read, place), re.MULTILINE) for place in CHOICES)


@EACH
def test_rejected_variables_exist(read: Read) -> None:
    """Each environment variable that the adapter rejects exists in SGLang; a renamed one would not be rejected."""
    source = read("srt/environ.py")
    assert all(f"{name} = " in source for name in ENVIRONMENT)


@EACH
def test_accepted_kv_is_moved_by_sglang(read: Read) -> None:
    """SGLang moves the KV of accepted nodes itself, so the adapter does not call `commit_round`."""
    places = ("spec_utils", "eagle_info", "eagle_info_v2", "eagle_worker_v2", "ngram_info")
    assert any("move_kv_cache(" in _or_none(read, f"srt.speculative.{place}") for place in places)
    assert not any("commit_round" in one.read_text() for one in OURS.rglob("*.py"))


def _or_none(read: Read, module: str) -> str:
    try:
        return read(module.replace(".", "/").removeprefix("sglang/") + ".py")
    except (KeyError, FileNotFoundError):
        return ""
