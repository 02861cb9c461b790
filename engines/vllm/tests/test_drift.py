"""Tests of the vLLM interfaces that the adapter relies on, in the source files of each supported release.

The tests read the installed vLLM, and the wheels in the folder DRAFTMARK_VLLM_WHEELS. `make engines` fills the folder.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from draftmark_vllm.versions import VLLM
from engines.common.tests.released import Read, Releases, arguments, defined, imported, offered

SOURCES = Path(__file__).parents[1] / "src" / "draftmark_vllm"
BACKEND = "v1/attention/backend.py"
MLA = "model_executor/layers/attention/mla_attention.py"
RELEASES = Releases(VLLM, "vllm", "DRAFTMARK_VLLM_WHEELS")
EACH = RELEASES.each()
LATER = {"KVCacheLayout", "CPUMLAImpl"}
"""Names that only newer releases have. The code that imports them runs only there."""


def class_of(source: str, name: str) -> ast.ClassDef:
    """Return a class of a module by its name."""
    found = defined(source, name)
    assert isinstance(found, ast.ClassDef)
    return found


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class by name."""
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def fields(cls: ast.ClassDef) -> set[str]:
    """Return the annotated and assigned names in the body of a class."""
    found = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = (target for node in cls.body if isinstance(node, ast.Assign) for target in node.targets)
    return found | {target.id for target in assigned if isinstance(target, ast.Name)}


def abstract(cls: ast.ClassDef) -> set[str]:
    """Return the abstract methods that a subclass must implement."""
    return {
        name
        for name, node in methods(cls).items()
        if any(isinstance(one, ast.Name) and one.id == "abstractmethod" for one in node.decorator_list)
    }


@EACH
def test_every_imported_name_exists(read: Read) -> None:
    """Each vLLM release has every name that the adapter imports, except names that only newer releases have."""
    names = imported(SOURCES, "vllm")
    assert len(names) > 30
    assert {one.name for one in names if not offered(read, one.module, one.name)} <= LATER


@EACH
def test_adaptive_verification_asks_our_hooks(read: Read) -> None:
    """Each release with adaptive verification has the option and the two hooks that the adapter implements.

    Releases before 0.31 have no `get_varlen_cudagraph_max_query_len`, and refuse backends without ALWAYS.
    """
    source, options = read(BACKEND), read("config/speculative.py")
    if "enable_adaptive_verification" not in options:
        assert "supports_device_cpu_query_lens_mismatch" not in source
        return
    asked = arguments(defined(source, "AttentionBackend", "supports_device_cpu_query_lens_mismatch"))
    assert asked == []
    if "get_varlen_cudagraph_max_query_len" in source:
        hook = defined(source, "AttentionMetadataBuilder", "get_varlen_cudagraph_max_query_len")
        assert arguments(hook) == ["vllm_config", "kv_cache_spec"]
    else:
        assert "AttentionCGSupport.ALWAYS" in read("v1/worker/gpu/spec_decode/adaptive_verification.py")


@EACH
def test_dflash_calls_our_store(read: Read) -> None:
    """DFlash stores its context by `do_kv_cache_update` of the layer, with five positional arguments.

    On a GPU that method calls an operation of vLLM, which has the same arguments in each release.
    """
    source = read("model_executor/models/qwen3_dflash.py")
    call = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "do_kv_cache_update"
    )
    assert len(call.args) == 5 and not call.keywords
    own = defined((SOURCES / "impl.py").read_text(), "DraftmarkImpl", "do_kv_cache_update")
    assert arguments(own) == ["layer", "key", "value", "kv_cache", "slot_mapping"]
    store = defined(read("_custom_ops.py"), "reshape_and_cache_flash")
    pages = ["key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"]
    assert arguments(store) == ["key", "value", *pages]


