"""Compiled kernels are stored once, found by every later start, and compiled again only when they must be."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from draftmark import AttentionShape, DeviceProfile, Geometry, Limits, Mode, load
from draftmark_cuda_triton import kernel_list, kernel_variants
from draftmark_cuda_triton.compiled import assembler, folder, host_code, loading, pool, prepare
from draftmark_cuda_triton.compiled.source import KernelSource
from draftmark_cuda_triton.compiled.store import Store
from draftmark_cuda_triton.kv_write import launch_write_kv
from draftmark_cuda_triton.launch import launcher

QUICK = ("write_kv_rows", "write_metadata_decode_verify")
"""Kernels that compile in less than a second."""
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


SMALL = Geometry.create(
    AttentionShape(8, 2, 64, 16), Limits(4, 512), device=DeviceProfile("cuda", 90, 132), modes=(Mode.DECODE,)
)
"""Decode geometry of few kernels."""


def quick_calls():
    """Return calls of two kernels of a decode geometry that compile quickly, by kernel."""
    calls = kernel_list.calls_of(SMALL, trees=False).items()
    found = {spec.kernel.__name__: (spec, call) for spec, call in calls}
    return dict(found[name] for name in QUICK)


@pytest.fixture
def quick_specs():
    """The kernels of `quick_calls`."""
    return list(quick_calls())


@pytest.fixture
def empty_store(tmp_path, monkeypatch):
    """Empty store of this process, without shipped kernels, and counts that start at zero."""
    monkeypatch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "SHIPPED", "no_such_package")
    for name, value in vars(loading.Counts()).items():
        monkeypatch.setattr(loading.COUNTS, name, value)
    return folder.kernel_store()


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that this process compiled, in order; a hit of Triton's own cache does not count."""
    found = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda src, cache_hit, **_: cache_hit or found.append(src.fn.__name__)
    )
    return found


def source_of(spec) -> KernelSource:
    return KernelSource.of(spec.source(), spec.target, dict(spec.options))


def entries_of(store: Store) -> list[Path]:
    return sorted(path.parent for path in store.root.rglob("sums.json"))


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """A store in which `store_kernels` compiled both quick kernels, its report, and the progress that it showed."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        report = prepare.store_kernels(list(quick_calls()), lambda *step: steps.append(step))
        return folder.kernel_store(), report, steps


@pytest.fixture
def stored(empty_store, compiled_once):
    """The store of this process, with a copy of the compiled kernels."""
    shutil.copytree(compiled_once[0].root, empty_store.root, dirs_exist_ok=True)
    return empty_store


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
    assert kernel.asm["cubin"] == compiled.asm["cubin"] and kernel.metadata == compiled.metadata


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
        inside.setattr(triton, "__version__", "3.6.0")
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


def launch_quick(new_tensor) -> None:
    """Launch `write_kv_rows` on fake GPU tensors."""
    rows = new_tensor(3, 2, 64)
    k, v = (new_tensor(5, 16, 2, 64) for _ in "kv")
    launch_write_kv(rows, rows, k, v, None, None, new_tensor(3, dtype=torch.int64), pdl=True)


def restart() -> None:
    """Forget every compiled kernel of this process, as a new process has none."""
    launcher.LAUNCHER.compiled.clear()
    kernel_variants.kernels.kv_write.write_kv_rows.device_caches.clear()


@pytest.fixture
def started(fake_gpu, empty_store, monkeypatch):
    """Fake GPU on which launches use the store."""
    monkeypatch.setattr(launcher, "use_store", loading.use_store)
    return fake_gpu


def test_second_start_compiles_nothing(started, make_layers, compilations, tmp_path, monkeypatch):
    """A second start finds the first one's kernels, although Triton's own cache folder has changed meanwhile."""
    for name in ("first", "second"):
        # torch Inductor sets this variable while a process runs.
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        restart()
        launch_quick(make_layers.new_tensor)
    assert compilations == ["write_kv_rows"] and len(started.launched) == 2
    assert (loading.COUNTS.compiled, loading.COUNTS.loaded, loading.COUNTS.after_start) == (1, 1, 0)


def test_compilation_after_start_is_a_warning(started, make_layers, caplog, monkeypatch, tmp_path):
    """A kernel that compiles after `prepare` is counted and logged as a warning that names it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loading.COUNTS, "prepared", True)
    with caplog.at_level(logging.INFO):
        launch_quick(make_layers.new_tensor)
    (record,) = [one for one in caplog.records if "compiles" in one.message]
    assert record.levelno == logging.WARNING and record.name == "draftmark_cuda_triton"
    assert "write_kv_rows compiles while a request waits for sm_90" in record.message
    assert loading.COUNTS.after_start == 1


