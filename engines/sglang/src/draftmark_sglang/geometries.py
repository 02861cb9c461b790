"""The geometries of a runner: one for each distinct shape of its layers, all with the same limits and draft shape."""

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
)
from draftmark_engines import EngineError

from .facts import RunnerFacts


def modes_of(facts: RunnerFacts) -> tuple[Mode, ...]:
    """What a runner's own backend is asked to run; the steps of a draft model have a container of their own."""
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
) -> Geometry:
    """Build the geometry of one shape, and ask the backend whether it serves it.

    A committed length may pass the model's context by a tail: a round is sent before the end of the last is seen, or
    commits more than the request may keep. The host may know exact lengths: SGLang gives them to a backend that asks.

    Args:
        capture_batch_size: requests of the largest CUDA graph, once SGLang has said so; 0 before.

    Raises:
        EngineError: a number is out of range, or the backend does not serve it; with its reasons.
    """
    limits = Limits(
        max_num_reqs=facts.max_num_reqs,
        max_context_len=facts.context_len,
        max_extend_tokens=facts.max_extend_tokens,
        capture_batch_sizes=(capture_batch_size,) if capture_batch_size else (),
        overshoot=True,
        host_lag=False,
    )
    drafts = DraftShape(facts.topk, facts.num_steps, facts.num_draft_tokens)
    try:
        geometry = Geometry.create(shape, limits, drafts, device, modes)
        loaded.require(geometry)
        if loaded.requirements(geometry).unique_slots:
            reason = "it needs a null page for each padded request, and SGLang has one"
            raise BackendRefusal(loaded.name, [reason])
    except (GeometryError, BackendRefusal) as error:
        raise EngineError(str(error)) from error
    return geometry


def needs_host_lengths(loaded: LoadedBackend, geometries: list[Geometry]) -> bool:
    """Whether SGLang must bring lengths to the host, which costs it a wait a step."""
    needs = [loaded.requirements(geometry).host_lengths for geometry in geometries]
    return HostLengthsNeed.strongest(needs) is not HostLengthsNeed.NONE
