"""Guard words, poison, and memory that two geometries must not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.buffers import BufferSpec, Role
from draftmark.geometry import Geometry, Mode

from ..behaviour import behaviour
from ..cases.forward_sets import all_forwards, longest_forwards, spanning_forwards
from ..cases.geometries import all_shapes, describe
from ..check import Case
from ..sizing.required_sizes import PER_REQUEST

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in all_shapes()]


def _pairs() -> list[Case]:
    made = {shape.name: shape for shape in all_shapes()}
    drafts = {name: made.get(name.replace("target", "draft")) for name in made if name.startswith("target")}
    pairs = {"twins": (made["target"], made["target"])}
    pairs |= {name.replace("target", "pair"): (made[name], draft) for name, draft in drafts.items() if draft}
    return [Case(name, (one.geometry, other.geometry), one.since) for name, (one, other) in pairs.items()]


@behaviour(cases=_geometries, bugs=("sglang#27338", "sglang#22778", "sglang#26753", "flashinfer#5344"))
def survive_every_step(subject: BackendUnderTest, geometry: Geometry) -> None:
    """On one dirty arena, through every mode at its furthest, no byte around a buffer changes."""
    from ..harness import expect as verify
    from ..harness.harness import Harness, place, pool_pages

    harness = Harness(subject, geometry, pool_pages(geometry))
    for forward in longest_forwards(geometry):
        forward = place(harness, forward)
        harness.run(forward, harness.load(forward))
        verify.guards(harness, forward)


@behaviour(cases=_geometries, bugs=("flashinfer#5176", "vllm#43961", "vllm-plugin-FL#429"))
def find_no_poison_read(subject: BackendUnderTest, geometry: Geometry) -> None:
    """With every buffer poisoned before every step, and NaN in unused KV and in out, results are right."""
    from ..harness import expect as verify
    from ..harness.harness import Harness, place, pool_pages

    harness = Harness(subject, geometry, pool_pages(geometry))
    for forward in all_forwards(geometry):
        forward = place(harness, forward)
        harness.arena.poison()
        verify.forward_holds(harness, forward, harness.load(forward), "the output after poison")


INDEX_ROLES = frozenset(PER_REQUEST) | {
    *(Role.KV_INDICES, Role.PAGE_TABLE, Role.TAIL_MASK, Role.SLOT_MAPPING, Role.TAIL_DEPTH)
}


@behaviour(cases=_geometries, bugs=("sglang#31527", "sglang#32050"))
def find_no_buffer_unused(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every index buffer is written by some forward; one that never is takes memory that KV pages do not get."""
    from draftmark.buffers import Init

    from ..check import ContractViolation
    from ..harness.harness import Harness, place

    harness = Harness(subject, geometry, 1)
    harness.arena.poison()
    for forward in all_forwards(geometry):
        forward = place(harness, forward)
        harness.prepare(harness.tensors.set(forward, harness.host))
    specs = [spec for spec in harness.arena.specs if spec.role in INDEX_ROLES and spec.init is Init.EMPTY]
    unused = [spec.name for spec in specs if spec.numel and bool((harness.arena[spec.name] == _poison(spec)).all())]
    if unused:
        raise ContractViolation(
            "no forward writes these buffers",
            batch=describe(geometry),
            got=unused,
            expected="buffers that some mode of the geometry uses",
            formula="the poison of a fresh arena is still there after every mode and step",
            bug="sglang#31527, sglang#32050",
            remedy="declare a buffer only for the modes that write it",
        )


def _poison(spec: BufferSpec) -> int:
    """What an entry of all ones reads as."""
    return {"uint8": 255, "uint16": 65535, "bool": 1}.get(spec.dtype, -1)


@behaviour(cases=_pairs, bugs=("vllm#48261", "vllm-ascend#3892"))
def keep_target_and_draft_apart(subject: BackendUnderTest, pair: tuple[Geometry, Geometry]) -> None:
    """Another geometry's forward between a target's metadata and its attention changes nothing of the target's."""
    from ..check import ContractViolation
    from ..harness import expect as verify
    from ..harness.harness import Harness, place, pool_pages
    from ..harness.reachable import reachable_storages

    rigs = [Harness(subject, geometry, pool_pages(geometry)) for geometry in pair]
    target, draft = rigs
    common = reachable_storages(target.backend).keys() & reachable_storages(draft.backend).keys() - {0}
    if common:
        names = sorted(reachable_storages(draft.backend)[one] for one in common)
        raise ContractViolation(
            "the backends of two geometries hold the same memory", got=names, expected="disjoint arenas"
        )
    first = next(t for t in all_forwards(pair[0]) if t.mode is Mode.VERIFY and t.name.endswith("edges"))
    for second in spanning_forwards(pair[1]):
        forward = place(target, first)
        batch = target.load(forward, "exact")  # so that a plan depends on its own batch
        expected = target.expected(forward)
        target.prepare(batch)
        other = place(draft, second)
        verify.forward_holds(draft, other, draft.load(other, "exact"), "the draft model's output")
        verify.metadata(target, forward, batch)
        target.layer(forward, batch)
        verify.output(forward, expected, target.tensors.rows(forward)[3], "the target's output after a draft forward")
