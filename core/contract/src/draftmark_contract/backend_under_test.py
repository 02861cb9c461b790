"""The backend that a check tests, with the state of the item that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from draftmark.errors import BackendRefusal
from draftmark.geometry import DeviceProfile, Geometry, Mode, StateGeometry
from draftmark.loaded import LoadedBackend
from draftmark.requirements import HostLengthsNeed
from draftmark.version import CONTRACT_MINOR

from .check import ContractViolation, Need, Refused, Tier, Unjudged
from .layouts import MetadataSpec
from .notes import Notes
from .oracle.roundoffs import ROUNDOFFS, declared_roundoffs
from .roles import Buffer, with_roles
from .sizing.batches import brief
from .sizing.geometries import mandatory
from .sizing.proofs import lack_of_proofs

if TYPE_CHECKING:
    from draftmark.arena import Arena
    from draftmark.backend import BoundBackend
    from draftmark.batch import ForwardBatch
    from draftmark.buffers import BufferSpec
    from draftmark.graphs import GraphState


OPAQUE = "the metadata layout is opaque or not declared, and no kernel that reads it ran here"
INTERPRETED = "the metadata is right, but the suite computed the output from it: the backend's kernels did not run here"
AnyGeometry = TypeVar("AnyGeometry", bound=Geometry | StateGeometry)
_TYPICAL = {"cuda": DeviceProfile("cuda", 90, 132), "npu": DeviceProfile("npu", 0, 24)}


@dataclass
class BackendUnderTest:
    """Holds one backend and one device for the run of one item (one check with one case).

    Attributes:
        backend: the loaded plugin.
        device: ``"cpu"`` in the sizing and host tiers, the real device in the device tier.
        tier: tier of the item that runs.
        marks: labels of this item for the verdict: ``"interpreted"`` (the suite computed an output), ``"opaque"`` (a
            metadata layout could not be decoded), and `declared_roundoffs`.
        attended: True after the item has run the backend's own attention kernels.
        refused: `Refused` errors of this item that `refusal` created; an item ends as refused only by one of these.
        current: the forward or geometry that the item runs now; every error message includes it.
    """

    backend: LoadedBackend
    device: str
    tier: Tier
    marks: set[str] = field(default_factory=set)
    attended: bool = False
    refused: list[Refused] = field(default_factory=list)
    current: object = None

    def for_item(self, tier: Tier) -> BackendUnderTest:
        """Return a new `BackendUnderTest` for the next item, with this backend and device."""
        return BackendUnderTest(self.backend, self.device, tier)

    @property
    def command(self) -> str:
        """Command that judges this backend, for messages."""
        where = f" --device {self.device}" if self.tier is Tier.DEVICE else ""
        return f"draftmark contract {self.backend.name}{where}"

    @property
    def lacks(self) -> dict[Need, str]:
        """The packages of proofs, if they are not installed. A plugin has every other ability, or declares its lack."""
        lacking = lack_of_proofs()
        return {Need.PROOFS: lacking} if lacking else {}

    @property
    def minor(self) -> int:
        """Minor version of the contract that the plugin targets, or the newest if the plugin's value is invalid."""
        minor = self.backend.info.contract_minor
        return minor if type(minor) is int and 0 <= minor <= CONTRACT_MINOR else CONTRACT_MINOR

    @property
    def serves_core(self) -> bool:
        """True: every plugin serves the core profile."""
        return True

    def admits(self, error: Refused | Unjudged) -> bool:
        """Return True for an error that `refusal` created in this item. A plugin may raise none of these itself."""
        return any(error is one for one in self.refused)

    def printed(self, text: str) -> None:
        """Raise `ContractViolation` if the backend has printed, and mark an item that ran on only some geometries."""
        if text:
            raise ContractViolation("the backend printed", got=repr(text[:200]), remedy="use logging")
        if self.refused and not self.unjudged:
            self.marks.add("partly refused")

    @property
    def kernels(self) -> bool:
        """True if this tier runs `write_kv` and `attend`. Otherwise only the buffers and the metadata are checked."""
        return self.tier is Tier.DEVICE or self.backend.info.host_kernels

    def interpreted(self) -> None:
        """Record that the suite computed an output of this item from the backend's metadata, without its kernels."""
        self.marks.add("interpreted")

    @cached_property
    def notes(self) -> Notes:
        """The plugin's contract notes: declarations that only this suite reads, never an engine."""
        return Notes(self.backend)

    def layouts(self, geometry: Geometry) -> dict[Mode, MetadataSpec]:
        """Return the declared metadata layout of each mode. Without a declaration the item counts as not judged."""
        if not self.notes.has_layouts:
            self.opaque()
        return self.notes.layouts(geometry)

    def buffers(self, geometry: Geometry | StateGeometry) -> list[Buffer]:
        """Return the declared buffers of a geometry with their roles."""
        if isinstance(geometry, StateGeometry):
            return with_roles(self.backend.state_buffers(geometry), {}, self.notes.roles, state=True)
        return with_roles(self.backend.buffers(geometry), self.notes.layouts(geometry), self.notes.roles)

    def usage(self, geometry: Geometry, batch: ForwardBatch, own: Sequence[BufferSpec]) -> dict[str, int]:
        """Return the bytes that one batch uses of each buffer in `own`, by name, from the plugin's `usage()`."""
        used = self.notes.usage(self.fit(geometry), batch) if own else {}
        return {spec.name: used.get(spec.name, 0) for spec in own}

    def roundoffs(self, geometry: Geometry, mode: Mode) -> int:
        """Return the bound of an output in `mode` in unit roundoffs, and record a bound that the plugin declares.

        The suite's own outputs (`interpreted`) have the usual bound. A layer in float32 has no bound in roundoffs.
        """
        if not self.kernels or geometry.attention.q_dtype == "float32":
            return ROUNDOFFS
        count = self.notes.roundoffs(self.fit(geometry), mode)
        if count != ROUNDOFFS:
            self.marks.add(declared_roundoffs(count))
        return count

    def opaque(self) -> None:
        """Record that this item needs a metadata layout that the suite cannot decode."""
        self.marks.add("opaque")

    @property
    def unjudged(self) -> str:
        """Reason why an item that found no violation still does not count as passed. Empty when the item counts."""
        if "opaque" in self.marks and not self.attended:
            return OPAQUE
        return INTERPRETED if "interpreted" in self.marks else ""

    @property
    def profile(self) -> DeviceProfile:
        """Device profile for sizing: the real device in the device tier, else a typical one of the backend's kind."""
        if self.tier is Tier.DEVICE:
            from draftmark.devices import device_profile

            # The vendor's runtime may have to register this kind of device with torch before the device is used.
            self.backend.require_runtime(self.device)
            return device_profile(self.device)
        typical = _TYPICAL.get(self.backend.info.device, DeviceProfile())
        return replace(typical, num_sms=min(typical.num_sms, 4)) if self.tier is Tier.HOST else typical

    def fit(self, geometry: AnyGeometry) -> AnyGeometry:
        """Return `geometry` with the device set to this object's device. `require` and `open` call this themselves."""
        return replace(geometry, device=self.profile)

    def require(self, geometry: Geometry | StateGeometry) -> None:
        """Check that all entry points agree about `geometry`, then raise `Refused` if they refuse it."""
        geometry = self.current = self.fit(geometry)
        reasons = self._reasons(geometry)
        if reasons:
            self._refused_alike(geometry, reasons)
            raise self.refusal(reasons)

    def refusal(self, reasons: Sequence[str]) -> Refused:
        """Return a `Refused` error with these reasons of `supports`, and record it. The item can then be refused."""
        made = Refused(*reasons)
        self.refused.append(made)
        return made

    def _reasons(self, geometry: Geometry | StateGeometry) -> tuple[str, ...]:
        """Return the reasons of supports(), or the core's reason if exact host lengths are needed and overlap is on."""
        try:
            if isinstance(geometry, StateGeometry):
                return tuple(self.backend.state_supports(geometry))
            reasons = self.backend.supports(geometry)
        except BackendRefusal as refusal:
            raise ContractViolation(
                "supports() raises a refusal instead of returning its reasons",
                batch=brief(geometry),
                got=refusal,
                expected="a list of sentences; an empty list means that the geometry is served",
                formula="supports(geometry)",
                remedy="return the reasons",
            ) from refusal
        if not reasons and geometry.limits.host_lags and self._needs_exact_lengths(geometry):
            try:
                self.backend.require(geometry)
            except BackendRefusal as refusal:
                return refusal.reasons
        return tuple(reasons)

    def _needs_exact_lengths(self, geometry: Geometry) -> bool:
        return self.backend.requirements(geometry).host_lengths is HostLengthsNeed.EXACT

    def open(
        self, geometry: Geometry | StateGeometry, guard: bool = True, before: Callable[[Arena], None] | None = None
    ) -> tuple[BoundBackend, Arena]:
        """Open the backend on a fresh arena on `device`, with guard words and poison by default.

        Args:
            before: function that receives the arena before the backend does.

        Raises:
            Refused: the backend refuses the geometry at every entry point, with the same reasons.
            ContractViolation: the backend refuses the geometry at one entry point but not at another.
            BackendHookError: open_backend raised, or returned no AttentionBackend.
        """
        from draftmark.arena import Arena

        geometry = self.fit(geometry)
        self.require(geometry)
        if self.tier is Tier.DEVICE:
            self.backend.require_runtime(self.device)
        specs = (
            self.backend.state_buffers(geometry)
            if isinstance(geometry, StateGeometry)
            else self.backend.buffers(geometry)
        )
        arena = Arena.allocate(specs, self.device, guard=guard)
        if before is not None:
            before(arena)
        # The checks of guard mode read the device, and would hide what the backend does with a wrong batch: they are
        # off.
        bind: Any = self.backend.bind_state if isinstance(geometry, StateGeometry) else self.backend.bind
        return bind(geometry, arena, checked=False), arena

    def graph_state(self, geometry: Geometry | StateGeometry) -> GraphState:
        """Return a fresh graph state of the backend on `device`."""
        import torch

        # A hybrid model's graphs belong to its attention layers, so the hook knows no other geometry.
        geometry = mandatory() if isinstance(geometry, StateGeometry) else geometry
        return self.backend.graph_state(self.fit(geometry), torch.device(self.device))

    def _refused_alike(self, geometry: Geometry | StateGeometry, reasons: tuple[str, ...]) -> None:
        backend, of_state = self.backend, isinstance(geometry, StateGeometry)
        require: Any = backend.require_state if of_state else backend.require
        opens: Any = backend.open_state if of_state else backend.open
        entries: list[tuple[str, Callable[[], object]]] = [
            ("require", lambda: require(replace(geometry))),
            ("open", lambda: opens(replace(geometry), self.device)),
        ]
        # The sizing tier also runs where torch is not installed. open() needs torch, so that tier skips this entry.
        for entry, call in entries[: 1 if self.tier is Tier.SIZING else 2]:
            again: object = "no refusal"
            try:
                call()
            except BackendRefusal as refusal:
                again = refusal.reasons
            if again != reasons:
                raise ContractViolation(
                    f"{entry}() and supports() answer differently; a backend must refuse alike at every entry",
                    batch=brief(geometry),
                    got=again,
                    expected=reasons,
                    formula="supports(geometry)",
                    remedy="keep one predicate, supports(), and let it depend on the geometry only",
                )
