"""Checks of the plugin itself: it loads, describes itself, and its hooks return the right types and print nothing."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftmark.buffers import BufferSpec
from draftmark.geometry import Geometry, Mode
from draftmark.registry import available
from draftmark.version import CONTRACT_MINOR

from ..check import Case, ContractViolation, Tier, all_checks, check
from ..layouts import Layout, LengthConvention, Level, MetadataSpec
from ..roles import Role
from ..runner.fresh import fresh
from ..runner.identity import siblings_of
from ..runner.known import known_failures
from ..sizing.geometries import mandatory, tight_geometries

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

_PROBE = """
import sys
from draftmark import load
from draftmark_contract.notes import Notes
from draftmark_contract.sizing.geometries import mandatory
backend, geometry = load(sys.argv[1]), mandatory()
backend.supports(geometry), backend.requirements(geometry), backend.buffers(geometry)
notes = Notes(backend)
notes.layouts(geometry), [notes.roundoffs(geometry, mode) for mode in geometry.modes]
heavy = [name for name in ("torch", *backend.info.runtime) if name in sys.modules]
sys.exit("imported " + ", ".join(heavy) if heavy else 0)
"""


def _once() -> Sequence[Case]:
    return [Case("plugin", None)]


def _geometries() -> Sequence[Case]:
    return [Case("mandatory", mandatory()), *tight_geometries()]


@check(tier=Tier.SIZING, cases=_once)
def describes_itself(subject: BackendUnderTest, _: None) -> None:
    """describe() returns the declared types, the same answer every time, and a contract version that this core has."""
    info = subject.backend.info
    again = subject.backend.implementation("describe")()
    _expect("describe() must give the same answer every time", again, info)
    types = {"name": str, "device": str, "contract_minor": int, "host_kernels": bool, "runtime": tuple, "install": str}
    for name, kind in types.items():
        value = getattr(info, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            _wrong(f"BackendInfo.{name} must be {kind.__name__}", value, kind.__name__)
    if not 0 <= info.contract_minor <= CONTRACT_MINOR:
        versions = f"0 ... {CONTRACT_MINOR}"
        _wrong("BackendInfo.contract_minor must be one that this core has", info.contract_minor, versions)
    if not all(isinstance(name, str) and name for name in info.runtime):
        _wrong("BackendInfo.runtime must contain import names", info.runtime, "('flashinfer',)")


@check(tier=Tier.SIZING, cases=_once)
def imports_lightly(subject: BackendUnderTest, _: None) -> None:
    """Loading and sizing import neither torch nor the vendor's runtime, so that `draftmark size` works anywhere."""
    if subject.backend.name not in {row.name for row in available()}:
        return  # A backend object that a test registers has no module to import in a new process.
    command = [sys.executable, "-c", _PROBE, subject.backend.name]
    done = subprocess.run(command, env=fresh(), capture_output=True, text=True, check=False)
    if done.returncode:
        _wrong(
            "sizing, and the contract notes, must work without torch and the vendor's runtime",
            (done.stderr or done.stdout).strip().rpartition("\n")[2],
            "no import of either",
            "import them inside open_backend and graph_state",
        )


@check(tier=Tier.SIZING, cases=_geometries)
def answers_repeatably(subject: BackendUnderTest, geometry: Geometry) -> None:
    """supports, buffers and layouts depend only on the geometry: they keep no state, print nothing, share no result."""
    subject.require(geometry)
    geometry = subject.fit(geometry)
    backend = subject.backend
    before = repr(geometry)
    hooks: list[tuple[str, Callable[[Geometry], Any]]] = [
        ("supports", backend.supports),
        ("buffers", backend.buffers),
        ("layouts", subject.layouts),
        ("roundoffs", lambda geometry: {mode: subject.notes.roundoffs(geometry, mode) for mode in geometry.modes}),
    ]
    for name, hook in hooks:
        first = _quietly(name, hook, geometry)
        kept = repr(first)
        first.clear()  # Clear the returned list, as a caller can: the next call must return a complete list again.
        _expect(f"{name}() must give the same answer every time", repr(_quietly(name, hook, replace(geometry))), kept)
    _expect("hooks must not change the geometry", repr(geometry), before)


@check(tier=Tier.SIZING, cases=_geometries)
def declares_types(subject: BackendUnderTest, geometry: Geometry) -> None:
    """BufferSpec and MetadataSpec contain values of the declared types, and name buffers that exist."""
    subject.require(geometry)
    geometry = subject.fit(geometry)
    specs = subject.buffers(geometry)
    for spec in specs:
        _check_buffer(spec)
    roles = {spec.name: spec.role for spec in specs}
    dtypes, named = {spec.name: spec.dtype for spec in specs}, set[str]()
    for mode, meta in subject.layouts(geometry).items() if subject.notes.has_layouts else ():
        _check_metadata(mode, meta, roles)
        _check_mask(mode, meta, dtypes, geometry)
        named |= {name for level in meta.levels for name in level.buffers.values()}
    for name, role in roles.items():
        if subject.notes.has_layouts and role in _DECODED and name not in named:
            _wrong(
                f"no level names buffer {name!r} (role {role.value}), so its content cannot be checked",
                sorted(named),
                f"Level.buffers[{role.value!r}] = {name!r} in the modes that write it",
                bug="vllm#17394",
            )