def test_prepared_kernel_is_launched_at_once(started, stored, make_layers, compilations, monkeypatch, caplog):
    """After `prepare` a launch with other sizes finds the loaded kernel: Triton neither compiles nor specializes."""
    monkeypatch.setattr(prepare, "calls_of", lambda geometry, trees: quick_calls())
    with caplog.at_level(logging.INFO):
        prepare._prepare(SMALL, trees=False)
    assert "MiB) for sm_90: 0 compiled now, 0 from an installed wheel, others from" in caplog.text
    compiled = launcher.LAUNCHER.compiled
    keys = set(compiled)
    launch_quick(make_layers.new_tensor)
    assert set(compiled) == keys and loading.Counts(loaded=len(QUICK), prepared=True) == loading.COUNTS
    assert compilations == [] and started.launched[-1][0].fn.__name__ == "write_kv_rows"


def test_kernel_that_cannot_be_loaded_does_not_end_a_start(started, stored, monkeypatch, caplog):
    """A kernel that the device rejects is a warning at start, and the other kernels are loaded."""
    load_binary = started.utils.load_binary

    def reject(name, *rest):
        if name == QUICK[0]:
            raise RuntimeError("too much shared memory")
        return load_binary(name, *rest)

    monkeypatch.setattr(prepare, "calls_of", lambda geometry, trees: quick_calls())
    monkeypatch.setattr(started.utils, "load_binary", reject, raising=False)
    prepare._prepare(SMALL, trees=False)
    assert "was not loaded: RuntimeError: too much shared memory" in caplog.text
    assert [one[1].module for one in launcher.LAUNCHER.compiled.values()] == [None, 1]


def test_newer_triton_keeps_its_own_cache(started, monkeypatch, caplog):
    """Above the newest tested Triton the kernels keep Triton's compile function, and one warning names the versions."""
    kernel = kernel_variants.kernels.kv_write.write_kv_rows
    monkeypatch.setattr(kernel, "compile", "Triton's own", raising=False)
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    loading.is_tested_triton.cache_clear()
    for _ in range(2):
        loading.use_store(kernel, 0)
    loading.is_tested_triton.cache_clear()
    assert kernel.compile == "Triton's own"
    assert len(caplog.records) == 1 and "3.99.0 is newer than 3.9" in caplog.text and "triton<=3.9" in caplog.text


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


def test_host_code_is_stored_below_the_given_folder(tmp_path, monkeypatch):
    """Triton's compiled launchers go to draftmark's folder inside the context, and to Triton's own folder outside."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    key, own = "ab" * 32, tmp_path / "own"
    with host_code.HOST_CODE.stored_in(own):
        path = Path(get_cache_manager(key).put(b"code", "launcher.so"))
        with ThreadPoolExecutor(1) as other:
            elsewhere = other.submit(lambda: get_cache_manager(key).put(b"x", "other.so")).result()
    assert path.is_relative_to(own) and path.read_bytes() == b"code"
    assert not Path(elsewhere).is_relative_to(own)
    assert get_cache_manager(key).get_file("launcher.so") is None
    with host_code.HOST_CODE.stored_in(own):
        assert get_cache_manager(key).get_file("launcher.so") == str(path)


@pytest.mark.long
def test_warm_needs_no_gpu_and_reports_sizes(empty_store, quick_specs, monkeypatch):
    """The plugin's `warm` stores every listed kernel for an architecture that this machine lacks."""
    monkeypatch.setattr(kernel_list, "kernels_of", lambda geometry: quick_specs)
    found = load("cuda_triton").warm([SMALL])
    assert found is not None and (found.kernels, found.compiled) == (2, 2) and found.num_bytes > 0
    metadata = json.loads(next(empty_store.root.rglob("write_kv_rows.json")).read_text())
    assert metadata["target"]["arch"] == 90
