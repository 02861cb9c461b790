"""Checks of guard words, of poisoned memory, and of memory that two geometries must not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.buffers import BufferSpec
from draftmark.geometry import Geometry, Mode

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import (
    all_forwards,
    few_forwards,
    last_steps,
    longest_forwards,
    representative_forwards,
    spanning_forwards,
)
from ..cases.forwards import ForwardCase
from ..cases.geometries import all_shapes, describe, shapes
from ..cases.production import crowd, crowds, few_requests, heads
from ..check import Case, ContractViolation
from ..roles import Role
from ..sizing.required_sizes import PER_REQUEST
from ..sizing.usage import judged_own_buffers

if TYPE_CHECKING:
    from ..harness.harness import Harness


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in all_shapes()]


def _pairs() -> list[Case]:
    made = {shape.name: shape for shape in all_shapes()}
    drafts = {name: made.get(name.replace("target", "draft")) for name in made if name.startswith("target")}
    pairs = {"twins": (made["target"], made["target"])}
    pairs |= {name.replace("target", "pair"): (made[name], draft) for name, draft in drafts.items() if draft}
    return [Case(name, (one.geometry, other.geometry), one.since) for name, (one, other) in pairs.items()]


@behaviour(
    Fixture.GEOMETRY, cases=_geometries, bugs=("sglang#27338", "sglang#22778", "sglang#26753", "flashinfer#5344")
)
def survive_every_step(harness: Harness, geometry: Geometry) -> None:
    """The longest forwards of every mode, run on one dirty arena, change no byte around a buffer."""
    for forward in map(harness.place, longest_forwards(geometry)):
        harness.run(forward, harness.load(forward))
        harness.assert_guards(forward)


def _forwards() -> list[Case]:
    return [shape.case(list(few_forwards(shape))) for shape in all_shapes()]


@behaviour(Fixture.FORWARDS, cases=_forwards, bugs=("flashinfer#5176", "vllm#43961", "vllm-plugin-FL#429"))
def find_no_poison_read(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Results are right when every buffer is poisoned before each forward, and unused KV and out contain NaN."""
    for forward in forwards:
        harness.arena.poison()
        harness.assert_forward(forward, harness.load(forward), "the output after poison")


INDEX_ROLES = frozenset(PER_REQUEST) | {
    *(Role.KV_INDICES, Role.PAGE_TABLE, Role.TAIL_MASK, Role.SLOT_MAPPING, Role.TAIL_DEPTH)
}


@behaviour(Fixture.GEOMETRY, cases=_geometries, bugs=("sglang#31527", "sglang#32050"))
def find_no_buffer_unused(harness: Harness, geometry: Geometry) -> None:
    """Every index buffer is written by some forward. A buffer that no forward writes takes memory from KV pages."""
    harness.arena.poison()
    for forward in map(harness.place, all_forwards(geometry)):
        harness.prepare(harness.set(forward))
    specs = [spec for spec in harness.subject.buffers(harness.geometry) if spec.role in INDEX_ROLES and not spec.zeros]
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
    """Return the integer value of a buffer entry in which all bits are set."""
    return {"uint8": 255, "uint16": 65535, "bool": 1}.get(spec.dtype, -1)


@behaviour(Fixture.PAIR, cases=_pairs, bugs=("vllm#48261", "vllm-ascend#3892"))
def keep_target_and_draft_apart(target: Harness, draft: Harness) -> None:
    """A forward of a draft model between a target's metadata and its attention does not change the target's output."""
    common = target.held().keys() & draft.held().keys() - {0}
    if common:
        names = sorted(draft.held()[one] for one in common)
        raise ContractViolation(
            "the backends of two geometries hold the same memory", got=names, expected="disjoint arenas"
        )
    verify = [one for one in all_forwards(target.geometry) if one.mode is Mode.VERIFY and one.name.endswith("edges")]
    forward = target.place(verify[0])
    for other in map(draft.place, spanning_forwards(draft.geometry)):
        # Exact host lengths make the plan depend on this batch, so that a plan overwritten by the draft model shows.
        batch = target.load(forward, "exact")
        expected = target.expected(forward)
        target.prepare(batch)
        draft.assert_forward(other, draft.load(other, "exact"), "the draft model's output")
        target.assert_metadata(forward, batch)
        target.layer(forward, batch)
        target.assert_output(forward, expected, "the target's output after a draft forward")


def _of_all_sizes() -> list[Case]:
    usual = shapes("all-modes", "all-few-graphs", "all-kv8")
    found = [shape.case(representative_forwards(shape.geometry)) for shape in usual]
    found += [one.case(few_requests(one.geometry)) for one in heads() if one.name in ("h32kv8-128", "h64kv8-64")]
    for shape in crowds():
        steps = last_steps(shape.geometry).items()
        found.append(shape.case([crowd(shape.geometry, mode, step) for mode, step in steps]))
    return found


@behaviour(Fixture.FORWARDS, cases=_of_all_sizes, since=(1, 3), bugs=("TRT-LLM#17026", "vllm#40383", "sglang#14173"))
def keep_to_what_usage_says(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A forward writes no byte of a plugin-sized buffer after the bytes that usage() declares for its batch.

    A plugin-sized buffer is one that only the plugin can size, such as a workspace.
    """
    for forward in forwards:
        assert_within_usage(harness, forward)


def assert_within_usage(harness: Harness, forward: ForwardCase) -> None:
    """Run a forward on poisoned buffers, and check that no byte after the bytes that `usage()` declares changes."""
    from ..harness.assertions import BytesPastUsage

    own = judged_own_buffers(harness.subject, harness.subject.buffers(harness.geometry))
    batch = harness.load(forward)
    harness.arena.poison()
    bytes_past_usage = BytesPastUsage(harness.arena, harness.subject.usage(harness.geometry, batch, own))
    harness.assert_forward(forward, batch)
    bytes_past_usage.assert_unchanged(forward)
