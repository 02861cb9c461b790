"""Geometries of latent layers and narrow values for the sizing tier: small, as large as engines use, and huge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from draftmark.geometry import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from .claims import KINDS
from .geometries import PROVED

SINCE = (1, 5)
SCALE = 192**-0.5
TREE = DraftShape(2, 3, 7)
PARTS = (Form.LATENT_PARTS,)


def row(heads: int, page: int, width: int = 576, value: int = 512) -> AttentionShape:
    """Return a latent layer of rows with `width` elements."""
    return AttentionShape(heads, 1, width, page, softmax_scale=SCALE, value_dim=value, latent=True)


ROWS = {
    **{f"h{heads}-page64": row(heads, 64) for heads in (8, 12, 16, 128)},
    **{f"h16-page{page}": row(16, page) for page in (1, 16, 128)},
    **{f"h{heads}-page48": row(heads, 48) for heads in (1, 20, 96)},
    "512-page64": row(16, 64, 512, 512),
    "256-page32": row(32, 32, 320, 256),
    "128-page64": row(32, 64, 160, 128),
}
NARROW = {
    "192-128": AttentionShape(16, 16, 192, 64, value_dim=128),
    "192-128-gqa": AttentionShape(8, 2, 192, 16, value_dim=128),
}


def _geometry(shape: AttentionShape, modes: tuple[Mode, ...], limits: Limits, forms: tuple[Form, ...]) -> Geometry:
    draft = DraftShape() if set(modes) <= {Mode.EXTEND, Mode.DECODE} else TREE
    return Geometry.create(shape, limits, draft, modes=modes, forms=forms)


def _of(named: dict[str, AttentionShape], limits: dict[str, Limits], forms: tuple[Form, ...] = ()) -> list[Case]:
    return [
        Case(f"{served}-{name}-{size}{'-parts' * bool(forms)}", _geometry(shape, modes, limit, forms), SINCE)
        for (served, modes), (name, shape), (size, limit) in product(PROVED.items(), named.items(), limits.items())
    ]


def served() -> list[Case]:
    """Return geometries of one request, of some and of many, with all rows, in two buffers, and with narrow values."""
    limits = {
        "one": Limits(1, 1, 1),
        "some": Limits(5, 4096 + 33, 2048, (1, 2, 8)),
        "many": Limits(256, 131075, 8192, (8, 256)),
    }
    parts = {name: shape for name, shape in ROWS.items() if name in ("h8-page64", "h16-page128")}
    return [*_of(ROWS, limits), *_of(parts, limits, PARTS), *_of(NARROW, limits)]


def tight() -> list[Case]:
    """Return geometries as large as engines use. At that size rounding does not hide a wrong factor."""
    few = {name: ROWS[name] for name in ("h16-page64", "h128-page64", "h16-page1", "h20-page48", "256-page32")}
    return _of(few | NARROW, {"many": Limits(256, 131075, 8192, (8, 128, 256))})


def huge() -> list[Case]:
    """Return geometries with slots of more than 2**31, and with slots of more than 2**31 / 576."""
    few = {name: ROWS[name] for name in ("h16-page64", "h16-page1")}
    return _of(few, {"slots": Limits(8192, 1 << 20, 8192, (8192,)), "offsets": Limits(64, 1 << 17, 8192, (64,))})


def claims() -> list[Case]:
    """Return a geometry for each claim: latent rows, in two buffers, stored by the engine, and narrow values."""
    shape, limits, modes = row(16, 64), Limits(3, 300, 40, (4,)), (Mode.EXTEND, Mode.DECODE)
    forms = {"latent": (), "parts": PARTS, "engine-stores": (Form.ENGINE_STORES,)}
    found = [Case(name, _geometry(shape, modes, limits, some), SINCE) for name, some in forms.items()]
    return [*found, Case("narrow-values", _geometry(NARROW["192-128"], modes, limits, ()), SINCE)]


def ways_to_serve(geometry: Geometry, device: DeviceProfile) -> Iterator[Geometry]:
    """Yield geometries like this one with other pages, heads, widths, layouts of rows, dtypes, modes and devices.

    An engine may prefill latent rows with heads before absorption, so a backend may serve all modes except EXTEND.
    """
    latent = geometry.attention.latent
    shapes = list((ROWS if latent else NARROW).values())
    shapes += [replace(one, q_dtype="float16", kv_dtype="float16") for one in shapes]
    layouts = dict.fromkeys((geometry.forms, (*geometry.forms, *PARTS)) if latent else (geometry.forms,))
    decoding = tuple(mode for mode in geometry.modes if mode is not Mode.EXTEND)
    sets = dict.fromkeys((geometry.modes, decoding or geometry.modes))
    for modes, forms, shape, one in product(sets, layouts, shapes, (device, *KINDS.get(device.kind, ()))):
        apart = Form.LATENT_PARTS in forms and shape.head_dim == shape.value_width
        if len(set(forms)) == len(forms) and not apart:
            made = Geometry.create(shape, geometry.limits, geometry.draft, modes=modes, forms=forms)
            yield replace(made, device=one)
