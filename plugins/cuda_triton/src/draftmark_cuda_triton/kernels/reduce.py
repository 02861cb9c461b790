"""Sums, minima, maxima and prefix sums along an axis, for Triton's compiler and its interpreter in one process.

When Triton is imported, `tl.sum` and similar functions become either compiled or interpreted. A process that runs
kernels on a GPU and also interprets kernels on the CPU needs the primitives that these functions call.
"""

import triton.language as tl

from .inline import inline


@inline
def total(x, axis: tl.constexpr):
    """Return the sum along `axis`."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@inline
def largest(x, axis: tl.constexpr):
    """Return the maximum along `axis`."""
    return tl.reduce(x, axis, tl.standard._elementwise_max)


@inline
def smallest(x, axis: tl.constexpr):
    """Return the minimum along `axis`."""
    return tl.reduce(x, axis, tl.standard._elementwise_min)


@inline
def running_total(x, axis: tl.constexpr = 0):
    """Return the inclusive prefix sums along `axis`."""
    return tl.associative_scan(x, axis, tl.standard._sum_combine)
