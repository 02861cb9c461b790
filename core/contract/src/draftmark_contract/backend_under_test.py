"""The backend under test, as a check sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from draftmark.errors import BackendRefusal
from draftmark.geometry import DeviceProfile, Geometry, Mode
from draftmark.loaded import LoadedBackend

from .check import ContractViolation, Refused, Tier
from .layouts import MetadataSpec
from .notes import Notes
from .sizing.batches import brief

if TYPE_CHECKING:
    from draftmark.arena import Arena
    from draftmark.backend import AttentionBackend
    from draftmark.graphs import GraphState

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
    """

    backend: LoadedBackend
    device: str
    tier: Tier
    marks: set[str] = field(default_factory=set)
    attended: bool = False

    @property
    def kernels(self) -> bool:
        """Whether `write_kv` and `attend` run here; else only buffers and metadata are exercised."""
        return self.tier is Tier.DEVICE or self.backend.info.host_kernels

    def interpreted(self) -> None:
        """Say that this item read the metadata with the contract's interpreter, not with the backend's kernels."""
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

    def opaque(self) -> None:
        """Say that this item met a layout that nobody can decode."""
        self.marks.add("opaque")

    @property
    def unjudged(self) -> bool:
        """Whether what rows see was left open: the layout is opaque, and no kernel's output told either."""
        return "opaque" in self.marks and not self.attended

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
        geometry = self.fit(geometry)
        try:
            self.backend.require(geometry)
        except BackendRefusal as refusal:
            self._refused_alike(geometry, refusal.reasons)
            raise Refused(refusal.reasons) from refusal

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
