"""Patches of names that are private to Triton."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from draftmark_triton_interpreter.patches import _index_by_one_element


def test_scalar_in_a_vector_is_a_loop_bound() -> None:
    """A tensor with one element in a vector is an index; Triton 3.6 holds scalars so."""
    interpreter, scope = (
        SimpleNamespace(_patch_lang_tensor=lambda tensor, scope: None),
        SimpleNamespace(set_attr=setattr),
    )
    tensor = type("tensor", (), {"handle": SimpleNamespace(data=np.array([3]))})
    _index_by_one_element(interpreter)
    interpreter._patch_lang_tensor(tensor, scope)
    assert list(range(tensor())) == [0, 1, 2]
    nothing = SimpleNamespace()
    _index_by_one_element(nothing)
    assert not vars(nothing)
