"""Fixtures: a fake GPU, the switches, and random layers; helpers, fake_gpu and layers have what they use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from draftmark import Mode
from draftmark_cuda_triton import kernel_variants, kv_write, prefill, prefill_fp8, switches
from draftmark_cuda_triton.compiled import folder, loading, prepare
from draftmark_cuda_triton.heuristics import upcast
from draftmark_cuda_triton.kernel_variants import kernels
from draftmark_cuda_triton.launch import launcher, prepared, relaunch, tma
from plugins.cuda_triton.tests.fake_gpu import FakeDriver, functions_of
from plugins.cuda_triton.tests.layers import Layers, make_calls
from plugins.cuda_triton.tests.stores import quick_calls


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory) -> Iterator[None]:
    """Keep kernels that tests compile out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def compiled_kernels() -> list[JITFunction]:
    """Every compiled kernel of `kernels`, and the functions that the kernels call."""
    return functions_of(kernels)


@pytest.fixture
def fake_driver(request, monkeypatch, compiled_kernels) -> Iterator[FakeDriver]:
    """Fake driver in place of Triton's, for sm_90 or the architecture in the test's indirect parameter."""
    found = FakeDriver(getattr(request, "param", 90))
    monkeypatch.setattr(driver, "_active", found)
    # Kernels that another driver compiled must not be launched here, and kernels of this fake must not leak into later
    # tests.
    monkeypatch.setattr(launcher.LAUNCHER, "compiled", {})
    # Stored kernels have no PTX, which tests read.
    monkeypatch.setattr(launcher, "use_store", lambda *_: None)
    monkeypatch.setattr(kv_write, "WRITER", kv_write.KvWriter())
    functions = list(compiled_kernels)
    if tma.has_gluon():
        from draftmark_cuda_triton import kernels_sm90

        functions += functions_of(kernels_sm90)
    for one in functions:
        one.device_caches.clear()
    yield found
    launcher.LAUNCHER.compiled.clear()
    for one in functions:
        for cache, *_ in one.device_caches.values():
            for kernel in cache.values():
                kernel.module = None  # When the kernel is deleted, it would unload this module from the real driver.
        one.device_caches.clear()


@pytest.fixture
def fake_gpu(fake_driver, monkeypatch) -> FakeDriver:
    """Fake driver; in addition the compiled kernels are selected, although the tensors are on the CPU."""
    monkeypatch.setattr(kernel_variants, "runs_compiled", lambda _: True)
    monkeypatch.setattr(tma, "_num_sms", lambda _: 132)
    monkeypatch.setattr(tma, "has_fast_memory", lambda _: True)
    # If another test left TRITON_INTERPRET set, Triton's constexpr functions would not return constants.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return fake_driver


@pytest.fixture
def without_machine_code(monkeypatch, tmp_path_factory) -> None:
    """Compile kernels as far as Triton's IR only, which takes a tenth of the time. A fake driver loads no machine code.

    Such kernels lie in a cache folder of their own, because Triton would find them under the keys of the real ones.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "without-machine-code"))
    real = CUDABackend.add_stages

    def add_stages(self: CUDABackend, stages: dict[str, Any], options: Any, language: Any) -> None:
        real(self, stages, options, language)
        first, last = next(iter(stages)), self.binary_ext
        stages.clear()
        stages[first] = lambda ir, metadata: ir

        def assemble(ir: Any, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=1000, tmem_size=0, tensordesc_meta=[])
            metadata.update(global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0)
            return b"no machine code"

        stages[last] = assemble

    monkeypatch.setattr(CUDABackend, "add_stages", add_stages)


@pytest.fixture
def read_switches() -> Iterator[Callable[[], None]]:
    """Function that reads the environment variables of `switches` again; they are read once more after the test."""

    def forget() -> None:
        for one in (switches.launch_mode, switches.uses_own_launch, switches.is_tested_triton):
            one.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def make_layers() -> type[Layers]:
    """`Layers` class: backends on fake GPU tensors, for tests that also use `fake_gpu`."""
    return Layers


@pytest.fixture(
    params=[
        (Mode.DECODE, 16, False, False),
        (Mode.VERIFY, 16, False, True),
        (Mode.VERIFY, 16, True, False),
        (Mode.RAGGED_VERIFY, 1, False, False),
        (Mode.RAGGED_VERIFY, 64, False, False),
        (Mode.EXTEND, 16, False, True),
        (Mode.EXTEND, 1, False, False),
        pytest.param((Mode.EXTEND, 16, True, True), marks=pytest.mark.slow),
        (Mode.EXTEND, 64, True, False),
    ],
    ids=lambda c: f"{c[0].name}-p{c[1]}{'-fp8' * c[2]}{'-sinks' * c[3]}",
)
def layer_calls(request, make_layers, monkeypatch):
    """Layers of one backend and 40 attention calls with random batches and layers in random order.

    The calls differ in addresses, strides, alignment, sizes and missing tensors. The limit for short prompts is
    removed, so e4m3 prompts of any length can be upcast.
    """
    monkeypatch.setattr(upcast, "UPCAST_MIN_ROWS", 0)
    monkeypatch.setattr(upcast, "UPCAST_LAUNCH_COST", 0)
    layers = make_layers(*request.param)
    monkeypatch.setattr(prefill.Prefill, "warm_up", lambda *_: None)
    monkeypatch.setattr(prefill_fp8.PrefillFp8, "_warm_up", lambda *_: None)
    return make_calls(layers)


@pytest.fixture
def decode_calls(make_layers):
    """Like `layer_calls`, for decode with pages of 16."""
    return make_calls(make_layers(Mode.DECODE, 16))


@pytest.fixture
def without_relaunch(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    """Context manager in which every launch is a new Triton launch: no relaunch cache, no prepared launches."""

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as inside:
            inside.setattr(
                relaunch.RelaunchCache, "__call__", lambda _, layout, tensors, launch, *args: launch(*args, *tensors)
            )
            for name in ("again", "_prepare"):
                inside.setattr(prepared.PreparedKernel, name, lambda *_: False)
            yield

    return block


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
