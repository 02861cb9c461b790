"""What is wrong with a plugin is one error: BackendLoadError before it is loaded, BackendHookError in service."""

from __future__ import annotations

import pytest
import torch

import draftmark
from draftmark.errors import BackendError, BackendHookError, BackendLoadError, BackendRefusal, LoadFailure


def hook(name, body, arguments="geometry"):
    """Source of one replaced hook."""
    return f"@hookimpl\ndef draftmark_{name}({arguments}):\n    {body}\n"


def assert_load_error(error, failure, *words):
    """The right class of failure, on one line that holds name, cause and remedy."""
    text = str(error)
    assert error.failure is failure, text
    assert text == f"backend {error.name!r} cannot be loaded ({failure.value}): {error.cause}; {error.remedy}"
    assert error.cause and len(error.remedy) > 8, text
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert draftmark.load("reference").supports is not None, "a broken plugin must not keep the reference from loading"


def assert_hook_error(error, hook, failure, *words):
    """A hook of a loaded backend: the error names it, and does not say that the backend cannot be loaded."""
    text = str(error)
    assert (error.hook, error.failure) == (hook, failure), text
    assert text == f"backend {error.name!r} failed in service: its hook {hook}() {error.cause}; {error.remedy}"
    assert len(error.remedy) > 8 and "\n" not in text and "cannot be loaded" not in text
    assert all(word in text for word in words), text
    assert isinstance(error, BackendError)


def load_error(name):
    """The error that load raises."""
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load(name)
    return caught.value


def test_entry_point_missing_names_what_is_installed():
    """An unknown name lists the installed backends and the pip command to try."""
    error = load_error("no_such_backend")
    assert_load_error(error, LoadFailure.ENTRY_POINT_MISSING, "reference", "pip install", "draftmark-no-such-backend")


@pytest.mark.parametrize("name", [3, ["reference"], b"reference", object])
def test_a_name_is_a_text(name):
    """Anything else is told how a backend is named."""
    assert_load_error(load_error(name), LoadFailure.ENTRY_POINT_MISSING, "named by a text", "`draftmark list`")


def test_two_distributions_with_one_name_are_refused(distribution):
    """Neither wins; both owners are named, and the remedy is to remove one."""
    distribution("shared", project="vendor-one")
    distribution("shared", project="vendor-two")
    error = load_error("shared")
    assert_load_error(error, LoadFailure.DUPLICATE_NAME, "vendor-one 1.0", "vendor-two 1.0", "uninstall")


def test_a_second_reference_is_a_duplicate_too(distribution):
    """A plugin cannot take the core's name silently."""
    distribution("reference", project="impostor")
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load("reference")
    assert caught.value.failure is LoadFailure.DUPLICATE_NAME
    assert "impostor" in str(caught.value)


@pytest.mark.parametrize("major", [0, 2, 11])
def test_wrong_contract_major(distribution, major):
    """A plugin for another major says both majors, and asks for another release."""
    distribution("foreign", group=f"draftmark.backends.v{major}")
    error = load_error("foreign")
    assert_load_error(error, LoadFailure.WRONG_CONTRACT_MAJOR, f"contract v{major}", "v1", "draftmark-foreign")


def test_the_release_for_our_major_wins_over_foreign_ones(distribution):
    """One name under v1 and v2 in two distributions loads the v1 one."""
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
def test_import_error(distribution, source, words):
    """Whatever a plugin raises while it is imported, sys.exit included, becomes an import error with its text."""
    distribution("sunken", source=source)
    assert_load_error(load_error("sunken"), LoadFailure.IMPORT_ERROR, *words)


