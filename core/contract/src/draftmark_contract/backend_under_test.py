"""The backend under test, as a check sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from draftmark.errors import BackendRefusal
from draftmark.geometry import DeviceProfile, Geometry, Mode
from draftmark.loaded import LoadedBackend
from draftmark.requirements import HostLengthsNeed

from .check import ContractViolation, Refused, Tier
from .layouts import MetadataSpec
from .notes import Notes
from .sizing.batches import brief

if TYPE_CHECKING:
    from draftmark.arena import Arena
    from draftmark.backend import AttentionBackend
    from draftmark.batch import ForwardBatch
    from draftmark.buffers import BufferSpec
    from draftmark.graphs import GraphState

OPAQUE = "the layout is opaque or not declared, and no kernel that reads it ran here"
INTERPRETED = "the metadata is right, but the suite computed the output from it: the backend's kernels did not run here"
_TYPICAL = {"cuda": DeviceProfile("cuda", 90, 132), "npu": DeviceProfile("npu", 0, 24)}


@dataclass
class BackendUnderTest:
    """One backend on one device, for the time of one item.

    Attributes:
        backend: the loaded plugin.
        device: ``"cpu"`` in the sizing and host tiers, the real device in the device tier.
        tier: the tier of the item that runs.
        marks: what the item says about itself for the verdict, see `interpreted`.
        attended: whether the backend's own kernels ran.
        refused: the refusals of this item that came from `supports`; no other one counts.
        current: the forward, or the geometry, that the item is at, for the message of whatever is raised.
    """

    backend: LoadedBackend
    device: str
    tier: Tier
    marks: set[str] = field(default_factory=set)
    attended: bool = False
    refused: list[Refused] = field(default_factory=list)
    current: object = None

    def for_item(self, tier: Tier) -> BackendUnderTest:
        """The same backend, as the next item sees it."""
        return BackendUnderTest(self.backend, self.device, tier)

    @property
    def kernels(self) -> bool:
        """Whether `write_kv` and `attend` run here; else only buffers and metadata are exercised."""
        return self.tier is Tier.DEVICE or self.backend.info.host_kernels

    def interpreted(self) -> None:
        """Say that the suite computed an output of this item from the backend's metadata, since no kernel runs here."""
        self.marks.add("interpreted")

    @cached_property
    def notes(self) -> Notes:
        """What the plugin tells the suite alone; see `layouts` for what it says of its metadata."""
        return Notes(self.backend)

    def layouts(self, geometry: Geometry) -> dict[Mode, MetadataSpec]:
        """What the backend's metadata means in each mode; the item is not judged on what the plugin does not say."""
        if not self.notes.says_layouts:
            self.opaque()
        return self.notes.layouts(geometry)

    def usage(self, geometry: Geometry, batch: ForwardBatch, own: Sequence[BufferSpec]) -> dict[str, int]:
        """Bytes that the plugin's `usage()` gives for these of its buffers in one batch."""
        said = self.notes.usage(self.fit(geometry), batch) if own else {}
        return {spec.name: said.get(spec.name, 0) for spec in own}

    def opaque(self) -> None:
        """Say that this item met a layout that nobody can decode."""
        self.marks.add("opaque")

    @property
    def unjudged(self) -> str:
        """Why the item decides nothing although nothing was found wrong; empty when it decides."""
        if "opaque" in self.marks and not self.attended:
            return OPAQUE
        return INTERPRETED if "interpreted" in self.marks else ""

    @property
    def profile(self) -> DeviceProfile:
        """The device that sizing is told of: the real one in the device tier, a typical one of its kind elsewhere."""
        if self.tier is Tier.DEVICE:
            from draftmark.devices import device_profile

            self.backend.require_runtime(self.device)  # it may be what teaches torch this kind of device
            return device_profile(self.device)
        typical = _TYPICAL.get(self.backend.info.device, DeviceProfile())
        return replace(typical, num_sms=min(typical.num_sms, 4)) if self.tier is Tier.HOST else typical

    def fit(self, geometry: Geometry) -> Geometry:
        """`geometry` on this subject's device; `require` and `open` do it themselves."""
        return replace(geometry, device=self.profile)

    def require(self, geometry: Geometry) -> None:
        """Raise `Refused` when the backend refuses `geometry`, after checking that it says so everywhere alike."""
        geometry = self.current = self.fit(geometry)
        reasons = self._reasons(geometry)
        if reasons:
            self._refused_alike(geometry, reasons)
            raise self.refusal(reasons)

    def refusal(self, reasons: Sequence[str]) -> Refused:
        """A refusal that counts: of what `require` was told, or of several such together."""
        made = Refused(reasons)
        self.refused.append(made)
        return made

    def _reasons(self, geometry: Geometry) -> tuple[str, ...]:
        """What supports() answers; else the core's own reason, exact lengths of a host that lags."""
        try:
            reasons = self.backend.supports(geometry)
        except BackendRefusal as refusal:
            raise ContractViolation(
                "supports() raises a refusal instead of returning its reasons",
                batch=brief(geometry),
                got=refusal,
                expected="a list of sentences; an empty one means that the geometry is served",
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

    def open(self, geometry: Geometry, guard: bool = True) -> tuple[AttentionBackend, Arena]:
        """The backend bound to a fresh arena on `device`; guard words and poison on by default.

        Raises:
            Refused: the backend refuses the geometry, alike at every entry.
            ContractViolation: it refuses at one entry and not at another.
            BackendHookError: open_backend raised, or returned no AttentionBackend.
        """
        from draftmark.arena import Arena

        geometry = self.fit(geometry)
        self.require(geometry)
        if self.tier is Tier.DEVICE:
            self.backend.require_runtime(self.device)
        arena = Arena.allocate(self.backend.buffers(geometry), self.device, guard=guard)
        return self.backend.bind(geometry, arena), arena

    def graph_state(self, geometry: Geometry) -> GraphState:
        """A fresh graph state of the backend for `device`."""
        import torch

        return self.backend.graph_state(self.fit(geometry), torch.device(self.device))

    def _refused_alike(self, geometry: Geometry, reasons: tuple[str, ...]) -> None:
        entries: list[tuple[str, Callable[[], object]]] = [
            ("require", lambda: self.backend.require(replace(geometry))),
            ("open", lambda: self.backend.open(replace(geometry), self.device)),
        ]
        # The sizing tier runs where torch is absent, and open() needs it.
        for entry, call in entries[: 1 if self.tier is Tier.SIZING else 2]:
            again: object = "no refusal"
            try:
                call()
            except BackendRefusal as refusal:
                again = refusal.reasons
            if again != reasons:
                raise ContractViolation(
                    f"a backend must refuse alike at every entry; {entry}() answers otherwise than supports()",
                    batch=brief(geometry),
                    got=again,
                    expected=reasons,
                    formula="supports(geometry)",
                    remedy="keep one predicate, supports(), that depends on the geometry alone",
                )
