"""Tests that a hook's error, wrong result or absent device is named."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.failing_hooks import assert_load_error, hook
from draftmark.errors import BackendError, BackendHookError, BackendLoadError, BackendRefusal, LoadFailure


def assert_hook_error(error, hook, failure, *words):
    """Assert that the error names the hook of a loaded backend, and is not a load error."""
    text = str(error)
    assert (error.hook, error.failure) == (hook, failure), text
    assert text == f"backend {error.name!r} failed: its hook {hook}() {error.cause}; {error.remedy}"
    assert len(error.remedy) > 8 and "\n" not in text and "cannot be loaded" not in text
    assert all(word in text for word in words), text
    assert isinstance(error, BackendError)


CALLS = {
    "supports": lambda b, g: b.supports(g),
    "buffers": lambda b, g: b.buffers(g),
    "requirements": lambda b, g: b.requirements(g),
    "open_backend": lambda b, g: b.open(g, "cpu"),
    "graph_state": lambda b, g: b.graph_state(g, torch.device("cpu")),
}
ARGUMENTS = {"open_backend": "geometry, arena", "graph_state": "geometry, device"}


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_that_raises_is_named_with_its_exception(distribution, make_geometry, name):
    """An exception of any hook after describe() raises BackendHookError; the backend itself loads."""
    distribution("angry", extra=hook(name, "raise KeyError('aground')", ARGUMENTS.get(name, "geometry")))
    backend = draftmark.load("angry")
    with pytest.raises(BackendHookError) as caught:
        CALLS[name](backend, make_geometry())
    assert_hook_error(caught.value, name, LoadFailure.HOOK_RAISED, "KeyError", "aground", "geometry")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("supports", "return None"),
        ("supports", "return 'too small'"),
        ("supports", "return ('page_size',)"),
        ("supports", "return ['']"),
        ("supports", "return [3]"),
        ("buffers", "return None"),
        ("buffers", "return {}"),
        ("buffers", "return ['kv_lens']"),
        ("buffers", "from draftmark_reference import sizing; return sizing.buffers(geometry) * 2"),
        ("buffers", "from dataclasses import replace; from draftmark_reference import sizing; "
                    "return [replace(s, shape=4) for s in sizing.buffers(geometry)]"),
        ("requirements", "return None"),
        ("requirements", "return {}"),
        ("requirements", "from draftmark import Requirements; return Requirements('exact')"),
        ("requirements", "from draftmark import Requirements; return Requirements(unique_slots=1)"),
        ("open_backend", "return None"),
        ("open_backend", "return object()"),
        ("graph_state", "return None"),
        ("graph_state", "return object()"),
    ],
)  # fmt: skip
def test_a_wrong_return_type_is_refused_by_the_hook_name(distribution, make_geometry, name, body):
    """Each hook's return value is checked, so that a wrong one fails at start-up with the hook's name."""
    distribution("vague", extra=hook(name, body, ARGUMENTS.get(name, "geometry")))
    backend = draftmark.load("vague")
    with pytest.raises(BackendHookError) as caught:
        CALLS[name](backend, make_geometry())
    assert_hook_error(caught.value, name, LoadFailure.WRONG_RETURN)


def info(**fields):
    """Return the source of a describe hook with some fields replaced."""
    fields = {"name": "vendor", "device": "any", "contract_minor": 0, "host_kernels": True} | fields
    return hook("describe", f"return BackendInfo(**{fields!r})", "")


def test_the_core_refuses_sinks_for_a_plugin_without_them(distribution, make_geometry):
    """The core refuses layers with sinks for a plugin that does not declare them, and accepts other layers."""
    distribution("vendor", extra=info())
    backend = draftmark.load("vendor")
    assert backend.supports(make_geometry()) == []
    (reason,) = backend.supports(make_geometry(sinks=True))
    assert reason == "attention sinks are not served: BackendInfo.sinks is False"
    with pytest.raises(BackendRefusal, match="attention sinks are not served"):
        backend.allocate(make_geometry(sinks=True), "cpu")


def test_the_core_refuses_batch_invariance_for_a_plugin_without_it(distribution, make_geometry):
    """The core refuses a request for batch invariance unless the plugin declares it."""
    asked = make_geometry(batch_invariant=True)
    distribution("vendor", extra=info())
    (reason,) = draftmark.load("vendor").supports(asked)
    assert reason == "batch invariance is not served: BackendInfo.batch_invariant is False"
    distribution("able", extra=info(name="able", batch_invariant=True))
    assert draftmark.load("able").supports(asked) == []


@pytest.mark.parametrize("runtime", ["vendor_runtime_not_here", "vendor_runtime_not_here.kernels"])
def test_an_absent_vendor_package_gives_the_pip_command(distribution, make_geometry, runtime):
    """The backend loads and sizes without its vendor package; open() names the package and the pip command."""
    distribution("vendor", extra=info(runtime=(runtime,), install="pip install 'draftmark-vendor[runtime]'"))
    backend = draftmark.load("vendor")
    assert backend.buffers(make_geometry())
    with pytest.raises(BackendLoadError) as caught:
        backend.open(make_geometry(), "cpu")
    assert_load_error(caught.value, LoadFailure.RUNTIME_ABSENT, runtime, "pip install 'draftmark-vendor[runtime]'")


def test_an_installed_vendor_package_is_not_imported(distribution, make_geometry):
    """The check for a vendor package does not import it."""
    site = distribution("vendor", extra=info(runtime=("throwaway_runtime",)))
    (site / "throwaway_runtime.py").write_text("raise RuntimeError('must not be imported')")
    draftmark.load("vendor").open(make_geometry(), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_reported_before_allocation(make_geometry, reference):
    """The reference backend on cuda, on a machine without CUDA, raises a load error."""
    with pytest.raises(BackendLoadError) as caught:
        reference.open(make_geometry(), "cuda")
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, "no cuda device")


def test_a_wrong_device_type_names_the_right_one(distribution, make_geometry):
    """A CUDA backend without host kernels refuses the CPU."""
    distribution("vendor", extra=info(device="cuda", host_kernels=False))
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load("vendor").open(make_geometry(), "cpu")
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, "runs on cuda, not on cpu")


def test_host_kernels_open_on_the_cpu(distribution, make_geometry):
    """A CUDA backend with kernels that also run on CPU tensors opens on the CPU."""
    distribution("vendor", extra=info(device="cuda", host_kernels=True))
    draftmark.load("vendor").open(make_geometry(), "cpu")


@pytest.mark.parametrize("device", ["meta", "warp_drive"])
def test_a_device_that_torch_cannot_run_on_is_absent(make_geometry, reference, device):
    """A device without hardware and a name unknown to torch raise errors with one failure kind."""
    with pytest.raises(BackendLoadError) as caught:
        reference.open(make_geometry(), device)
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, device)


def test_a_refusal_contains_the_backends_reasons(make_geometry, reference):
    """open() with an unsupported geometry raises BackendRefusal with every reason, not a load error."""
    geometry = make_geometry(kv_dtype="float8_e4m3fn")
    assert reference.supports(geometry)
    with pytest.raises(BackendRefusal, match="float8_e4m3fn is not served") as caught:
        reference.open(geometry, "cpu")
    assert caught.value.reasons == tuple(reference.supports(geometry))
    assert isinstance(caught.value, BackendError)


EXACT = hook(
    "requirements",
    "from draftmark import HostLengthsNeed, Requirements; return Requirements(HostLengthsNeed.EXACT)",
)


def test_exact_host_lengths_with_overlap_are_refused(distribution, make_geometry):
    """A backend that needs exact lengths cannot be opened if the device may be ahead of the host."""
    distribution("exacting", extra=EXACT)
    backend = draftmark.load("exacting")
    backend.open(make_geometry(), "cpu")
    with pytest.raises(BackendRefusal, match="overlap=False"):
        backend.open(make_geometry(overlap=True), "cpu")


def test_a_draftmark_error_of_a_hook_is_not_changed(distribution, make_geometry):
    """A BackendRefusal that a plugin raises itself reaches the caller unchanged."""
    body = "from draftmark.errors import BackendRefusal; raise BackendRefusal('frank', ['too deep'])"
    distribution("frank", extra=hook("open_backend", body, "geometry, arena"))
    with pytest.raises(BackendRefusal, match="too deep"):
        draftmark.load("frank").open(make_geometry(), "cpu")