def test_a_keyboard_interrupt_during_import_is_the_users(distribution):
    """Ctrl-C is not a property of the plugin and passes through."""
    distribution("slow", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        draftmark.load("slow")


def test_an_entry_point_to_a_missing_attribute_is_an_import_error(distribution):
    """`module:NAME` without NAME is the plugin's packaging fault, named as such."""
    distribution("pointless", entries="[draftmark.backends.v1]\npointless = throwaway_draftmark_pointless:NAME\n")
    assert_load_error(load_error("pointless"), LoadFailure.IMPORT_ERROR, "NAME")


def test_missing_hooks_are_all_named(distribution):
    """Two hooks absent are two names in the cause."""
    distribution("partial", extra="del draftmark_requirements, draftmark_buffers")
    error = load_error("partial")
    assert_load_error(error, LoadFailure.MISSING_HOOK, "draftmark_requirements", "draftmark_buffers", "hookimpl")


def test_a_hook_without_the_decorator_is_missing(distribution):
    """A function of the right name that lacks hookimpl does not count, and the remedy says what to do."""
    distribution("bare", extra="def draftmark_supports(geometry):\n    return []\n")
    assert_load_error(load_error("bare"), LoadFailure.MISSING_HOOK, "draftmark_supports", "decorate")


def test_an_empty_module_misses_all_six_hooks(distribution):
    """A module with nothing in it is no backend."""
    distribution("empty", source="")
    error = load_error("empty")
    assert_load_error(error, LoadFailure.MISSING_HOOK)
    assert error.cause.count("draftmark_") == 6


def test_an_unknown_hook_is_named_with_the_known_ones(distribution):
    """A misspelt hook is found by pluggy's own check; the remedy lists the contract's hooks."""
    distribution("misspelt", extra=hook("typo", "return []"))
    error = load_error("misspelt")
    assert_load_error(
        error, LoadFailure.UNKNOWN_HOOK, "draftmark_typo", "draftmark_open_backend", f"v1.{draftmark.CONTRACT_MINOR}"
    )


@pytest.mark.parametrize("arguments", ["geometry, device", "geom"])
def test_a_wrong_signature_shows_the_right_ones(distribution, arguments):
    """An argument the contract does not have is named; the remedy shows the signatures."""
    distribution("crooked", extra=hook("supports", "return []", arguments))
    error = load_error("crooked")
    assert_load_error(error, LoadFailure.WRONG_SIGNATURE, "draftmark_supports", "draftmark_supports(geometry)")


def test_a_hook_may_take_fewer_arguments(distribution, make_geometry):
    """pluggy passes what is asked for, so dataclasses and hooks can grow."""
    distribution("modest", extra=hook("supports", "return []", ""))
    assert draftmark.load("modest").supports(make_geometry()) == []


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('aground')", "import sys; sys.exit('aground')"], ids=["RuntimeError", "SystemExit"]
)
def test_describe_that_raises_is_a_load_error(distribution, body):
    """A hook that fails at start-up is named with its error."""
    distribution("angry", extra=hook("describe", body, ""))
    assert_load_error(load_error("angry"), LoadFailure.HOOK_RAISED, "describe()", "aground")


@pytest.mark.parametrize("body", ["return None", "return 'angry'", "pass"])
def test_describe_must_return_backend_info(distribution, body):
    """Anything but a BackendInfo is refused."""
    distribution("angry", extra=hook("describe", body, ""))
    assert_load_error(load_error("angry"), LoadFailure.WRONG_RETURN, "describe()", "BackendInfo")


def test_describe_must_agree_with_the_entry_point(distribution):
    """A backend that calls itself by another name is refused, with both names."""
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
def test_a_field_of_another_type_is_named(distribution, field, value):
    """A text where a tuple is meant would be read letter by letter."""
    usual = {"name": "odd", "device": "any", "contract_minor": 0, "host_kernels": True}
    said = "(__import__('torch'),)" if value == (torch,) else repr(value)
    distribution("odd", extra=hook("describe", f"return BackendInfo(**{usual} | {{{field!r}: {said}}})", ""))
    assert_load_error(load_error("odd"), LoadFailure.WRONG_RETURN, "describe()", f"whose {field} is ", "fix the plugin")


