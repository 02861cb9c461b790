"""A geometry from an engine's plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from draftmark import (
    AttentionShape,
    BackendRefusal,
    DeviceProfile,
    DraftShape,
    Form,
    Geometry,
    GeometryError,
    Limits,
    LoadedBackend,
    Mode,
)

from .errors import EngineError


@dataclass(frozen=True)
class EngineLimits:
    """What an engine promises never to exceed, in its own terms.

    Attributes:
        max_num_reqs: requests of one step, those of the largest captured batch included.
        max_model_len: KV positions that a request ever has, drafts included: an engine trims them at this wall.
        max_num_tokens: query rows of one step, padding included.
        num_draft_tokens: rows that a verify step brings of each request, its root included; 1 without drafts.
        branches: of a tree of drafts; 1 where drafts are chains.
        host_lag: the host may know only bounds of the lengths (asynchronous scheduling).
        row_budgets: rows of the steps in which the device decides how many each request has.
    """

    max_num_reqs: int
    max_model_len: int
    max_num_tokens: int
    num_draft_tokens: int = 1
    host_lag: bool = False
    row_budgets: tuple[int, ...] = ()
    branches: int = 1


def window_left(sliding_window: int | None) -> int:
    """Return positions visible to the left of a row, of a model's window, which counts the row itself; -1 for all."""
    return -1 if sliding_window is None or sliding_window <= 0 else sliding_window - 1


def geometry_for(
    backend: LoadedBackend,
    attention: AttentionShape,
    limits: EngineLimits,
    device: DeviceProfile,
    modes: tuple[Mode, ...],
    forms: tuple[Form, ...],
) -> Geometry:
    """Build the geometry of one attention shape of an engine, and ask the backend whether it serves it.

    Args:
        modes: what the engine runs; RAGGED_VERIFY is left out where the backend does not claim it.
        forms: what its batches bring of their own.

    Raises:
        EngineError: a number is out of range, or the backend does not serve the geometry; with its reasons.
    """
    served = tuple(mode for mode in modes if mode is not Mode.RAGGED_VERIFY or mode in backend.info.modes)
    try:
        geometry = Geometry.create(
            attention,
            Limits(
                max_num_reqs=limits.max_num_reqs,
                max_context_len=limits.max_model_len,
                max_extend_tokens=limits.max_num_tokens,
                overshoot=False,
                host_lag=limits.host_lag,
                row_budgets=limits.row_budgets if Mode.RAGGED_VERIFY in served else (),
                max_kv_len=limits.max_model_len,
            ),
            DraftShape(topk=limits.branches, num_draft_tokens=limits.num_draft_tokens),
            device,
            served,
            forms,
        )
        backend.require(geometry)
    except (GeometryError, BackendRefusal) as error:
        raise EngineError(str(error)) from error
    return geometry
