"""Compiled kernels are stored once, found by every later start, and compiled again only when they must be."""

from __future__ import annotations

import importlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from draftmark import load
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.compiled import assembler, folder, loading, pool, prepare
from draftmark_cuda_triton.compiled.source import KernelSource
from draftmark_cuda_triton.compiled.store import Store
from plugins.cuda_triton.tests.stores import QUICK, SMALL, entries_of, source_of

KERNEL = """
import triton
from triton import language as tl

FACTOR = tl.constexpr({factor})

@triton.jit
def half(x):
    return x * FACTOR

@triton.jit
def scale(out, COUNT: tl.constexpr):
    tl.store(out + tl.arange(0, COUNT), half(tl.load(out + tl.arange(0, COUNT))))
"""


def test_processes_compile_into_the_store(stored, compiled_once, quick_specs, compilations):
    """Other processes compile what is missing and report each kernel; a second call compiles nothing."""
    store, report, steps = compiled_once
    assert report.compiled == 2 and report.folder == str(store.root)
    assert [(done, count) for done, count, _ in steps] == [(1, 2), (2, 2)] and {name for *_, name in steps} == set(
        QUICK
    )
    again = prepare.store_kernels(quick_specs, lambda *_: pytest.fail("compiled again"))
    assert (again.kernels, again.compiled, again.shipped) == (2, 0, 0)
    assert 0 < again.num_bytes <= store.num_bytes() < 2**20 and compilations == []
    assert {path.suffix for path in store.root.rglob("*") if path.is_file()} - {""} == {".cubin", ".json"}


def test_stored_kernel_is_the_compiled_kernel(stored, quick_specs, tmp_path, monkeypatch):
    """The machine code in the store equals what Triton compiles in this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    entry = stored.find(source_of(quick_specs[0]))
    kernel = loading.load(entry, quick_specs[0].source())
    compiled = quick_specs[0].compile()
    # Triton 3.7's hash of a source also depends on what the process compiled before.
    assert kernel.asm["cubin"] == compiled.asm["cubin"]
    assert kernel.metadata._replace(hash="") == compiled.metadata._replace(hash="")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("write_kv_rows.cubin", "one byte"),
        pytest.param("write_kv_rows.cubin", "removed", marks=pytest.mark.long),
        pytest.param("write_kv_rows.json", "one byte", marks=pytest.mark.long),
        ("sums.json", "empty"),
        pytest.param("sums.json", "one byte", marks=pytest.mark.long),
    ],
)
def test_damaged_entry_is_compiled_again(stored, quick_specs, name, damage):
    """An entry with a file that is empty, changed or absent counts as missing; the next call replaces it."""
    store, source = stored, source_of(quick_specs[0])
    path = Path(store.find(source).files["write_kv_rows.json"]).with_name(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.unlink() if damage == "removed" else path.write_bytes(b"" if damage == "empty" else content)
    assert store.find(source) is None
    assert prepare.store_kernels(quick_specs).compiled == 1 and store.find(source) is not None


@pytest.mark.long
def test_concurrent_processes_compile_each_kernel_once(empty_store, quick_specs):
    """One of several ranks that start together compiles each kernel; the others wait and find it."""
    # Locks of files belong to the open file, so threads stand in for processes.
    with ThreadPoolExecutor(3) as ranks:
        reports = [one.result() for one in [ranks.submit(prepare.store_kernels, quick_specs) for _ in range(3)]]
    assert sorted(one.compiled for one in reports) == [0, 0, 2] and len(entries_of(empty_store)) == 2


def test_concurrent_puts_leave_one_whole_entry(stored, quick_specs, tmp_path):
    """Processes that store the same kernel at the same time leave one whole entry and no temporary folder."""
    source, other = source_of(quick_specs[0]), Store(tmp_path / "other")
    files = stored.find(source).files
    with ThreadPoolExecutor(8) as writers:
        for done in [writers.submit(other.put, source, files) for _ in range(32)]:
            done.result()
    assert other.find(source) is not None
    assert [path.name for path in entries_of(other)[0].parent.iterdir()] == [entries_of(other)[0].name]


def test_folder_that_cannot_be_written_is_read(stored, quick_specs, monkeypatch, caplog):
    """Kernels in a read-only folder are found; new ones go to a temporary folder, with one warning."""
    store = stored
    monkeypatch.setattr(folder, "_is_writable", lambda root: root != store.root)
    folder._open.cache_clear()
    other = folder.kernel_store()
    folder._open.cache_clear()
    assert other.root != store.root and other.find(source_of(quick_specs[0])) is not None
    assert "cannot be written" in caplog.text and "DRAFTMARK_CACHE_DIR" in caplog.text


def test_file_in_place_of_the_folder_is_no_error(tmp_path, monkeypatch, quick_specs):
    """With a folder that cannot be created, kernels compile and last for the process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert prepare.store_kernels(quick_specs[:1]).compiled == 1
    assert prepare.store_kernels(quick_specs[:1]).compiled == 0


