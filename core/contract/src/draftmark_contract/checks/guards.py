"""Guard words, poison, and memory that two geometries must not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.buffers import BufferSpec, Role
from draftmark.geometry import Geometry, Mode

from ..check import Case
from ..needs import PER_REQUEST
from ..scenarios.scenes import furthest, scenes, spanning
from ..scenarios.shapes import all_shapes, describe
from ..scenarios.tiers import behaviour

if TYPE_CHECKING:
    from ..subject import Subject


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in all_shapes()]


def _pairs() -> list[Case]:
    made = {shape.name: shape for shape in all_shapes()}
    drafts = {name: made.get(name.replace("target", "draft")) for name in made if name.startswith("target")}
    pairs = {"twins": (made["target"], made["target"])}
    pairs |= {name.replace("target", "pair"): (made[name], draft) for name, draft in drafts.items() if draft}
    return [Case(name, (one.geometry, other.geometry), one.since) for name, (one, other) in pairs.items()]


@behaviour(cases=_geometries, bugs=("sglang#27338", "sglang#22778", "sglang#26753", "flashinfer#5344"))
def survive_every_step(subject: Subject, geometry: Geometry) -> None:
    """On one dirty arena, through every mode at its furthest, no byte around a buffer changes."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place, pool_pages

    rig = Rig(subject, geometry, pool_pages(geometry))
    for turn in furthest(geometry):
        turn = place(rig, turn)
        rig.run(turn, rig.load(turn))
        verify.guards(rig, turn)


@behaviour(cases=_geometries, bugs=("flashinfer#5176", "vllm#43961", "vllm-plugin-FL#429"))
def find_no_poison_read(subject: Subject, geometry: Geometry) -> None:
    """With every buffer poisoned before every step, and NaN in unused KV and in out, results are right."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place, pool_pages

    rig = Rig(subject, geometry, pool_pages(geometry))
    for turn in scenes(geometry):
        turn = place(rig, turn)
        rig.arena.poison()
        verify.turn_holds(rig, turn, rig.load(turn), "the output after poison")


INDEX_ROLES = frozenset(PER_REQUEST) | {
    *(Role.KV_INDICES, Role.PAGE_TABLE, Role.TAIL_MASK, Role.SLOT_MAPPING, Role.TAIL_DEPTH)
}


@behaviour(cases=_geometries, bugs=("sglang#31527", "sglang#32050"))
def find_no_buffer_unused(subject: Subject, geometry: Geometry) -> None:
    """Every index buffer is written by some forward; one that never is takes memory that KV pages do not get."""
    from draftmark.buffers import Init

    from ..check import ContractViolation
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, geometry, 1)
    rig.arena.poison()
    for turn in scenes(geometry):
        turn = place(rig, turn)
        rig.prepare(rig.stage.set(turn, rig.host))
    specs = [spec for spec in rig.arena.specs if spec.role in INDEX_ROLES and spec.init is Init.EMPTY]
    unused = [spec.name for spec in specs if spec.numel and bool((rig.arena[spec.name] == _poison(spec)).all())]
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
def keep_target_and_draft_apart(subject: Subject, pair: tuple[Geometry, Geometry]) -> None:
    """Another geometry's forward between a target's metadata and its attention changes nothing of the target's."""
    from ..check import ContractViolation
    from ..scenarios import verify
    from ..scenarios.held import held_storages
    from ..scenarios.rig import Rig, place, pool_pages

    rigs = [Rig(subject, geometry, pool_pages(geometry)) for geometry in pair]
    target, draft = rigs
    common = held_storages(target.backend).keys() & held_storages(draft.backend).keys() - {0}
    if common:
        names = sorted(held_storages(draft.backend)[one] for one in common)
        raise ContractViolation(
            "the backends of two geometries hold the same memory", got=names, expected="disjoint arenas"
        )
    first = next(t for t in scenes(pair[0]) if t.mode is Mode.VERIFY and t.name.endswith("edges"))
    for second in spanning(pair[1]):
        turn = place(target, first)
        batch = target.load(turn, "exact")  # so that a plan depends on its own batch
        expected = target.expected(turn)
        target.prepare(batch)
        other = place(draft, second)
        verify.turn_holds(draft, other, draft.load(other, "exact"), "the draft model's output")
        verify.metadata(target, turn, batch)
        target.layer(turn, batch)
        verify.output(turn, expected, target.stage.rows(turn)[3], "the target's output after a draft forward")
