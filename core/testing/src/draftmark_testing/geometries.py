"""Small geometries of tests."""

from __future__ import annotations

from typing import Any

from draftmark import CORE_MODES, AttentionShape, DeviceProfile, DraftShape, Geometry, Limits

SMALL: dict[str, Any] = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "q_dtype": "float32",
    "kv_dtype": "float32",
    "max_num_reqs": 4,
    "max_context_len": 32,
    "max_extend_tokens": 16,
}
"""Fields of a float32 geometry that plain Python can compute with."""


def make_geometry(**fields: Any) -> Geometry:
    """Return a small float32 geometry with all modes; keywords replace fields of any part."""
    flat = SMALL | fields
    parts: Any = [
        kind(**{name: flat.pop(name) for name in kind.__dataclass_fields__ if name in flat})
        for kind in (AttentionShape, Limits, DraftShape, DeviceProfile)
    ]
    modes, forms = flat.pop("modes", CORE_MODES), flat.pop("forms", ())
    assert not flat, f"unknown geometry fields {sorted(flat)}"
    attention, limits, draft, device = parts
    return Geometry.create(attention, limits, draft, device, modes, forms)
