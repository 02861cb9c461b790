"""Faults of a plugin raise BackendLoadError while it loads, and BackendHookError afterwards."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.failing_hooks import assert_load_error, hook
from draftmark.errors import BackendLoadError, LoadFailure


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
