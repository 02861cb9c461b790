"""Geometries of layers with recurrent state for the sizing tier, and the bytes that uncommitted rows need. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from draftmark.geometry import (
    DTYPE_BYTES,
    DeviceProfile,
    DraftShape,
    Gate,
    Limits,
    Mode,
    Recurrence,
    StateGeometry,
    StateShape,
)

from ..check import Case
from ..oracle.formulas import max_budget, max_requests, state_numel
from ..roles import Buffer, Role
from .claims import KINDS

SINCE = (1, 5)
KEPT = frozenset({Role.STATE_ROWS, Role.STATE_RECORDS})
"""Roles of buffers that hold rows until they are committed."""
SLACK = 2**16
"""Bytes that a plugin may allocate besides what rows need."""
BY_REQUEST = 64
"""Bytes of each request that a plugin may allocate besides what rows need."""


def shape(recurrence: Recurrence, gate: Gate, heads: int, key_heads: int, value: int, key: int) -> StateShape:
    """Return a layer in bfloat16 with a convolution of 4 over q, k and v."""
    channels = 2 * key_heads * key + heads * value
    return StateShape(recurrence, gate, heads, key_heads, key, value, channels, 4, "bfloat16")


SHAPES = {
    "qwen3-next": shape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128),
    "kimi-linear": shape(Recurrence.DELTA, Gate.KEY, 32, 32, 128, 128),
    "nemotron-h": shape(Recurrence.DECAY, Gate.HEAD, 128, 8, 64, 128),
    "lfm2": StateShape(Recurrence.NONE, Gate.HEAD, 0, 0, 0, 0, 2048, 3, "bfloat16", conv_silu=False),
}
LIMITS = {
    "one": Limits(1, 1, 1, row_budgets=(1,)),
    "some": Limits(5, 4096 + 33, 2048, (1, 2, 8), row_budgets=(3, 17)),
    "many": Limits(256, 131075, 8192, (8, 320), row_budgets=(512,)),
}
"""Limits; captured sizes are larger than the number of live requests (sglang#25124)."""
DRAFTS = {"chain": DraftShape(1, 3, 4), "tree": DraftShape(4, 5, 64)}
MODES = {
    "verify": (Mode.EXTEND, Mode.DECODE, Mode.VERIFY),
    "ragged": (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY),
    "both": (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY),
    "plain": (Mode.EXTEND, Mode.DECODE),
}


def _geometry(one: StateShape, limits: Limits, draft: DraftShape, modes: tuple[Mode, ...], layers: int) -> Any:
    limits = limits if Mode.RAGGED_VERIFY in modes else replace(limits, row_budgets=())
    draft = DraftShape() if set(modes) <= {Mode.EXTEND, Mode.DECODE} else draft
    return StateGeometry.create(one, limits, draft, modes=modes, num_layers=layers)


def served() -> list[Case]:
    """Return layers of models with few and many requests, chains and trees, and each set of modes."""
    return [
        Case(
            f"{name}-{size}-{draft}-{modes}",
            _geometry(SHAPES[name], LIMITS[size], DRAFTS[draft], MODES[modes], 36),
            SINCE,
        )
        for name, size, draft, modes in product(SHAPES, LIMITS, DRAFTS, MODES)
        if draft == "chain" or modes != "plain"
    ]


def proved() -> list[Case]:
    """Return a geometry of each recurrence with VERIFY. A proof replaces its integers by symbols."""
    return [one for one in served() if one.id.endswith("-some-tree-both")]


def claims() -> list[Case]:
    """Return a geometry of each recurrence."""
    return [
        Case(name, _geometry(one, LIMITS["some"], DRAFTS["chain"], MODES["both"], 2), SINCE)
        for name, one in SHAPES.items()
    ]


def ways_to_serve(geometry: StateGeometry, device: DeviceProfile) -> Iterator[StateGeometry]:
    """Yield geometries of the same recurrence with other gates, sizes, dtypes, modes and devices."""
    shapes = [one for one in SHAPES.values() if one.recurrence is geometry.state.recurrence]
    shapes += [replace(one, dtype=dtype, conv_dtype=dtype) for one in shapes for dtype in ("float16", "float32")]
    for one, modes, kind in product(shapes, MODES.values(), (device, *KINDS.get(device.kind, ()))):
        yield replace(_geometry(one, geometry.limits, geometry.draft, modes, 2), device=kind)


def kept_rows(geometry: StateGeometry) -> Any:
    """Return the most rows of a batch that are not committed when its forward ends, padding included."""
    rows: list[Any] = [0]
    if Mode.VERIFY in geometry.modes:
        rows.append(max_requests(geometry) * geometry.draft.num_draft_tokens)
    if Mode.RAGGED_VERIFY in geometry.modes:
        rows.append(max_budget(geometry))
    return max(rows)


def least_bytes(geometry: StateGeometry) -> Any:
    """Return the bytes of one row and layer without which no commit is possible: value, key and channels."""
    s = geometry.state
    numbers = s.num_heads * s.value_dim + s.num_key_heads * s.key_dim
    return numbers * DTYPE_BYTES[s.dtype] + s.conv_channels * DTYPE_BYTES[s.conv_dtype]


def most_bytes(geometry: StateGeometry) -> Any:
    """Return the bytes of one row and layer that hold everything: state, window, and a record in the inner dtype."""
    s, exact = geometry.state, DTYPE_BYTES[geometry.state.compute_dtype]
    of_head = 2 * (s.value_dim + s.key_dim + 1)
    record = s.num_heads * of_head + s.num_key_heads * s.key_dim
    window = s.conv_channels * max(s.conv_kernel, 1) * DTYPE_BYTES[s.conv_dtype]
    return (state_numel(geometry) + record) * exact + window


def kept_bytes(specs: list[Buffer]) -> Any:
    """Return the bytes of all buffers that hold rows until they are committed."""
    return sum(spec.nbytes for spec in specs if spec.role in KEPT)
