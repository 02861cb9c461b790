"""Checks of side effects: each call writes only its own outputs, and the backend keeps and moves no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import forward_cases, spanning_forwards
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..check import Case, ContractViolation

if TYPE_CHECKING:
    from draftmark.batch import ForwardBatch

    from ..harness.harness import Harness

ALSO = ("target-window", "draft-chain", "all-kv8", "all-fp32")
"""Shapes that these checks run in addition to the shapes that every check runs."""


def _forwards() -> list[Case]:
    return forward_cases(*ALSO, few=True)


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(Fixture.FORWARD, cases=_forwards, bugs=("vllm#53821", "ROCm/ATOM#2267", "sglang#24743"))
def each_call_writes_its_own(harness: Harness, forward: ForwardCase) -> None:
    """`plan` and `write_metadata` write only the arena, `write_kv` only the cache, `attend` only its rows of out."""
    batch = harness.load(forward)
    calls = harness.calls(forward, batch)
    watch = harness.watch(forward, batch)
    written = {"write_kv": ("cache.k", "cache.v"), "attend": ("out",)}
    for name, call in calls.items():
        call()
        watch.assert_unchanged_except(written.get(name, ()), name)


@behaviour(Fixture.METADATA, cases=_forwards, bugs=("sglang#29413", "sglang#3987", "vllm#55404"))
def plan_reads_no_device_memory(harness: Harness, forward: ForwardCase) -> None:
    """plan() uses the host's numbers of the batch and reads no tensor of the batch on the host."""
    batch = harness.set(forward)
    _assert_no_host_reads(harness, forward, batch, "plan()", lambda: harness.backend.plan(batch))


@behaviour(Fixture.FORWARD, cases=_forwards, bugs=("sglang#29413", "vllm#51171", "vllm#55404"))
def steps_read_no_device_memory(harness: Harness, forward: ForwardCase) -> None:
    """write_metadata, write_kv and attend never wait for the device, also in modes that are not captured."""
    batch = harness.load(forward)
    harness.backend.plan(batch)

    def step() -> None:
        harness.backend.write_metadata(batch)
        if harness.kernels:
            harness.layer(forward, batch)

    _assert_no_host_reads(harness, forward, batch, "a step", step)


@behaviour(Fixture.FORWARD, cases=_forwards, bugs=("sglang#27193", "sglang#21987", "sglang#34286"))
def plan_does_not_depend_on_device_memory(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right when the batch's tensors still contain stale data during plan().

    The device may still run the previous round at that time.
    """
    batch = harness.load(forward)
    harness.tensors.empty()
    harness.backend.plan(batch)
    batch = harness.load(forward)
    expected = harness.expected(forward)
    harness.backend.write_metadata(batch)
    harness.layer(forward, batch)
    harness.assert_step(forward, batch, expected, "the output of a batch that reached the device after plan()")


@behaviour(Fixture.GEOMETRY, cases=_geometries, bugs=("sglang#27664", "rtp-llm#1259", "TRT-LLM#16290"))
def nothing_is_kept_or_moved(harness: Harness, geometry: Geometry) -> None:
    """Forwards of every kind leave the backend with the memory that it had after open_backend, and move no buffer."""
    forwards = [harness.place(forward) for forward in spanning_forwards(geometry)]
    harness.assert_keeps_nothing(forwards, "open_backend", "buffers", "draftmark.backend.AttentionBackend")


@behaviour(Fixture.FORWARD, cases=_forwards, bugs=("sglang#32062", "flashinfer#3582"))
def metadata_serves_every_layer(harness: Harness, forward: ForwardCase) -> None:
    """One call of write_metadata serves several layers, each with its own cache and rows."""
    batch = harness.load(forward)
    harness.prepare(batch)
    for layer in range(2):
        harness.tensors.fill_rows(forward, seed=7 + layer)
        harness.tensors.fill_cache(forward, seed=7 + layer)
        expected = harness.expected(forward)
        harness.layer(forward, batch)
        harness.assert_cache(forward, expected)
        harness.assert_output(forward, expected, f"layer {layer}'s output")
        harness.assert_guards(forward)


def _assert_no_host_reads(
    harness: Harness, forward: ForwardCase, batch: ForwardBatch, what: str, call: Callable[[], None]
) -> None:
    """Run `call`, and check that the host reads no tensor of the batch, the rows or the arena meanwhile."""
    reads = harness.host_reads(forward, batch, call)
    if reads:
        raise ContractViolation(
            f"{what} reads device memory on the host",
            batch=forward,
            got=", ".join(reads),
            expected="device work only; numbers come from batch.host, q_lens and tail_lens",
            formula="draftmark.backend.AttentionBackend",
            bug="sglang#29413, vllm#51171",
        )