@EACH
@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        (("AttentionBackend",), {"custom.py": "CustomBackend", "backend.py": "DraftmarkBackend"}),
        (("AttentionBackend",), {"custom.py": "CustomBackend", "latent/backend.py": "DraftmarkMLABackend"}),
        (("AttentionImplBase", "AttentionImpl"), {"impl.py": "DraftmarkImpl"}),
        (("AttentionMetadataBuilder",), {"builder.py": "DraftmarkBuilder"}),
    ],
)
def test_abstract_methods_are_implemented(read: Read, theirs: tuple[str, ...], own: dict[str, str]) -> None:
    """The adapter's classes implement every abstract method of vLLM's base classes."""
    source = read(BACKEND)
    needed = set().union(*(abstract(class_of(source, name)) for name in theirs))
    assert needed, theirs
    found = [set(methods(class_of((SOURCES / file).read_text(), name))) for file, name in own.items()]
    inherited = set(methods(class_of(read(MLA), "MLACommonBackend"))) if "latent/backend.py" in own else set()
    assert needed <= inherited.union(*found)


@EACH
@pytest.mark.parametrize(
    ("theirs", "file", "own", "method"),
    [
        ("AttentionMetadataBuilder", "builder.py", "DraftmarkBuilder", "build"),
        ("AttentionMetadataBuilder", "builder.py", "DraftmarkBuilder", "build_for_cudagraph_capture"),
        ("AttentionMetadataBuilder", "builder.py", "DraftmarkBuilder", "get_cudagraph_support"),
        ("AttentionMetadataBuilder", "builder.py", "DraftmarkBuilder", "update_draft_decode_metadata"),
        ("AttentionMetadataBuilder", "builder.py", "DraftmarkBuilder", "__init__"),
        ("AttentionImpl", "impl.py", "DraftmarkImpl", "__init__"),
        ("AttentionImpl", "impl.py", "DraftmarkImpl", "forward"),
        ("AttentionBackend", "custom.py", "CustomBackend", "get_supported_kernel_block_sizes"),
        ("AttentionBackend", "custom.py", "CustomBackend", "supports_block_size"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "supports_combination"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "customize_spec"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "get_kv_cache_shape"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "get_kv_cache_stride_order"),
    ],
)
def test_overridden_methods_accept_vllms_arguments(read: Read, theirs: str, file: str, own: str, method: str) -> None:
    """Overridden methods accept vLLM's arguments by name and by position. Methods that a release lacks are skipped."""
    other = methods(class_of(read(BACKEND), theirs)).get(method)
    if other is None:
        return
    mine = methods(class_of((SOURCES / file).read_text(), own))[method]
    passed, taken = arguments(other), arguments(mine)
    assert passed[: len(taken)] == taken[: len(passed)]
    assert len(passed) <= len(taken) or mine.args.vararg is not None


@EACH
def test_mla_classes_have_what_the_adapter_overrides(read: Read) -> None:
    """vLLM's MLA base classes have the methods and fields that the adapter overrides, with the arguments it expects."""
    builder, impl = class_of(read(MLA), "MLACommonMetadataBuilder"), class_of(read(MLA), "MLACommonImpl")
    assert {"build", "build_for_cudagraph_capture", "_build_decode"} <= set(methods(builder))
    decode = arguments(methods(builder)["_build_decode"])
    mine = arguments(
        methods(class_of((SOURCES / "latent/builder.py").read_text(), "DraftmarkMLABuilder"))["_build_decode"]
    )
    assert set(mine) <= set(decode), "an argument has another name"
    calls = [ast.unparse(one) for one in ast.walk(builder) if isinstance(one, ast.Call)]
    (call,) = [one for one in calls if one.startswith("self._build_decode(")]
    assert all(f"{name}=" in call for name in decode), "vLLM passes an argument by position"
    assert arguments(methods(impl)["forward_mqa"]) == ["q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"]
    assert {"query_len_support", "reorder_batch_threshold"} <= fields(builder)
    assert {"block_table", "seq_lens", "dcp_tot_seq_lens"} == fields(class_of(read(MLA), "MLACommonDecodeMetadata"))


@EACH
def test_custom_can_name_another_class(read: Read) -> None:
    """vLLM's CUDA platform imports the class that the backend's `full_cls_name` returns after it was validated."""
    source = read("platforms/cuda.py")
    path = ast.unparse(defined(source, "_backend_cls_path"))
    assert "backend_cls.full_cls_name()" in path
    selector = ast.unparse(methods(class_of(source, "CudaPlatformBase"))["get_attn_backend_cls"])
    assert selector.index("backend_class.validate_configuration(") < selector.index("_backend_cls_path(backend_class)")
    assert "**attn_selector_config._asdict()" in selector
    assert "full_cls_name" in methods(class_of(read(BACKEND), "AttentionBackend"))


