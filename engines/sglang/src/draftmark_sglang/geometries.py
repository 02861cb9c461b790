"""Geometries of a runner: one for each distinct shape of its layers, all with the same limits and draft shape."""

from __future__ import annotations

from draftmark import (
    AttentionShape,
    BackendRefusal,
    DeviceProfile,
    DraftShape,
    Geometry,
    GeometryError,
    HostLengthsNeed,
    Limits,
    LoadedBackend,
    Mode,
    StateGeometry,
    StateShape,
)
from draftmark_engines import EngineError

from .facts import RunnerFacts


def modes_of(facts: RunnerFacts) -> tuple[Mode, ...]:
    """Return the modes of a runner's own backend. Draft steps run in another container, `DraftSteps`."""
    if not facts.algorithm:
        return (Mode.EXTEND, Mode.DECODE)
    return (Mode.EXTEND, Mode.DECODE, Mode.DRAFT_EXTEND if facts.is_draft else Mode.VERIFY)


def geometry_of(
    loaded: LoadedBackend,
    shape: AttentionShape,
    facts: RunnerFacts,
    device: DeviceProfile,
    modes: tuple[Mode, ...],
    capture_batch_size: int = 0,
    state_interval: int = 0,
) -> Geometry:
    """Create the geometry of one shape, and check that the backend supports it.

    Args:
        capture_batch_size: requests of the largest CUDA graph; 0 until SGLang states it.
        state_interval: tokens between two checkpoints of recurrent state; 0 for none.

    Raises:
        EngineError: a number is out of range, or the backend does not support the geometry. The error lists reasons.
    """
    limits = _limits_of(facts, capture_batch_size, state_interval)
    try:
        geometry = Geometry.create(shape, limits, _drafts_of(facts), device, modes)
        loaded.require(geometry)
        if loaded.requirements(geometry).unique_slots:
            reason = "it needs a null page for each padding request, but SGLang has one null page"
            raise BackendRefusal(loaded.name, [reason])
    except (GeometryError, BackendRefusal) as error:
        raise EngineError(str(error)) from error
    return geometry


def state_geometry_of(
    loaded: LoadedBackend,
    shape: StateShape,
    facts: RunnerFacts,
    device: DeviceProfile,
    modes: tuple[Mode, ...],
    num_layers: int,
    state_interval: int,
    capture_batch_size: int = 0,
) -> StateGeometry:
    """Create the geometry of the recurrent layers, which share batches with the attention layers.

    Args:
        num_layers: recurrent layers of this rank.
        state_interval, capture_batch_size: see `geometry_of`.

    Raises:
        EngineError: a number is out of range, or the backend does not support the geometry. The error lists reasons.
    """
    limits = _limits_of(facts, capture_batch_size, state_interval)
    try:
        geometry = StateGeometry.create(shape, limits, _drafts_of(facts), device, modes, num_layers)
        loaded.require_state(geometry)
    except (GeometryError, BackendRefusal) as error:
        remedy = "DRAFTMARK_STATE_BACKEND=sglang leaves the recurrent layers to SGLang"
        raise EngineError(f"{error}; {remedy}") from error
    return geometry


def _limits_of(facts: RunnerFacts, capture_batch_size: int, state_interval: int) -> Limits:
    """Return the limits of all layers of a runner.

    A committed length can exceed the model's context length by one round's draft tokens (`overshoot`): SGLang launches
    a round before it reads the previous round's result. `host_lag` is False, because SGLang copies exact lengths to
    the host if a backend needs them.
    """
    return Limits(
        max_num_reqs=facts.max_num_reqs,
        max_context_len=facts.context_len,
        max_extend_tokens=facts.max_extend_tokens,
        capture_batch_sizes=(capture_batch_size,) if capture_batch_size else (),
        overshoot=True,
        host_lag=False,
        state_interval=state_interval,
    )


def _drafts_of(facts: RunnerFacts) -> DraftShape:
    """Return the draft shape. Trees of NGRAM branch too, although it has no topk: tails have a mask."""
    topk = max(facts.topk, 2) if facts.verifies_trees else facts.topk
    return DraftShape(topk, facts.num_steps, facts.num_draft_tokens)


def needs_host_lengths(loaded: LoadedBackend, geometries: list[Geometry]) -> bool:
    """Return True if SGLang must copy lengths to the host, which makes the host wait in every step."""
    needs = [loaded.requirements(geometry).host_lengths for geometry in geometries]
    return HostLengthsNeed.strongest(needs) is not HostLengthsNeed.NONE
