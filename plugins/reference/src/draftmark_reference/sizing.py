"""Sizes of the reference backend's buffers. Integers only."""

from __future__ import annotations

from draftmark import BufferSpec, Gate, Geometry, Mode, Recurrence, StateGeometry


def buffers(geometry: Geometry) -> list[BufferSpec]:
    """Return two buffers: the KV length of each request and the KV slot of each row.

    The backend reads the page table and the tail mask directly from the batch.
    """
    return [
        BufferSpec("kv_lens", (geometry.max_reqs,), "int32", "max_reqs"),
        BufferSpec("slot_mapping", (geometry.max_rows_any,), "int64", "max_rows_any"),
    ]


def snapshot_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the states and windows after each row of a verify, in every layer."""
    s, lead = geometry.state, _rows(geometry)
    state, window = (s.num_heads, s.value_dim, s.key_dim), (s.conv_channels, geometry.window)
    return [
        BufferSpec("states", (*lead, *state), s.compute_dtype, "num_layers × max_reqs × D × state_numel"),
        BufferSpec("windows", (*lead, *window), s.conv_dtype, "num_layers × max_reqs × D × conv_numel"),
    ]


def replay_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the inputs of each row of a verify, in every layer: `record_bytes` and `channel_bytes` a row."""
    s, lead = geometry.state, _rows(geometry)
    decays = {
        Gate.HEAD: (*lead, s.num_heads),
        Gate.KEY: (*lead, s.num_heads, s.key_dim),
        Gate.CONSTANT: (geometry.num_layers, s.num_heads),
    }
    found = [
        ("keys", (*lead, s.num_key_heads, s.key_dim), s.dtype),
        ("values", (*lead, s.num_heads, s.value_dim), s.dtype),
        ("decays", decays[s.gate], s.compute_dtype),
        ("channels", (*lead, s.conv_channels), s.conv_dtype),
    ]
    if s.recurrence is Recurrence.DELTA:
        found.append(("betas", (*lead, s.num_heads), s.compute_dtype))
    formula = "num_layers × max_reqs × D × elements of a row"
    return [BufferSpec(name, shape, dtype, formula) for name, shape, dtype in found]


def _rows(geometry: StateGeometry) -> tuple[int, int, int]:
    """Return the layers, requests and rows that a verify keeps; without a verify no rows (sglang#23643)."""
    verifies = {Mode.VERIFY, Mode.RAGGED_VERIFY}.intersection(geometry.modes)
    return geometry.num_layers, geometry.max_reqs, geometry.draft.num_draft_tokens if verifies else 0
