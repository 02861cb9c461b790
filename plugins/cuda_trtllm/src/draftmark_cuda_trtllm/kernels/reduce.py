"""Sums and prefix sums, in a form that both Triton's compiler and its interpreter know.

`tl.sum` and its kin are themselves compiled or interpreted as the process was when Triton was imported; one process
that serves a GPU and interprets on the CPU (the contract's tiers) needs the primitives below them.
"""

import triton.language as tl

from .inline import inline


@inline
def total(x, axis: tl.constexpr):
    """Sum along `axis`."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@inline
def running_total(x):
    """Inclusive prefix sums of a vector."""
    return tl.associative_scan(x, 0, tl.standard._sum_combine)
