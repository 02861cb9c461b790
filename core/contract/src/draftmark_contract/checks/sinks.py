"""Checks of attention sinks: one logit per query head without a value, which every row counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.errors import BatchError
from draftmark.geometry import Geometry, Mode
from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour
from ..cases.contents import FAR_SINKS, NEEDLE, Contents
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.graph_rounds import LARGE, MODES, captured, programs_of, replays
from ..cases.production import few_requests
from ..cases.sinks import FEW, LENS, SINCE, crowded, far, gpt_oss, requests, shapes
from ..check import Case, ContractViolation

if TYPE_CHECKING:
    from draftmark.cache import KVCache

    from ..harness.harness import Harness
    from ..harness.layer_harness import LayerHarness


def _shapes() -> list[Case]:
    return [shape.case(requests(shape)) for shape in shapes()]


@behaviour(Fixture.FORWARDS, cases=_shapes, since=SINCE)
def take_their_share(harness: Harness, forwards: list[ForwardCase]) -> None:
    """In every mode each query head's sink adds once, unscaled, to the softmax denominator of its rows.

    A sink has no value vector.
    """
    import torch

    for forward in forwards:
        harness.assert_forward(forward, harness.load(forward, contents=Contents.USUAL))
        batch = harness.load(forward, contents=Contents.NEEDLES, seed=1)
        heads = torch.arange(forward.geometry.attention.num_qo_heads)
        harness.tensors.set_sinks(NEEDLE - 2.0 + heads % 5)
        harness.assert_forward(forward, batch, "with a key and a sink of one size the output")


def _far() -> list[Case]:
    return [shape.case(requests(shape)) for shape in far()]


@behaviour(Fixture.FORWARDS, cases=_far, since=SINCE)
def may_lie_far_from_all_logits(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Outputs are right for sinks of -inf, -1e4, -30, 30 and 1e4 next to logits of a few, of hundreds and of 1e5."""
    import torch

    heads = range(harness.geometry.attention.num_qo_heads)
    for seed, forward in enumerate(forwards):
        for number, contents in enumerate((Contents.USUAL, Contents.LARGE, Contents.LEVELS)):
            batch = harness.load(forward, contents=contents, seed=seed)
            harness.tensors.set_sinks(torch.tensor([FAR_SINKS[(h + number + seed) % len(FAR_SINKS)] for h in heads]))
            harness.assert_forward(forward, batch, f"with far sinks and {contents} contents the output")


@behaviour(Fixture.FORWARD, cases=crowded, since=SINCE)
def count_once_over_many_keys(harness: Harness, forward: ForwardCase) -> None:
    """Each row counts its sink once, also when split-KV divides its keys over several CTAs.

    The batch has 24 requests with up to 2,600 keys.
    """
    harness.arena.poison()
    harness.assert_forward(forward, harness.load(forward, contents=Contents.FLAT))


def _layers() -> list[Case]:
    layers = gpt_oss()
    found = []
    for mode in FEW:
        if mode is Mode.EXTEND:
            forwards = [ragged(f"sinks-{i}", layers[0], LENS, (3, 5), seed=i) for i in range(2)]
        else:
            forwards = [uniform(f"sinks-{i}", layers[0], mode, LENS, 2, seed=i) for i in range(2)]
        found.append(Case(f"gpt-oss-{mode.value}", (layers, forwards), SINCE))
    return found


@behaviour(Fixture.LAYERS, cases=_layers, since=SINCE)
def are_each_layers_own(layers: LayerHarness, forwards: list[ForwardCase]) -> None:
    """Each layer uses its own sinks, where layers with and without a window alternate and values change per forward."""
    for number, forward in enumerate(forwards):
        batch, expected = layers.load(forward, seed=number)
        layers.plan(batch)
        layers.step(forward, batch)
        layers.assert_layers(forward, batch, expected, f"in forward {number}")


