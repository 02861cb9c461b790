"""Hooks as text, and the form of a load error, for tests of plugins that fail."""

from __future__ import annotations

import draftmark


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
