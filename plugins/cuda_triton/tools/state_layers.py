"""Random layers with recurrent state for `state_rounds`."""

from __future__ import annotations

import random
from dataclasses import replace

from draftmark import DraftShape, Gate, Limits, Recurrence, StateGeometry, StateShape
from draftmark.devices import device_profile

REQUESTS, LAYERS = 5, 3
DTYPES = (
    *(("bfloat16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float16", "float32")),
    *(("bfloat16", "bfloat16"), ("float16", "float16")),
)
"""Dtypes of activations and states; the usual pair twice as often."""
HEADS = ((4, 2), (3, 3), (8, 1), (2, 2))
DIMS = ((128, 128), (64, 128), (128, 64), (32, 16), (16, 32), (24, 40), (256, 64), (8, 16))
"""Key and value elements."""
KINDS = (
    *((Recurrence.DELTA, Gate.HEAD), (Recurrence.DELTA, Gate.HEAD), (Recurrence.DELTA, Gate.KEY)),
    *((Recurrence.DECAY, Gate.HEAD), (Recurrence.DECAY, Gate.KEY), (Recurrence.DECAY, Gate.CONSTANT)),
    *((Recurrence.DELTA, Gate.CONSTANT), (Recurrence.NONE, Gate.HEAD)),
)
NODES = (1, 4, 7, 16, 17, 33, 64, 100)
"""Rows of a verify."""


def geometries(count: int, device: str, seed: int = 0, small: bool = False) -> list[StateGeometry]:
    """Return geometries of random layers; the same ones for a seed.

    Args:
        small: leave out layers and rounds that take seconds in Triton's interpreter.
    """
    dice, found = random.Random(f"state {seed}"), []
    for number in range(count):
        recurrence, gate = KINDS[number % len(KINDS)]
        dtype, state_dtype = dice.choice(DTYPES)
        heads, key_heads = dice.choice(HEADS)
        key, value = dice.choice([one for one in DIMS if not small or max(one) <= 40])
        kernel = dice.choice((2, 3, 4, 4, 4)) if recurrence is Recurrence.NONE or dice.random() < 0.8 else 0
        channels = dice.choice((8, 40, 200)) if kernel else 0
        shape = StateShape(
            recurrence, gate, heads, key_heads, key, value, channels, kernel, dtype, state_dtype,
            dice.choice((dtype, "bfloat16")), conv_silu=dice.random() < 0.7, round_prompts=dice.random() < 0.5,
        )  # fmt: skip
        if recurrence is Recurrence.NONE:
            shape = replace(shape, num_heads=0, num_key_heads=0, key_dim=0, value_dim=0)
        nodes = dice.choice([one for one in NODES if not small or one <= 33])
        draft = DraftShape(2, 3, nodes) if nodes > 1 else DraftShape()
        budgets = (max(2, nodes), REQUESTS * nodes)
        interval = dice.choice((0, 3, 8))
        limits = Limits(REQUESTS, 4096, 400, (REQUESTS + 1,), row_budgets=budgets, state_interval=interval)
        found.append(StateGeometry.create(shape, limits, draft, device_profile(device), num_layers=LAYERS))
    return found
