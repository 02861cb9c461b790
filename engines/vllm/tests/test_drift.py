"""What the adapter relies on, in each release of the supported range, read from its files without importing them.

Of the installed vLLM, and of the wheels in the folder that DRAFTMARK_VLLM_WHEELS names (`make test-vllm` fills it).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from draftmark_vllm.versions import VLLM
from engines.common.tests.released import Read, Releases, arguments, defined, imported, offered

OURS = Path(__file__).parents[1] / "src" / "draftmark_vllm"
BACKEND = "v1/attention/backend.py"
RELEASES = Releases(VLLM, "vllm", "DRAFTMARK_VLLM_WHEELS")
EACH = RELEASES.each()
LATER = {"KVCacheLayout"}
"""Names of newer releases, which alone call what imports them."""


def class_of(source: str, name: str) -> ast.ClassDef:
    """A class of a module by its name."""
    found = defined(source, name)
    assert isinstance(found, ast.ClassDef)
    return found


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Its methods by name."""
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def fields(cls: ast.ClassDef) -> set[str]:
    """Annotated and assigned names of its body."""
    found = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = (target for node in cls.body if isinstance(node, ast.Assign) for target in node.targets)
    return found | {target.id for target in assigned if isinstance(target, ast.Name)}


def abstract(cls: ast.ClassDef) -> set[str]:
    """Methods that a subclass must bring."""
    return {
        name
        for name, node in methods(cls).items()
        if any(isinstance(one, ast.Name) and one.id == "abstractmethod" for one in node.decorator_list)
    }


@EACH
def test_every_name_that_is_imported_is_there(read: Read) -> None:
    """But for those that older releases do not ask for."""
    names = imported(OURS, "vllm")
    assert len(names) > 30
    assert {one.name for one in names if not offered(read, one.module, one.name)} <= LATER


@EACH
@pytest.mark.parametrize(
    ("theirs", "file", "own"),
    [
        (("AttentionBackend",), "backend.py", "DraftmarkBackend"),
        (("AttentionImplBase", "AttentionImpl"), "impl.py", "DraftmarkImpl"),
        (("AttentionMetadataBuilder",), "builder.py", "DraftmarkBuilder"),
    ],
)
def test_what_is_abstract_is_brought(read: Read, theirs: tuple[str, ...], file: str, own: str) -> None:
    """Every abstract method has one of ours."""
    source = read(BACKEND)
    needed = set().union(*(abstract(class_of(source, name)) for name in theirs))
    assert needed, theirs
    assert needed <= set(methods(class_of((OURS / file).read_text(), own)))


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
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "get_supported_kernel_block_sizes"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "supports_block_size"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "supports_combination"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "customize_spec"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "get_kv_cache_shape"),
        ("AttentionBackend", "backend.py", "DraftmarkBackend", "get_kv_cache_stride_order"),
    ],
)
def test_arguments_have_their_names_and_order(read: Read, theirs: str, file: str, own: str, method: str) -> None:
    """What vLLM passes, ours takes: by name and by position; what a release lacks it does not call."""
    other = methods(class_of(read(BACKEND), theirs)).get(method)
    if other is None:
        return
    mine = methods(class_of((OURS / file).read_text(), own))[method]
    passed, taken = arguments(other), arguments(mine)
    assert passed[: len(taken)] == taken[: len(passed)]
    assert len(passed) <= len(taken) or mine.args.vararg is not None


@EACH
def test_steps_are_sorted_for_a_builder_that_asks(read: Read) -> None:
    """As one does that serves trees; no other by default."""
    theirs = class_of(read(BACKEND), "AttentionMetadataBuilder")
    defaults = {ast.unparse(one.target): one.value for one in theirs.body if isinstance(one, ast.AnnAssign)}
    usual = defaults["reorder_batch_threshold"]
    assert isinstance(usual, ast.Constant) and usual.value is None
    ask = methods(theirs)["_init_reorder_batch_threshold"]
    assert arguments(ask)[:2] == ["reorder_batch_threshold", "supports_spec_as_decode"]


@EACH
def test_a_step_has_what_is_read_of_it(read: Read) -> None:
    """Every attribute that the builder reads of vLLM's metadata."""
    reads = {
        node.attr
        for node in ast.walk(ast.parse((OURS / "builder.py").read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cam"
    }
    assert len(reads) > 5
    assert reads <= fields(class_of(read(BACKEND), "CommonAttentionMetadata"))


@EACH
def test_kv_can_be_laid_out_token_by_token(read: Read) -> None:
    """By the backend's own shape, as to 0.28, or by the layer's spec and a layout, as since 0.29."""
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
def test_custom_can_be_claimed(read: Read) -> None:
    """The slot for a backend from outside, and how it is claimed."""
    registry = read("v1/attention/backends/registry.py")
    enum = class_of(registry, "AttentionBackendEnum")
    assert "CUSTOM" in fields(enum)
    assert {"is_overridden", "get_path", "get_class"} <= set(methods(enum))
    assert arguments(defined(registry, "register_backend"))[:2] == ["backend", "class_path"]


@EACH
def test_the_cpu_platform_asks_as_the_cuda_platform_does(read: Read) -> None:
    """What the selector says of a layer is what the predicates take."""
    asks = methods(class_of(read("platforms/cpu.py"), "CpuPlatform"))["get_attn_backend_cls"]
    assert arguments(asks) == ["selected_backend", "attn_selector_config", "num_heads"]
    said = fields(class_of(read("v1/attention/selector.py"), "AttentionSelectorConfig"))
    taken = arguments(methods(class_of(read(BACKEND), "AttentionBackend"))["validate_configuration"])
    assert {*said, "device_capability"} == set(taken)


@EACH
def test_the_configuration_has_what_is_read_of_it(read: Read) -> None:
    """vLLM's settings by their names."""
    assert {"additional_config", "speculative_config"} <= fields(class_of(read("config/vllm.py"), "VllmConfig"))
    assert {"max_num_seqs", "max_num_batched_tokens"} <= fields(
        class_of(read("config/scheduler.py"), "SchedulerConfig")
    )
    assert "num_speculative_tokens" in fields(class_of(read("config/speculative.py"), "SpeculativeConfig"))
    assert "cudagraph_capture_sizes" in fields(class_of(read("config/compilation.py"), "CompilationConfig"))
    assert "def get_layers_from_vllm_config(" in read("config/vllm.py")


@RELEASES.each_wheel()
def test_the_wheels_that_are_read_are_of_the_range(version: str) -> None:
    """None of another range is judged by mistake."""
    assert VLLM.reason_against(version) is None
