"""Every compiled kernel that a layer with recurrent state can launch, listed without a GPU; see `..kernel_list`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Gate, Mode, Recurrence, StateGeometry

from ..kernel_list import stand_in, stand_in_buffers
from ..kernel_spec import KernelSpec, spec_of
from ..launch.launcher import LAUNCHER, KernelCall
from .commit import launch_commit
from .convolve import launch_convolve_one, launch_convolve_rows
from .extend import launch_all as launch_extend
from .recur import launch_rows, launch_verify
from .sizing import CHANNELS, DECAYS, KEYS, MATRICES, TOTALS, UPDATES, state_blocks, state_buffers, verify_blocks

SLOTS = 2
"""Slots of a stand-in pool. No kernel is specialized on their number."""


def state_calls_of(geometry: StateGeometry, arch: int | None = None) -> dict[KernelSpec, KernelCall]:
    """Return one call of `launcher.launch_kernel` for each compiled kernel of a state geometry.

    The rows of q, k, v, x, decays and strengths have pitches of multiples of 16, or are contiguous. The weights of the
    convolution have the activations' dtype, or float32.

    Args:
        geometry: shape, limits and modes; a device of another kind counts as a GPU.
        arch: compute capability times ten, for example 90; None takes the geometry's.
    """
    device = replace(geometry.device, kind="cuda", arch=geometry.device.arch if arch is None else arch)
    geometry = replace(geometry, device=device)
    found: dict[KernelSpec, KernelCall] = {}
    with LAUNCHER.collect(lambda call: found.setdefault(spec_of(call, device.arch), call)):
        launch_all(geometry)
    return found


def launch_all(geometry: StateGeometry) -> None:
    """Call the launch code of every mode."""
    s, buffers = geometry.state, stand_in_buffers(state_buffers(geometry))
    slots, lens, indptr = stand_in(1), stand_in(1), stand_in(2)
    state = stand_in(SLOTS, s.num_heads, s.value_dim, s.key_dim, dtype=s.state_dtype)
    conv = stand_in(SLOTS, s.conv_channels, geometry.window, dtype=s.conv_dtype)
    verifies = Mode.VERIFY in geometry.modes or Mode.RAGGED_VERIFY in geometry.modes
    if s.conv_kernel:
        _launch_convolutions(geometry, conv, slots, lens, indptr, buffers[CHANNELS], verifies)
    if s.recurrence is not Recurrence.NONE:
        rows = _rows_of(geometry)
        given = (*rows, state, slots, lens, indptr, rows[2])
        if Mode.EXTEND in geometry.modes:
            launch_extend(geometry, given, buffers)
        if Mode.DECODE in geometry.modes:
            launch_rows(s, state_blocks(geometry), True, *given)
        if verifies:
            records: list[Any] = [buffers[name] for name in (KEYS, UPDATES, DECAYS, TOTALS, MATRICES)]
            launch_verify(s, verify_blocks(geometry), 0, *given, None, *records)  # type: ignore[call-arg]
    nodes = int(geometry.draft.num_draft_tokens)
    path = stand_in(1, dtype="int64"), stand_in(1, nodes, dtype="int64")
    pool = (stand_in(1, *one.shape, dtype=str(one.dtype).removeprefix("torch.")) for one in (state, conv))
    state, conv = pool
    kept: list[Any] = [buffers.get(name) for name in (KEYS, UPDATES, DECAYS, CHANNELS)]
    for accepted in ([path] if verifies else []) + ([(None, None)] if geometry.limits.state_interval else []):
        interval = geometry.limits.state_interval
        launch_commit(s, state_blocks(geometry), 1, interval, state, conv, slots, slots, lens, indptr, *accepted, *kept)


def _rows_of(geometry: StateGeometry) -> tuple[Any, ...]:
    """Return stand-ins of q, k, v, decays and strengths."""
    s, rows = geometry.state, 2
    keys = stand_in(rows, s.num_key_heads, s.key_dim, dtype=s.dtype)
    values = stand_in(rows, s.num_heads, s.value_dim, dtype=s.dtype)
    decays = {Gate.HEAD: (rows, s.num_heads), Gate.KEY: (rows, s.num_heads, s.key_dim), Gate.CONSTANT: (s.num_heads,)}
    strength = stand_in(rows, s.num_heads, dtype="float32") if s.recurrence is Recurrence.DELTA else None
    return keys, keys, values, stand_in(*decays[s.gate], dtype="float32"), strength


def _launch_convolutions(
    geometry: StateGeometry,
    conv: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    indptr: torch.Tensor,
    channels: torch.Tensor,
    verifies: bool,
) -> None:
    """Call the launch code of the convolution, with weights in the activations' dtype and in float32."""
    s = geometry.state
    x = stand_in(2, s.conv_channels, dtype=s.dtype)
    for dtype in dict.fromkeys((s.dtype, "float32")):
        weight = stand_in(s.conv_channels, s.conv_kernel, dtype=dtype)
        if Mode.DECODE in geometry.modes:
            launch_convolve_one(s, x, weight, None, conv, slots, lens, x)
        for extend in [True] * (Mode.EXTEND in geometry.modes) + [False] * verifies:
            launch_convolve_rows(s, extend, 1, 0, x, weight, None, conv, slots, lens, indptr, None, channels, x)
