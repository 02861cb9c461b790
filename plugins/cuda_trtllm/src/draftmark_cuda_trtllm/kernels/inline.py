"""`inline`: a function that kernels call.

For a GPU it is `triton.jit`. Triton's interpreter patches the whole language anew at each call of such a function,
which takes a millisecond; there a plain function does, for the kernel that calls it has patched the language already.
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
        """A loop bound. Triton 3.6 hands the interpreter a vector of one, which NumPy 2.4 makes no index of."""
        return int(x.handle.data.item()) if hasattr(x, "handle") else int(x)

else:

    @triton.jit
    def bound(x):
        """A loop bound."""
        return x
