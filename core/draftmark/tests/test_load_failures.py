"""Faults of a plugin raise BackendLoadError while it loads, and BackendHookError afterwards."""

from __future__ import annotations

import pytest
import torch

import draftmark
from draftmark.errors import BackendError, BackendHookError, BackendLoadError, BackendRefusal, LoadFailure


def hook(name, body, arguments="geometry"):
    """Return Python source that defines the hook `name` with this body."""
    return f"@hookimpl\ndef draftmark_{name}({arguments}):\n    {body}\n"


def assert_load_error(error, failure, *words):
    """Assert the error's failure kind, and that its message is one line with name, cause, remedy and `words`."""
    text = str(error)
    assert error.failure is failure, text
    assert text == f"backend {error.name!r} cannot be loaded ({failure.value}): {error.cause}; {error.remedy}"
    assert error.cause and len(error.remedy) > 8, text
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert draftmark.load("reference").supports is not None, "a broken plugin must not keep the reference from loading"


def assert_hook_error(error, hook, failure, *words):
    """Assert that the error names the hook of a loaded backend, and is not a load error."""
    text = str(error)
    assert (error.hook, error.failure) == (hook, failure), text
    assert text == f"backend {error.name!r} failed: its hook {hook}() {error.cause}; {error.remedy}"
    assert len(error.remedy) > 8 and "\n" not in text and "cannot be loaded" not in text
    assert all(word in text for word in words), text
    assert isinstance(error, BackendError)


def load_error(name):
    """Return the error that `load(name)` raises."""
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load(name)
    return caught.value


def test_an_unknown_name_lists_the_installed_backends():
    """An unknown name raises an error with the installed backends and a pip command."""
    error = load_error("no_such_backend")
    assert_load_error(error, LoadFailure.ENTRY_POINT_MISSING, "reference", "install the package that provides this one")


@pytest.mark.parametrize("name", ["refrence", "Reference", "references"])
def test_a_misspelt_name_suggests_the_installed_backend(name):
    """A name close to an installed backend gets that name as the remedy, and no pip command."""
    error = load_error(name)
    assert_load_error(error, LoadFailure.ENTRY_POINT_MISSING, "did you mean reference?")
    assert "pip" not in error.remedy


@pytest.mark.parametrize("name", [3, ["reference"], b"reference", object])
def test_a_name_must_be_a_string(name):
    """A name of another type raises an error with the command that lists names."""
    assert_load_error(load_error(name), LoadFailure.ENTRY_POINT_MISSING, "is a string", "`draftmark list`")


def test_two_distributions_with_one_name_are_refused(distribution):
    """Neither distribution loads; the error names both, and the remedy is to uninstall one."""
    distribution("shared", project="vendor-one")
    distribution("shared", project="vendor-two")
    error = load_error("shared")
    assert_load_error(error, LoadFailure.DUPLICATE_NAME, "vendor-one 1.0", "vendor-two 1.0", "uninstall")


def test_a_second_reference_is_a_duplicate_too(distribution):
    """A plugin cannot replace the core's reference backend by its name."""
    distribution("reference", project="impostor")
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load("reference")
    assert caught.value.failure is LoadFailure.DUPLICATE_NAME
    assert "impostor" in str(caught.value)


@pytest.mark.parametrize("major", [0, 2, 11])
def test_another_contract_major_is_refused(distribution, major):
    """The error for another contract major contains both majors and the distribution to replace."""
    distribution("foreign", group=f"draftmark.backends.v{major}")
    error = load_error("foreign")
    assert_load_error(error, LoadFailure.WRONG_CONTRACT_MAJOR, f"contract v{major}", "v1", "draftmark-foreign")


def test_the_release_for_our_contract_major_is_loaded(distribution):
    """If two distributions register one backend name, for contract v1 and v2, the v1 backend loads."""
    distribution("both", project="both-old")
    distribution("both", project="both-new", group="draftmark.backends.v2", source="raise RuntimeError('v2')")
    assert draftmark.load("both").name == "both"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import vendor_that_is_not_here", ("ModuleNotFoundError", "vendor_that_is_not_here")),
        ("raise OSError('libcudart.so.99: cannot open')", ("OSError", "libcudart.so.99")),
        ("def broken(:\n", ("SyntaxError",)),
        ("raise ValueError('two\\nlines')", ("ValueError", "two")),
        ("import sys; sys.exit('no driver')", ("SystemExit", "no driver")),
    ],
    ids=["missing module", "OSError", "SyntaxError", "many lines", "SystemExit"],
)
def test_any_exception_during_import_is_an_import_error(distribution, source, words):
    """Any exception during import, SystemExit included, becomes an import error with its text."""
    distribution("sunken", source=source)
    assert_load_error(load_error("sunken"), LoadFailure.IMPORT_ERROR, *words)