@EACH
def test_requests_are_sorted_only_with_a_threshold(read: Read) -> None:
    """vLLM's runner sorts requests only if the builder sets a threshold, and the builder can set it."""
    theirs = class_of(read(BACKEND), "AttentionMetadataBuilder")
    defaults = {ast.unparse(one.target): one.value for one in theirs.body if isinstance(one, ast.AnnAssign)}
    usual = defaults["reorder_batch_threshold"]
    assert isinstance(usual, ast.Constant) and usual.value is None
    method = methods(theirs)["_init_reorder_batch_threshold"]
    assert arguments(method)[:2] == ["reorder_batch_threshold", "supports_spec_as_decode"]


@EACH
def test_metadata_has_the_fields_that_are_read(read: Read) -> None:
    """vLLM's metadata has every attribute that the builder reads."""
    reads = {
        node.attr
        for node in ast.walk(ast.parse((SOURCES / "parts.py").read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cam"
    }
    assert len(reads) > 5
    assert reads <= fields(class_of(read(BACKEND), "CommonAttentionMetadata"))


@EACH
def test_backend_can_set_the_kv_layout(read: Read) -> None:
    """The backend sets the KV layout: by its shape up to 0.28, by the layer's spec and a layout since 0.29."""
    names = set(methods(class_of(read(BACKEND), "AttentionBackend")))
    if "get_kv_cache_shape" in names:
        assert {"get_kv_cache_stride_order", "get_required_kv_cache_layout"} <= names
        return
    assert {"customize_spec", "supported_kv_cache_layouts"} <= names
    interface = read("v1/kv_cache_interface.py")
    assert {"LBNHC", "LHBNC"} <= fields(class_of(read("v1/kv_cache_layout.py"), "KVCacheLayout"))
    spec = fields(class_of(interface, "AttentionSpec"))
    assert {"num_head_slots", "state_content_bytes", "num_kv_heads", "head_size", "head_size_v", "dtype"} <= spec


@EACH
def test_custom_can_be_registered(read: Read) -> None:
    """vLLM has the slot CUSTOM and the function that registers a backend for it."""
    registry = read("v1/attention/backends/registry.py")
    enum = class_of(registry, "AttentionBackendEnum")
    assert "CUSTOM" in fields(enum)
    assert {"is_overridden", "get_path", "get_class"} <= set(methods(enum))
    assert arguments(defined(registry, "register_backend"))[:2] == ["backend", "class_path"]


@EACH
def test_selector_fields_equal_predicate_arguments(read: Read) -> None:
    """The fields of vLLM's selector configuration are the arguments of the backend's predicates."""
    method = methods(class_of(read("platforms/cpu.py"), "CpuPlatform"))["get_attn_backend_cls"]
    assert arguments(method) == ["selected_backend", "attn_selector_config", "num_heads"]
    result = fields(class_of(read("v1/attention/selector.py"), "AttentionSelectorConfig"))
    taken = arguments(methods(class_of(read(BACKEND), "AttentionBackend"))["validate_configuration"])
    assert {*result, "device_capability"} == set(taken)


@EACH
def test_configuration_has_the_fields_that_are_read(read: Read) -> None:
    """vLLM's configuration has the fields that the adapter reads."""
    assert {"additional_config", "speculative_config"} <= fields(class_of(read("config/vllm.py"), "VllmConfig"))
    assert {"max_num_seqs", "max_num_batched_tokens"} <= fields(
        class_of(read("config/scheduler.py"), "SchedulerConfig")
    )
    assert "num_speculative_tokens" in fields(class_of(read("config/speculative.py"), "SpeculativeConfig"))
    assert "cudagraph_capture_sizes" in fields(class_of(read("config/compilation.py"), "CompilationConfig"))
    assert "def get_layers_from_vllm_config(" in read("config/vllm.py")


@RELEASES.each_wheel()
def test_wheels_belong_to_the_supported_range(version: str) -> None:
    """Every wheel in the folder belongs to the supported range."""
    assert VLLM.reason_against(version) is None