@check(tier=Tier.SIZING, cases=_once, since=(1, 3))
def siblings_are_declared(subject: BackendUnderTest, _: None) -> None:
    """BackendInfo.runs_code_of names every other backend that the plugin imports.

    The verdict of the plugin depends on the code of those backends. Each of them is installed.
    """
    declared = set(getattr(subject.backend.info, "runs_code_of", ()))
    installed = {row.name for row in available()}
    # If the vendor's runtime is absent, a sibling plugin may be absent too, because the same extra installs both.
    if declared - installed and not subject.backend.missing_runtime():
        _wrong(
            "BackendInfo.runs_code_of names backends that are not installed",
            sorted(declared - installed),
            sorted(installed),
        )
    undeclared = siblings_of(subject.backend) - declared
    if undeclared:
        _wrong(
            "the plugin imports the packages of backends that BackendInfo.runs_code_of does not name",
            sorted(declared),
            sorted(undeclared | declared),
            f"runs_code_of={tuple(sorted(undeclared | declared))!r}",
        )


@check(tier=Tier.SIZING, cases=_once)
def known_failures_are_current(subject: BackendUnderTest, _: None) -> None:
    """Each entry of contract.toml has id, item, reason, url and fault, and matches an item of this suite."""
    items = [one.item(case) for one in all_checks() for case in one.cases()]
    for entry in known_failures(subject.backend):
        if entry.missing:
            _wrong(
                f"known failure {entry.id!r} lacks {', '.join(entry.missing)}", entry, "id, item, reason, url, fault"
            )
        if not any(entry.matches(item) for item in items):
            _wrong(
                f"known failure {entry.id!r} matches no item",
                entry.item,
                "an item id or a pattern of them",
                "remove it",
            )


def _quietly(name: str, hook: Callable[[Geometry], Any], geometry: Geometry) -> Any:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        result = hook(geometry)
    if said.getvalue():
        _wrong(f"{name}() printed", said.getvalue()[:200], "silence", "use logging")
    return result


_DECODED = frozenset(
    {
        *(Role.KV_INDPTR, Role.KV_INDICES, Role.KV_LAST_PAGE_LEN, Role.KV_LENS, Role.QO_INDPTR, Role.PAGE_TABLE),
        *(Role.TAIL_MASK, Role.MASK_INDPTR, Role.SLOT_MAPPING, Role.TAIL_DEPTH),
    }
)
"""Roles with a content that the metadata oracle reads."""


def _check_buffer(spec: BufferSpec) -> None:
    for name in ("pinned", "zeros"):
        if not isinstance(getattr(spec, name), bool):
            _wrong(f"buffer {spec.name!r}: {name} must be a bool", getattr(spec, name), "True or False")
    if not spec.formula or not isinstance(spec.formula, str):
        _wrong(f"buffer {spec.name!r} must have a formula for its shape", spec.formula, 'such as "max_reqs + 1"')
    if not isinstance(spec.shape, tuple) or not spec.shape:
        _wrong(f"buffer {spec.name!r}: shape must be a tuple with at least one extent", spec.shape, "(max_reqs,)")


def _check_metadata(mode: Mode, meta: MetadataSpec, roles: dict[str, Role]) -> None:
    where = f"metadata of {mode.value}"
    allowed: dict[str, tuple[object, ...]] = {
        "live_extent": ("padded", "live"),
        "pad_fill": (0, 1),
    }
    for name, values in allowed.items():
        if getattr(meta, name) not in values:
            _wrong(f"{where}: {name} is out of range", getattr(meta, name), values)
    if not isinstance(meta.levels, tuple) or not 1 <= len(meta.levels) <= 2:
        _wrong(f"{where}: levels must be a tuple of one or two", meta.levels, "(Level(...),)")
    if not isinstance(meta.mask_stride, int) or meta.mask_stride < 0:
        _wrong(f"{where}: mask_stride must be a count", meta.mask_stride, "Geometry.mask_words", bug="sglang#31367")
    for level in meta.levels:
        _check_level(where, level, roles)


def _check_mask(mode: Mode, meta: MetadataSpec, dtypes: dict[str, str], geometry: Geometry) -> None:
    """Check that mask_dtype and mask_stride describe the mask that is read: the backend's buffer or the batch's."""
    masks = [level.buffers["tail_mask"] for level in meta.levels if "tail_mask" in level.buffers]
    dtype = dtypes.get(masks[0], "") if masks else "int32"
    if meta.mask_dtype != dtype:
        _wrong(
            f"metadata of {mode.value}: mask_dtype differs from the dtype of the mask buffer",
            meta.mask_dtype,
            dtype,
            bug="TRT-LLM#13006",
        )
    if not masks and meta.mask_stride not in (0, geometry.mask_words):
        got, want = meta.mask_stride, f"0, or Geometry.mask_words = {geometry.mask_words}"
        _wrong(f"metadata of {mode.value}: no level names a mask, so mask_stride must be the batch's", got, want)


def _check_level(where: str, level: Level, roles: dict[str, Role]) -> None:
    if not isinstance(level.layout, Layout) or not isinstance(level.lengths, LengthConvention):
        _wrong(f"{where}: layout and lengths must be Layout and LengthConvention", level, [*Layout])
    for role, name in level.buffers.items():
        if roles.get(name) is None or roles[name].value != role:
            what = f"{where}: buffers() declares no buffer with the name and the role that a level gives"
            _wrong(what, f"{role}: {name}", roles)
    csr = level.layout in (Layout.CSR_PAGES, Layout.CSR_TOKENS)
    missing = [role for role in ("kv_indptr", "kv_indices") if csr and role not in level.buffers]
    if missing:
        _wrong(f"{where}: a {level.layout.value} level must name its buffers", sorted(level.buffers), missing)


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        _wrong(what, got, expected, "keep no state in the hooks")


def _wrong(what: str, got: object, expected: object, remedy: str = "fix the plugin", bug: str = "") -> None:
    raise ContractViolation(what, got=got, expected=expected, remedy=remedy, bug=bug)