def test_a_keyboard_interrupt_during_import_passes_through(distribution):
    """Ctrl-C during import is not turned into a load error."""
    distribution("slow", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        draftmark.load("slow")


def test_an_entry_point_to_a_missing_name_is_an_import_error(distribution):
    """An entry point `module:NAME` raises an import error that contains NAME, if the module has no NAME."""
    distribution("pointless", entries="[draftmark.backends.v1]\npointless = throwaway_draftmark_pointless:NAME\n")
    assert_load_error(load_error("pointless"), LoadFailure.IMPORT_ERROR, "NAME")


def test_missing_hooks_are_all_named(distribution):
    """A module without two of the required hooks raises an error that names both."""
    distribution("partial", extra="del draftmark_requirements, draftmark_buffers")
    error = load_error("partial")
    assert_load_error(error, LoadFailure.MISSING_HOOK, "draftmark_requirements", "draftmark_buffers", "hookimpl")


def test_a_hook_without_the_decorator_is_missing(distribution):
    """A function with the right name but without hookimpl does not count; the remedy names the decorator."""
    distribution("bare", extra="def draftmark_supports(geometry):\n    return []\n")
    assert_load_error(load_error("bare"), LoadFailure.MISSING_HOOK, "draftmark_supports", "decorate")


def test_an_empty_module_misses_all_six_hooks(distribution):
    """A module without any hook raises an error with all six."""
    distribution("empty", source="")
    error = load_error("empty")
    assert_load_error(error, LoadFailure.MISSING_HOOK)
    assert error.cause.count("draftmark_") == 6


def test_an_unknown_hook_lists_the_known_ones(distribution):
    """pluggy's own check finds a misspelt hook; the remedy lists the contract's hooks."""
    distribution("misspelt", extra=hook("typo", "return []"))
    error = load_error("misspelt")
    assert_load_error(
        error, LoadFailure.UNKNOWN_HOOK, "draftmark_typo", "draftmark_open_backend", f"v1.{draftmark.CONTRACT_MINOR}"
    )


@pytest.mark.parametrize("arguments", ["geometry, device", "geom"])
def test_a_wrong_signature_lists_the_right_ones(distribution, arguments):
    """The error names the wrong argument; the remedy lists the signatures."""
    distribution("crooked", extra=hook("supports", "return []", arguments))
    error = load_error("crooked")
    assert_load_error(error, LoadFailure.WRONG_SIGNATURE, "draftmark_supports", "draftmark_supports(geometry)")


def test_a_hook_may_take_fewer_arguments(distribution, make_geometry):
    """pluggy passes only the arguments that a hook has, so hooks can get more arguments later."""
    distribution("modest", extra=hook("supports", "return []", ""))
    assert draftmark.load("modest").supports(make_geometry()) == []


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('aground')", "import sys; sys.exit('aground')"], ids=["RuntimeError", "SystemExit"]
)
def test_describe_that_raises_is_a_load_error(distribution, body):
    """An exception of describe() raises a load error with the hook and the exception."""
    distribution("angry", extra=hook("describe", body, ""))
    assert_load_error(load_error("angry"), LoadFailure.HOOK_RAISED, "describe()", "aground")


@pytest.mark.parametrize("body", ["return None", "return 'angry'", "pass"])
def test_describe_must_return_backend_info(distribution, body):
    """A return value of describe() that is no BackendInfo is refused."""
    distribution("angry", extra=hook("describe", body, ""))
    assert_load_error(load_error("angry"), LoadFailure.WRONG_RETURN, "describe()", "BackendInfo")


def test_the_described_name_must_equal_the_entry_point(distribution):
    """A BackendInfo with another name than the entry point is refused; the error contains both names."""
    distribution("alias", extra=hook("describe", "return BackendInfo('other', 'any', 0, True)", ""))
    assert_load_error(load_error("alias"), LoadFailure.WRONG_RETURN, "'alias'", "'other'")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", None),
        ("device", 3),
        ("contract_minor", "0"),
        ("contract_minor", True),
        ("host_kernels", "yes"),
        ("runtime", "torch"),
        ("runtime", ["torch"]),
        ("runtime", (torch,)),
        ("install", None),
        ("summary", ("a", "b")),
        ("runs_code_of", "cuda_triton"),
        ("modes", "decode"),
        ("modes", ("decode",)),
        ("forms", None),
    ],
)
def test_a_field_of_a_wrong_type_is_named(distribution, field, value):
    """A wrong type is refused at load; a string in place of a tuple would otherwise be read letter by letter."""
    usual = {"name": "odd", "device": "any", "contract_minor": 0, "host_kernels": True}
    source = "(__import__('torch'),)" if value == (torch,) else repr(value)
    distribution("odd", extra=hook("describe", f"return BackendInfo(**{usual} | {{{field!r}: {source}}})", ""))
    assert_load_error(
        load_error("odd"), LoadFailure.WRONG_RETURN, "describe()", f"in which {field} is ", "fix the plugin"
    )


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
