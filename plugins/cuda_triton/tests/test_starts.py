"""A start finds stored kernels and compiles no other, and its launches use them."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.cache import get_cache_manager

from draftmark_cuda_triton import kernel_variants
from draftmark_cuda_triton.compiled import host_code, loading, prepare
from draftmark_cuda_triton.kv_write import launch_write_kv
from draftmark_cuda_triton.launch import launcher
from plugins.cuda_triton.tests.stores import QUICK, SMALL, quick_calls


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
