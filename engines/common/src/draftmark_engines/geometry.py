"""Builds a `Geometry` from an engine's plain numbers."""

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
    """Holds the limits that an engine promises never to exceed, in the engine's own terms.

    Attributes:
        max_num_reqs: most requests of one step, padding requests of the largest captured batch included.
        max_model_len: most KV positions of a request, drafts included. An engine trims drafts at this length.
        max_num_tokens: most query rows of one step, padding included.
        num_draft_tokens: rows of a request in a verify step, root included; 1 without drafts.
        host_lag: whether the host may have only upper bounds of the lengths, as with asynchronous scheduling.
        row_budgets: total rows of steps in which the device decides the rows of each request.
        branches: branches of a draft tree; 1 for chains of drafts.
        block_size: rows of a request in a DRAFT_BLOCK step; 0 without a block drafter.
    """

    max_num_reqs: int
    max_model_len: int
    max_num_tokens: int
    num_draft_tokens: int = 1
    host_lag: bool = False
    row_budgets: tuple[int, ...] = ()
    branches: int = 1
    block_size: int = 0


def window_left(sliding_window: int | None) -> int:
    """Return the number of positions that a row sees to its left; -1 without a window. A window includes the row."""
    return -1 if sliding_window is None or sliding_window <= 0 else sliding_window - 1


def geometry_for(
    backend: LoadedBackend,
    attention: AttentionShape,
    limits: EngineLimits,
    device: DeviceProfile,
    modes: tuple[Mode, ...],
    forms: tuple[Form, ...],
) -> Geometry:
    """Build the geometry of an engine's attention shape, and check that the backend serves it.

    Args:
        modes: modes that the engine runs. RAGGED_VERIFY is dropped if the backend does not declare it.
        forms: engine-specific formats of batches and caches (`Form`) that the engine uses.

    Raises:
        EngineError: a number is out of range, or the backend refuses the geometry. The message has the reasons.
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
            DraftShape(topk=limits.branches, num_draft_tokens=limits.num_draft_tokens, block_size=limits.block_size),
            device,
            served,
            forms,
        )
        backend.require(geometry)
    except (GeometryError, BackendRefusal) as error:
        raise EngineError(str(error)) from error
    return geometry
