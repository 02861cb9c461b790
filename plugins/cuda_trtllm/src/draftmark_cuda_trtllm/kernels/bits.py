"""A causal row of a packed mask."""

import triton.language as tl

from .inline import inline


@inline
def causal_word(visible, word):
    """int32 word `word` of a row that sees the first `visible` slots."""
    ones = visible - 32 * word
    part = tl.minimum(tl.maximum(ones, 0), 31)
    return tl.where(ones >= 32, -1, (1 << part) - 1)
