"""Decorator for functions that kernels call.

For a GPU it is `triton.jit`. In Triton's interpreter each call of a jitted function patches the whole language again,
which takes a millisecond. There the decorator returns a plain function, because the calling kernel has done the patch.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def inline(function):
    """Decorate a function that only kernels call."""
    return function if INTERPRETED.value else triton.jit(function)


if INTERPRETED.value:

    def bound(x):
        """Return a loop bound as an int: Triton 3.6 interprets it as a one-element vector, which NumPy 2.4 rejects."""
        return int(x.handle.data.item()) if hasattr(x, "handle") else int(x)

else:

    @triton.jit
    def bound(x):
        """Return a loop bound unchanged."""
        return x