CALLS = {
    "supports": lambda b, g: b.supports(g),
    "buffers": lambda b, g: b.buffers(g),
    "requirements": lambda b, g: b.requirements(g),
    "open_backend": lambda b, g: b.open(g, "cpu"),
    "graph_state": lambda b, g: b.graph_state(g, torch.device("cpu")),
}
ARGUMENTS = {"open_backend": "geometry, arena", "graph_state": "geometry, device"}


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_that_raises_is_named_with_its_error(distribution, make_geometry, name):
    """Each of the five later hooks turns its exception into `hook raised`, and load itself still works."""
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
        ("buffers", "from draftmark.reference import sizing; return sizing.buffers(geometry) * 2"),
        ("buffers", "from dataclasses import replace; from draftmark.reference import sizing; "
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
def test_a_wrong_return_type_is_named_with_what_was_expected(distribution, make_geometry, name, body):
    """Each hook's result is checked, so that a wrong one fails at start-up by name and not later by accident."""
    distribution("vague", extra=hook(name, body, ARGUMENTS.get(name, "geometry")))
    backend = draftmark.load("vague")
    with pytest.raises(BackendHookError) as caught:
        CALLS[name](backend, make_geometry())
    assert_hook_error(caught.value, name, LoadFailure.WRONG_RETURN)


def info(**fields):
    """A describe hook with other fields."""
    given = {"name": "vendor", "device": "any", "contract_minor": 0, "host_kernels": True} | fields
    return hook("describe", f"return BackendInfo(**{given!r})", "")


def test_a_plugin_that_claims_no_sinks_never_meets_one(distribution, make_geometry):
    """A plugin of an older contract knows nothing of sinks; the core refuses such layers for it, and no others."""
    distribution("vendor", extra=info())
    backend = draftmark.load("vendor")
    assert backend.supports(make_geometry()) == []
    (reason,) = backend.supports(make_geometry(sinks=True))
    assert reason == "attention sinks are not served: BackendInfo.sinks is not set"
    with pytest.raises(BackendRefusal, match="attention sinks are not served"):
        backend.allocate(make_geometry(sinks=True), "cpu")


@pytest.mark.parametrize("runtime", ["vendor_runtime_not_here", "vendor_runtime_not_here.kernels"])
def test_an_absent_vendor_runtime_gives_the_pip_command(distribution, make_geometry, runtime):
    """The backend loads, sizes and lists without its runtime; open() names what is missing and how to get it."""
    distribution("vendor", extra=info(runtime=(runtime,), install="pip install 'draftmark-vendor[runtime]'"))
    backend = draftmark.load("vendor")
    assert backend.buffers(make_geometry())
    with pytest.raises(BackendLoadError) as caught:
        backend.open(make_geometry(), "cpu")
    assert_load_error(caught.value, LoadFailure.RUNTIME_ABSENT, runtime, "pip install 'draftmark-vendor[runtime]'")


def test_a_present_runtime_is_found_without_importing_it(distribution, make_geometry):
    """Looking for the runtime does not run it."""
    site = distribution("vendor", extra=info(runtime=("throwaway_runtime",)))
    (site / "throwaway_runtime.py").write_text("raise RuntimeError('must not be imported')")
    draftmark.load("vendor").open(make_geometry(), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_said_before_anything_is_allocated(make_geometry, reference):
    """The reference on cuda, on a machine without one."""
    with pytest.raises(BackendLoadError) as caught:
        reference.open(make_geometry(), "cuda")
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, "no cuda device")


def test_a_device_of_the_wrong_kind_names_the_right_one(distribution, make_geometry):
    """A CUDA backend without host kernels refuses the CPU."""
    distribution("vendor", extra=info(device="cuda", host_kernels=False))
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load("vendor").open(make_geometry(), "cpu")
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, "runs on cuda, not on cpu")


def test_host_kernels_open_on_the_cpu(distribution, make_geometry):
    """A CUDA backend whose kernels also run on CPU tensors may be opened there."""
    distribution("vendor", extra=info(device="cuda", host_kernels=True))
    draftmark.load("vendor").open(make_geometry(), "cpu")


@pytest.mark.parametrize("device", ["meta", "warp_drive"])
def test_a_device_that_torch_cannot_run_on_is_absent(make_geometry, reference, device):
    """A device name that means no hardware, or nothing at all, is the same one kind of error."""
    with pytest.raises(BackendLoadError) as caught:
        reference.open(make_geometry(), device)
    assert_load_error(caught.value, LoadFailure.DEVICE_ABSENT, device)


def test_a_refusal_carries_the_backends_own_reasons(make_geometry, reference):
    """open() on an unsupported geometry is a BackendRefusal with every reason, not a load error."""
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


def test_exact_host_lengths_under_overlap_are_refused_with_the_remedy(distribution, make_geometry):
    """A backend that needs exact lengths cannot be opened where the device may be ahead of the host."""
    distribution("exacting", extra=EXACT)
    backend = draftmark.load("exacting")
    backend.open(make_geometry(), "cpu")
    with pytest.raises(BackendRefusal, match="overlap=False"):
        backend.open(make_geometry(overlap=True), "cpu")


def test_a_hooks_own_draftmark_error_is_not_disguised(distribution, make_geometry):
    """A BackendRefusal that a plugin raises itself arrives as it is."""
    body = "from draftmark.errors import BackendRefusal; raise BackendRefusal('frank', ['too deep'])"
    distribution("frank", extra=hook("open_backend", body, "geometry, arena"))
    with pytest.raises(BackendRefusal, match="too deep"):
        draftmark.load("frank").open(make_geometry(), "cpu")