def test_key_follows_everything_that_changes_machine_code(quick_specs, monkeypatch):
    """Architecture, options, Triton's version and its environment change the key; folders and line info do not."""
    spec = quick_specs[0]
    key, options = source_of(spec).key, dict(spec.options)
    others = [
        KernelSource.of(spec.source(), GPUTarget("cuda", 80, 32), options).key,
        KernelSource.of(spec.source(), spec.target, options | {"num_warps": 8}).key,
    ]
    with monkeypatch.context() as inside:
        inside.setattr(triton, "__version__", "3.0.0")
        others.append(source_of(spec).key)
    with monkeypatch.context() as inside:
        inside.setenv("DISABLE_LLVM_OPT", "1")
        others.append(source_of(spec).key)
    assert len({key, *others}) == 5
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert source_of(spec).key == key


@pytest.mark.long
def test_libdevice_of_this_process_does_not_change_machine_code(empty_store, quick_specs, monkeypatch, tmp_path):
    """torch can set another libdevice in a process that it compiles in; kernels keep Triton's own."""
    key, other = source_of(quick_specs[0]).key, tmp_path / "libdevice.10.bc"
    other.write_bytes(b"another library")
    monkeypatch.setattr(triton.knobs.nvidia, "libdevice_path", str(other))
    source = source_of(quick_specs[0])
    assert source.key == key
    assert pool.compile_all([source], empty_store, lambda *_: None, processes=1)[0].error == ""


def test_assembler_of_torch_does_not_change_machine_code(empty_store, quick_specs, monkeypatch, tmp_path):
    """torch names its own ptxas in a process that it compiles in: that one is ignored, and a user's is not."""
    key, other = source_of(quick_specs[0]).key, tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.9, V99.9.1\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(other))
    assert source_of(quick_specs[0]).key != key
    monkeypatch.setattr(assembler, "_is_inside_torch", lambda path: path == str(other))
    source = source_of(quick_specs[0])
    assert source.key == key
    assert pool.compile_all([source], empty_store, lambda *_: None, processes=1)[0].error == ""
    assert os.environ["TRITON_PTXAS_PATH"] == str(other)


def test_path_inside_torch_is_known():
    """A path below torch's folder is torch's; others, and none, are not."""
    inside = Path(torch.__file__).parent / "bin" / "ptxas"
    assert [assembler._is_inside_torch(one) for one in (str(inside), "/usr/bin/ptxas", None)] == [True, False, False]


