"""Inputs stay as they are: each call writes what it is for, and nothing is kept or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..check import Case
from ..scenarios.scenes import spanning, turn_cases
from ..scenarios.shapes import shapes
from ..scenarios.tiers import behaviour
from ..scenarios.turns import Turn

if TYPE_CHECKING:
    from draftmark.batch import ForwardBatch

    from ..scenarios.rig import Rig
    from ..subject import Subject

ALSO = ("target-window", "draft-chain")
"""Shapes beside those that every check takes."""


def _turns() -> list[Case]:
    return turn_cases(*ALSO, few=True)


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(cases=_turns, bugs=("vllm#53821", "ROCm/ATOM#2267", "sglang#24743"))
def each_call_writes_its_own(subject: Subject, turn: Turn) -> None:
    """plan and write_metadata write the arena only, write_kv the cache, attend its rows of out."""
    from ..scenarios.rig import Rig, place
    from ..scenarios.watch import Watch

    rig = Rig(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    batch = rig.load(turn)
    q, k, v, out = rig.stage.rows(turn)
    watch = Watch(rig, turn, batch)
    calls: dict[str, Callable[[], None]] = {
        "plan": lambda: rig.backend.plan(batch),
        "write_metadata": lambda: rig.backend.write_metadata(batch),
    }
    if rig.kernels:
        calls["write_kv"] = lambda: rig.backend.write_kv(k, v, rig.stage.cache, batch)
        calls["attend"] = lambda: rig.backend.attend(q, rig.stage.cache, batch, out)
    allowed = {"write_kv": ("cache.k", "cache.v"), "attend": ("out",)}
    for name, call in calls.items():
        call()
        watch.unchanged_but(allowed.get(name, ()), name)


@behaviour(cases=_turns, bugs=("sglang#29413", "sglang#3987", "vllm#55404"))
def plan_reads_no_device_memory(subject: Subject, turn: Turn) -> None:
    """plan() takes numbers from the host's view of the batch, never from its tensors."""
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, turn.geometry, 1)
    turn = place(rig, turn)
    batch = rig.stage.set(turn, rig.host)
    _no_host_reads(rig, turn, batch, "plan()", lambda: rig.backend.plan(batch))


@behaviour(cases=_turns, bugs=("sglang#29413", "vllm#51171", "vllm#55404"))
def steps_read_no_device_memory(subject: Subject, turn: Turn) -> None:
    """write_metadata, write_kv and attend never wait for the device, in the modes that are not captured too."""
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    batch = rig.load(turn)
    rig.backend.plan(batch)

    def step() -> None:
        rig.backend.write_metadata(batch)
        if rig.kernels:
            rig.layer(turn, batch)

    _no_host_reads(rig, turn, batch, "a step", step)


@behaviour(cases=_turns, bugs=("sglang#27193", "sglang#21987", "sglang#34286"))
def plan_does_not_depend_on_device_memory(subject: Subject, turn: Turn) -> None:
    """The device may still be busy with the round before: what plan() would find in the batch's tensors is stale."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    batch = rig.load(turn)
    rig.stage.empty()
    rig.backend.plan(batch)
    batch = rig.load(turn)
    expected = rig.expected(turn)
    rig.backend.write_metadata(batch)
    rig.layer(turn, batch)
    verify.padding(turn, verify.metadata(rig, turn, batch))
    verify.stored(rig, turn, expected)
    verify.output(turn, expected, rig.stage.rows(turn)[3], "the output of a batch that reached the device after plan()")


@behaviour(cases=_geometries, bugs=("sglang#27664", "rtp-llm#1259", "TRT-LLM#16290"))
def nothing_is_kept_or_moved(subject: Subject, geometry: Geometry) -> None:
    """The backend holds what open_backend gave it, and no more after forwards of every kind; no buffer moves."""
    from ..check import ContractViolation
    from ..scenarios.held import held_storages
    from ..scenarios.rig import Rig, place, pool_pages

    rig = Rig(subject, geometry, pool_pages(geometry))
    turns = [place(rig, turn) for turn in spanning(geometry)]
    before = held_storages(rig.backend)
    addresses = rig.arena.addresses()
    for turn in (*turns, *turns[::-1]):
        rig.run(turn, rig.load(turn))
        fresh = sorted(name for address, name in held_storages(rig.backend).items() if address not in before)
        if fresh or rig.arena.addresses() != addresses:
            raise ContractViolation(
                "the backend holds memory that it did not hold when it was opened",
                batch=turn,
                got=fresh or "moved arena buffers",
                expected="arena buffers, and what open_backend made",
                formula="a captured graph would keep the old address; draftmark.backend.AttentionBackend",
                bug="sglang#27664, rtp-llm#1259",
                remedy="declare the memory in buffers(), or make it in open_backend()",
            )


@behaviour(cases=_turns, bugs=("sglang#32062", "flashinfer#3582"))
def metadata_serves_every_layer(subject: Subject, turn: Turn) -> None:
    """One write_metadata serves several layers, each with its own cache and rows."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    batch = rig.load(turn)
    rig.prepare(batch)
    for layer in range(2):
        rig.stage.fill_rows(turn, seed=7 + layer)
        rig.stage.fill_cache(turn, seed=7 + layer)
        expected = rig.expected(turn)
        rig.layer(turn, batch)
        verify.stored(rig, turn, expected)
        verify.output(turn, expected, rig.stage.rows(turn)[3], f"layer {layer}'s output")
        verify.guards(rig, turn)


def _no_host_reads(rig: Rig, turn: Turn, batch: ForwardBatch, what: str, call: Callable[[], None]) -> None:
    """Run `call`; it may read no tensor of the batch, the rows or the arena on the host."""
    from ..check import ContractViolation
    from ..scenarios.hostreads import host_reads
    from ..scenarios.watch import batch_tensors

    device = [rig.arena[spec.name] for spec in rig.arena.specs if spec.memory.value == "device"]
    with host_reads([*batch_tensors(batch).values(), *device, *rig.stage.rows(turn)[:3]]) as reads:
        call()
    if reads:
        raise ContractViolation(
            f"{what} reads device memory on the host",
            batch=turn,
            got=", ".join(reads),
            expected="device work alone; numbers come from batch.host, q_lens and tail_lens",
            formula="draftmark.backend.AttentionBackend",
            bug="sglang#29413, vllm#51171",
        )
