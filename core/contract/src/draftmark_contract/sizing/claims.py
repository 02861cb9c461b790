"""Geometries that test whether a backend serves a declared mode, form or sinks at all, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from draftmark.geometry import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode

from ..profiles import MANDATORY

PAGES = (128, 64, 32, 16, 1)
KINDS = {
    "cuda": tuple(DeviceProfile("cuda", arch, 132) for arch in (75, 80, 89, 90, 100, 120)),
    "npu": (DeviceProfile("npu", 0, 24),),
}
"""Devices to try for a backend of a kind, since a kernel may exist on only one architecture."""


def claim(attention: AttentionShape, modes: tuple[Mode, ...], forms: tuple[Form, ...] = ()) -> Geometry:
    """Return a small geometry with these modes and forms, and a draft shape with which they are possible."""
    limits = Limits(3, 300, 40, (4,), row_budgets=(8,) if Mode.RAGGED_VERIFY in modes else ())
    plain = set(modes) <= {Mode.EXTEND, Mode.DECODE}
    draft = DraftShape() if plain else DraftShape(2, 3, 7, block_size=4 if Mode.DRAFT_BLOCK in modes else 0)
    return Geometry.create(attention, limits, draft, modes=modes, forms=forms)


def ways_to_serve(geometry: Geometry, device: DeviceProfile) -> Iterator[Geometry]:
    """Yield geometries with these modes, forms and sinks, varying page size, heads, dtype, draft shape and device."""
    base = replace(MANDATORY, sinks=geometry.attention.sinks)
    shapes = [replace(base, page_size=page, head_dim=dim) for dim in (128, 64) for page in PAGES]
    shapes += [replace(one, q_dtype="float16", kv_dtype="float16") for one in shapes]
    devices: Sequence[DeviceProfile] = (device, *KINDS.get(device.kind, ()))
    for attention in shapes:
        for draft in dict.fromkeys((geometry.draft, replace(geometry.draft, topk=1))):
            for one in devices:
                yield replace(geometry, attention=_resolved(attention), draft=draft, device=one)


def _resolved(attention: AttentionShape) -> AttentionShape:
    """Return the shape with its default softmax_scale, as `Geometry.create` sets it."""
    return claim(attention, (Mode.EXTEND,)).attention