def test_key_follows_the_functions_that_a_kernel_calls(tmp_path, monkeypatch):
    """A changed constant of a function that the kernel calls changes the key; the order of hashing does not."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # tests of engines on the CPU set it for the whole process
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = []
    for factor in ("0.5", "0.25", "0.5"):
        name = f"kernel_module_{len(keys)}"
        (tmp_path / f"{name}.py").write_text(KERNEL.format(factor=factor))
        module = importlib.import_module(name)
        function, first = module.scale, (module.scale, module.half)[len(keys) // 2]
        assert first.cache_key  # in the last module the callee is hashed first
        made = triton.compiler.ASTSource(function, {"out": "*fp32", "COUNT": "constexpr"}, {"COUNT": 32})
        keys.append(KernelSource.of(made, GPUTarget("cuda", 90, 32), {}).key)
    assert keys[0] == keys[2] != keys[1]


INNER = """
import triton
from triton import language as tl
FACTOR = tl.constexpr(2)
@triton.jit
def double(x):
    return x * FACTOR
"""
OUTER = """
import triton
from triton import language as tl
from {inner} import double
FACTOR = tl.constexpr(3)
@triton.jit
def scale(out, COUNT: tl.constexpr):
    at = out + tl.arange(0, COUNT)
    tl.store(at, double(tl.load(at)) * FACTOR)
"""


def test_key_does_not_depend_on_where_modules_lie_in_memory(tmp_path, monkeypatch):
    """Constants of one name in two modules give one key, whichever module was loaded first.

    Triton 3.6 orders such constants by the addresses of their modules.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = set()
    for number in range(8):
        inner, outer = f"inner_module_{number}", f"outer_module_{number}"
        (tmp_path / f"{inner}.py").write_text(INNER)
        (tmp_path / f"{outer}.py").write_text(OUTER.format(inner=inner))
        for name in (inner, outer)[number % 2 :]:
            module = importlib.import_module(name)
        made = triton.compiler.ASTSource(module.scale, {"out": "*fp32", "COUNT": "constexpr"}, {"COUNT": 32})
        keys.add(KernelSource.of(made, GPUTarget("cuda", 90, 32), {}).key)
    assert len(keys) == 1


def test_kernel_that_cannot_be_compiled_is_reported(empty_store, quick_specs, caplog):
    """An error of one kernel names the kernel and does not stop the others."""
    sources = [source_of(spec) for spec in quick_specs]
    broken = replace(sources[0], options={"num_warps": 3})
    results = pool.compile_all([broken, sources[1]], empty_store, lambda *_: None, processes=1)
    assert [bool(one.error) for one in results] == [True, False]
    assert empty_store.find(sources[1]) is not None


def test_kernels_that_fail_are_counted(empty_store, quick_specs, monkeypatch, caplog):
    """The report of `store_kernels` has the kernels that are ready, and the number of those that are not."""

    def changed(_, sources):
        return [replace(one, parts=one.parts | {"source": "another"}) for one in sources.values()]

    monkeypatch.setattr(prepare, "_missing", changed)
    found = prepare.store_kernels(quick_specs)
    assert (found.kernels, found.compiled, found.failed) == (0, 0, 2)
    assert caplog.text.count("was not compiled ahead of time: RuntimeError: the starting process has") == 2


@pytest.mark.long
def test_process_that_ends_early_is_an_error_of_its_kernel(empty_store, quick_specs, monkeypatch, tmp_path):
    """A compiler that crashes costs its kernel, and the next kernel gets a new process."""
    (tmp_path / "crashing_module.py").write_text("import os; os._exit(7)")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = [source_of(spec) for spec in quick_specs]
    crash = replace(sources[0], module="crashing_module")
    results = pool.compile_all([crash, sources[1]], empty_store, lambda *_: None, processes=1)
    assert "ended with exit code 7" in results[0].error and results[1].error == ""


@pytest.mark.long
def test_warm_needs_no_gpu_and_reports_sizes(empty_store, quick_specs, monkeypatch):
    """The plugin's `warm` stores every listed kernel for an architecture that this machine lacks."""
    monkeypatch.setattr(kernel_list, "kernels_of", lambda geometry: quick_specs)
    found = load("cuda_triton").warm([SMALL])
    assert found is not None and (found.kernels, found.compiled) == (2, 2) and found.num_bytes > 0
    metadata = json.loads(next(empty_store.root.rglob("write_kv_rows.json")).read_text())
    assert metadata["target"]["arch"] == 90
