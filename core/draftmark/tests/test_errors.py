"""Tests of the properties that every error class of draftmark has."""

from __future__ import annotations

import pickle

import pytest

from draftmark import errors
from draftmark.errors import DraftmarkError, LoadFailure

ARGUMENTS = {
    "GeometryError": ("attention.page_size", 0, "it must be >= 1", "use 16"),
    "BackendLoadError": ("mine", LoadFailure.IMPORT_ERROR, "no module named vendor", "install it"),
    "BackendHookError": ("mine", "buffers", LoadFailure.HOOK_RAISED, "raised KeyError", "tell its author"),
    "BackendRefusal": ("mine", ["topk 9 is not served", "windows are not served"]),
    "GuardError": (["slots"],),
}
KINDS = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, DraftmarkError)),
    key=lambda one: one.__name__,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[DraftmarkError]) -> None:
    """An unpickled error has the class, message and attributes of the original."""
    error = kind(*ARGUMENTS.get(kind.__name__, ("pages is 3, but 2 are free; wait",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
