"""Online softmax of a row tile: soft cap, attention sinks, and the update by one key tile.

Running state of a row tile, in base-2 units: acc [M, D] fp32; row_max [M], the largest scaled logit; row_sum [M].
"""

import triton.language as tl

from .convert import convert
from .inline import inline
from .reduce import largest, total
from .tile import dot


@inline
def apply_soft_cap(s, scale, cap, EXACT: tl.constexpr):
    """Return ``cap · tanh(s · scale / cap)`` in natural units; `scale` is the softmax scale in base-2 units.

    EXACT: compute tanh by exp2, which is exact at both ends. Otherwise use tanh.approx, with a relative error of at
    most 2**-11, as large as the error of rounding a softmax probability to 16 bits.
    """
    if EXACT:
        # tanh(x) = 1 - 2 / (exp(2x) + 1). `scale` contains the factor log2(e), which turns exp into exp2.
        e = tl.exp2(s * (scale * 2.0 / cap))
        return cap * (1.0 - 2.0 / (e + 1.0))
    else:
        x = s * (scale * 0.6931471805599453 / cap)
        return cap * tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@inline
def sink_weight(sinks, heads, live, row_max):
    """Return the term that each row's attention sink adds to its row sum, relative to `row_max`; 0 if not `live`.

    A sink has no value vector, so acc is unchanged. Sink logits are in natural units, after scale and cap.
    """
    sink = tl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    # If a row saw no key, row_max is -inf, and -inf - -inf would be NaN.
    return tl.exp2(sink - tl.where(row_max == float("-inf"), 0.0, row_max))


@inline
def tile_weights(row_max, row_sum, s, unit, MASKED: tl.constexpr):
    """Return the softmax probabilities of a key tile, the factor on the row's sums so far, and new row_max and row_sum.

    Args:
        row_max, row_sum, s, unit, MASKED: as in `add_tile`.
    """
    new_row_max = tl.maximum(row_max, largest(s, 1) * unit)
    pivot = new_row_max
    if MASKED:
        # If a row has seen no key so far, its maximum is -inf, and -inf - -inf would be NaN.
        pivot = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    p = tl.exp2(s * unit - pivot[:, None])
    fade = tl.exp2(row_max - pivot)
    return p, fade, new_row_max, row_sum * fade + total(p, 1)


@inline
def add_tile(acc, row_max, row_sum, s, v, unit, dtype: tl.constexpr, MASKED: tl.constexpr):
    """Add a key tile to the running state of a row tile (online softmax); return acc, row_max, row_sum.

    Args:
        s: logits ``[BLOCK_M, BLOCK_N]`` fp32, -inf where a row does not see a key.
        v: values ``[BLOCK_N, BLOCK_V]``.
        unit: factor that makes the logits base-2 logits.
        dtype: dtype of the softmax probabilities in the product with `v`.
        MASKED: a row may have seen no key yet, in this tile and before.
    """
    p, fade, row_max, row_sum = tile_weights(row_max, row_sum, s, unit, MASKED)
    return dot(convert(p, dtype), v, acc * fade[:, None]), row_max, row_sum


@inline
def log_sum_exp(row_max, row_sum):
    """Return each row's log-sum-exp in base 2; -inf for a row without keys, which has row_sum 0."""
    return tl.where(row_sum > 0, row_max + tl.log2(row_sum), float("-inf"))


@inline
def normalize(acc, row_sum, v_factor):
    """Return the output of each row: acc over its sum, times V's scale; 0 without 0/0 for a row without keys."""
    return acc * (v_factor / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
