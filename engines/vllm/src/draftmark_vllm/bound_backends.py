"""The opened backends of one builder. Each shape of layer has one for decode and verify, and one for EXTEND.

A mixed step needs the metadata of both backends at one time, so each is opened separately and sized for its own modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from draftmark import AttentionShape, DeviceProfile, Form, Geometry, HostLengthsNeed, LoadedBackend, Mode
from draftmark.runtime import BoundBackend, ForwardBatch
from draftmark_engines import EngineError, EngineLimits, geometry_for

FORMS = (Form.ENGINE_SLOTS, Form.ENGINE_TABLE, Form.STRIDED_KV)
"""Forms of vLLM's batches: its own KV slots, a page table of its own width, K and V in one tensor. If a backend lacks
one of these forms, the adapter passes draftmark's usual form instead."""

LATENT_FORMS = (Form.ENGINE_STORES, Form.ENGINE_TABLE, Form.STRIDED_KV)
"""Forms of vLLM's batches for latent layers. ENGINE_STORES is required: vLLM stores the rows of these layers itself."""

OTHER_BACKEND = "use another backend of vLLM"
"""Remedy in errors, if no backend of draftmark serves a model."""


def forms_of(backend: LoadedBackend, shape: AttentionShape) -> tuple[Form, ...]:
    """Return the input formats of vLLM's batches for a layer that the backend accepts."""
    return tuple(form for form in (LATENT_FORMS if shape.latent else FORMS) if form in backend.info.forms)


@dataclass(frozen=True)
class Geometries:
    """Holds the two geometries of one shape of layer: one for decode and verify, one for EXTEND.

    Attributes:
        decode_verify: for DECODE; with drafts also for VERIFY, and for RAGGED_VERIFY if the backend serves it; with a
            block drafter also for DRAFT_BLOCK.
        extend: for EXTEND only.
    """

    decode_verify: Geometry
    extend: Geometry

    @classmethod
    def of(
        cls, backend: LoadedBackend, shape: AttentionShape, limits: EngineLimits, device: DeviceProfile
    ) -> Geometries:
        """Build the geometries for decode and verify and for EXTEND, and check that the backend serves them.

        Raises:
            EngineError: the backend refuses a geometry. The message has the reasons.
        """
        verify = (Mode.VERIFY, Mode.RAGGED_VERIFY) if limits.num_draft_tokens > 1 else ()
        block = (Mode.DRAFT_BLOCK,) if limits.block_size else ()
        forms = forms_of(backend, shape)
        if shape.latent and Form.ENGINE_STORES not in forms:
            raise EngineError(
                f"backend {backend.info.name} has no ENGINE_STORES, but vLLM stores the rows of MLA layers itself; "
                f"choose a backend with ENGINE_STORES, or {OTHER_BACKEND}"
            )
        if verify and not shape.latent and Form.ENGINE_SLOTS not in forms:
            raise EngineError(
                f"backend {backend.info.name} derives KV slots itself, but vLLM stores no drafts past the longest "
                "context; leave the drafts out, or choose a backend with ENGINE_SLOTS"
            )
        decode_verify = geometry_for(backend, shape, limits, device, (Mode.DECODE, *verify, *block), forms)
        return cls(decode_verify, geometry_for(backend, shape, limits, device, (Mode.EXTEND,), forms))

    def each(self) -> tuple[Geometry, Geometry]:
        """Return the geometry for decode and verify, and the geometry for EXTEND."""
        return self.decode_verify, self.extend

    @property
    def block(self) -> int:
        """Rows of a request in DRAFT_BLOCK; 0 if the layers have no block drafter."""
        return self.decode_verify.draft.block_size

    @property
    def ragged(self) -> bool:
        """True if RAGGED_VERIFY is served: requests of one step may have different numbers of draft rows."""
        return Mode.RAGGED_VERIFY in self.decode_verify.modes


class BoundBackends:
    """Opens two backends for each shape of layer, and plans and writes the metadata of all of them.

    Args:
        shapes: shapes of the layers; each is bound once.

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
        # An arbitrary shape's geometries, for facts that are equal for every shape: lengths and modes.
        self.any = next(iter(made.values()))
        backend.prepare([geometry for one in made.values() for geometry in one.each()], device)
        # Unchecked: vLLM computes positions itself, so a batch's positions stay zero, and the checks would reject them.
        opened = partial(backend.open, device=device, checked=False)
        self.decode_verify = {shape: opened(one.decode_verify) for shape, one in made.items()}
        self.extend = {shape: opened(one.extend) for shape, one in made.items()}
        needs = (backend.requirements(one).host_lengths for both in made.values() for one in both.each())
        self.need = HostLengthsNeed.strongest(needs)

    def of(self, mode: Mode) -> dict[AttentionShape, BoundBackend]:
        """Return the backends that run `mode`, by shape."""
        return self.extend if mode is Mode.EXTEND else self.decode_verify

    def geometry(self, mode: Mode) -> Geometry:
        """Return an arbitrary shape's geometry for `mode`. Lengths and modes are equal for every shape."""
        return self.any.extend if mode is Mode.EXTEND else self.any.decode_verify

    def plan(self, batch: ForwardBatch) -> None:
        """Call `plan` (the host part of a step's preparation) on the backend of every shape."""
        for backend in self.of(batch.mode).values():
            backend.plan(batch)

    def write(self, batch: ForwardBatch) -> None:
        """Write the metadata of every shape on the device. A CUDA graph can capture this call."""
        for backend in self.of(batch.mode).values():
            backend.write_metadata(batch)

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan and write metadata for every shape."""
        for backend in self.of(batch.mode).values():
            backend.plan(batch)
            backend.write_metadata(batch)


def arena_bytes(backend: LoadedBackend, geometries: Geometries) -> int:
    """Return the bytes that the backends of one shape allocate."""
    return sum(spec.nbytes for one in geometries.each() for spec in backend.buffers(one))
