"""The backends that serve the layers of one builder: for each shape of layer one for few rows and one for EXTEND.

A mixed step needs the metadata of both at a time, so they are bound apart; each is sized for its own modes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from draftmark import AttentionShape, DeviceProfile, Form, Geometry, HostLengthsNeed, LoadedBackend, Mode
from draftmark.runtime import AttentionBackend, ForwardBatch
from draftmark_engines import EngineError, EngineLimits, geometry_for

FORMS = (Form.ENGINE_SLOTS, Form.ENGINE_TABLE, Form.STRIDED_KV)
"""vLLM places KV itself, brings a page table of its own width, and keeps K and V in one tensor. For a backend that does
not take one of them the adapter brings the core's own instead."""

OTHER_BACKEND = "use another backend of vLLM"
"""The way out where no backend of draftmark serves a model."""


def forms_of(backend: LoadedBackend) -> tuple[Form, ...]:
    """Of what vLLM brings of its own, what the backend takes as it is."""
    return tuple(form for form in FORMS if form in backend.info.forms)


@dataclass(frozen=True)
class Geometries:
    """Of one shape of layer.

    Attributes:
        few: DECODE, and with drafts VERIFY and what the backend serves of RAGGED_VERIFY.
        extend: EXTEND alone.
    """

    few: Geometry
    extend: Geometry

    @classmethod
    def of(
        cls, backend: LoadedBackend, shape: AttentionShape, limits: EngineLimits, device: DeviceProfile
    ) -> Geometries:
        """Build both, and ask the backend.

        Raises:
            EngineError: the backend does not serve them; with its reasons.
        """
        verify = (Mode.VERIFY, Mode.RAGGED_VERIFY) if limits.num_draft_tokens > 1 else ()
        forms = forms_of(backend)
        if verify and Form.ENGINE_SLOTS not in forms:
            raise EngineError(
                f"backend {backend.info.name} works KV slots out itself, but of drafts at the longest context vLLM "
                "stores nothing; leave the drafts out, or choose a backend that takes an engine's slots"
            )
        few = geometry_for(backend, shape, limits, device, (Mode.DECODE, *verify), forms)
        return cls(few, geometry_for(backend, shape, limits, device, (Mode.EXTEND,), forms))

    def each(self) -> tuple[Geometry, Geometry]:
        """Both."""
        return self.few, self.extend

    @property
    def ragged(self) -> bool:
        """Whether steps are served in which each request has rows of its own number."""
        return Mode.RAGGED_VERIFY in self.few.modes


class Served:
    """The bound backends of several shapes.

    Args:
        shapes: of the layers; each is served once.

    Raises:
        EngineError: the backend does not serve a shape.
    """

    def __init__(
        self,
        backend: LoadedBackend,
        shapes: Iterable[AttentionShape],
        limits: EngineLimits,
        profile: DeviceProfile,
        device: torch.device,
    ) -> None:
        made = {shape: Geometries.of(backend, shape, limits, profile) for shape in shapes}
        self.geometries = made
        self.few = {shape: backend.open(one.few, device) for shape, one in made.items()}
        self.extend = {shape: backend.open(one.extend, device) for shape, one in made.items()}
        needs = (backend.requirements(one).host_lengths for both in made.values() for one in both.each())
        self.need = HostLengthsNeed.strongest(needs)

    @property
    def any(self) -> Geometries:
        """Of some shape: lengths and modes are the same for all."""
        return next(iter(self.geometries.values()))

    def of(self, mode: Mode) -> dict[AttentionShape, AttentionBackend]:
        """The backends that run `mode`, by shape."""
        return self.extend if mode is Mode.EXTEND else self.few

    def geometry(self, mode: Mode) -> Geometry:
        """Of some shape, for `mode`."""
        return self.any.extend if mode is Mode.EXTEND else self.any.few

    def plan(self, batch: ForwardBatch) -> None:
        """Decide for every shape what the host must decide."""
        for backend in self.of(batch.mode).values():
            backend.plan(batch)

    def write(self, batch: ForwardBatch) -> None:
        """Write the metadata of every shape, on the device. Capturable."""
        for backend in self.of(batch.mode).values():
            backend.write_metadata(batch)

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan and write metadata for every shape."""
        self.plan(batch)
        self.write(batch)


def arena_bytes(backend: LoadedBackend, geometries: Geometries) -> int:
    """Bytes that one shape's backends allocate."""
    return sum(spec.nbytes for one in geometries.each() for spec in backend.buffers(one))