def _captured() -> list[Case]:
    """Return cases with layers of one shape in every program, and of both shapes in VERIFY, the mode with most rows."""
    window, full = gpt_oss()
    models = [("rank", (full,), program) for program in programs_of(full)]
    found = []
    for name, layers, program in [*models, ("gpt-oss", (window, full), Program.VERIFY)]:
        size = layers[0].limits.capture_batch_sizes[-1]
        rounds = [replays(layers[0], program)[which][1] for which in LARGE]
        forwards = [captured(layers[0], program, size), *(one for one in rounds if len(one.requests) == size)]
        found.append(Case(f"{name}-{program.value}", (layers, forwards), SINCE))
    return found


@behaviour(Fixture.LAYERS, cases=_captured, since=SINCE)
def are_read_at_every_replay(layers: LayerHarness, forwards: list[ForwardCase]) -> None:
    """A replay uses the sink values that are in each layer's memory at replay time, not the values at capture."""
    first, *later = forwards
    program = next(program for program, mode in MODES.items() if mode is first.mode)
    key = GraphKey(program, len(first.requests))
    batch, _ = layers.load(first, host=layers.capture_host)
    layers.capture(key, first, batch)
    for number, forward in enumerate(later, 1):
        batch, expected = layers.load(forward, seed=number)
        layers.replay(key, batch)
        layers.assert_layers(forward, batch, expected, f"in replay {number}")


def _pairs() -> Sequence[Case]:
    """Return forwards in pairs: one with a geometry that has sinks, and one with the same geometry without sinks."""
    with_sinks = gpt_oss()[1]
    without: Geometry = replace(with_sinks, attention=replace(with_sinks.attention, sinks=False))
    forwards = [one for one in few_requests(with_sinks, LENS) if one.mode in FEW]
    return [Case(one.mode.value, [one, replace(one, geometry=without)], SINCE) for one in forwards]


@behaviour(Fixture.SUBJECT, cases=_pairs, since=SINCE)
def that_do_not_fit_are_refused(subject: object, forwards: list[ForwardCase]) -> None:
    """attend() raises BatchError for missing sinks, a wrong number of sinks, and sinks of a layer that has none."""
    import torch

    from ..harness.harness import Harness

    with_sinks, without = (Harness(subject, one.geometry, one.num_pages) for one in forwards)  # type: ignore[arg-type]
    heads = forwards[0].geometry.attention.num_qo_heads
    for harness, forward, count in (
        (with_sinks, forwards[0], None),
        (with_sinks, forwards[0], heads // 2),
        (without, forwards[1], heads),
    ):
        forward = harness.place(forward)
        batch, whole = harness.load(forward), harness.tensors.cache
        given = None if count is None else torch.zeros(count, device=whole.k.device)
        _refuses(harness, forward, batch, replace(whole, sinks=given))


def _refuses(harness: Harness, forward: ForwardCase, batch: object, cache: KVCache) -> None:
    """Prepare a forward and store its rows, then check that attend() raises BatchError for this cache."""
    harness.prepare(batch)  # type: ignore[arg-type]
    if not harness.kernels:
        harness.subject.interpreted()
        return
    q, k, v, out = harness.tensors.rows(forward)
    harness.backend.write_kv(k, v, cache, batch)  # type: ignore[arg-type]
    harness.subject.attended = True
    given = "no sinks" if cache.sinks is None else f"{cache.sinks.shape[0]} sinks"
    try:
        harness.backend.attend(q, cache, batch, out)  # type: ignore[arg-type]
    except BatchError:
        return
    raise ContractViolation(
        f"attend() accepts {given} for a layer of {harness.geometry.attention.num_qo_heads} query heads "
        f"{'with' if harness.geometry.attention.sinks else 'without'} sinks",
        batch=forward,
        got="an output that ignores or miscounts the sinks",
        expected="BatchError",
        formula="draftmark.runtime.sinks_of(cache, geometry)",
        remedy="call sinks_of in attend(), which checks the sinks",
    )
