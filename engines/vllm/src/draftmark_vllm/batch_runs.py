"""Split of a vLLM batch into runs. A run is a range of consecutive requests that one mode serves. Integers only.

Two runs cover any batch. The first has the leading decodes and verifies, up to the first request with more rows. The
second is EXTEND, which serves any number of rows. `joined_run` makes one EXTEND run of both where that is faster.

Runner V2 sorts decodes and verifies to the front by itself. Runner V1 does so only for a builder with a
`reorder_batch_threshold`. That costs 60 to 180 µs of host time in every step, and most steps have no prompt. So
`builder` sets the threshold only for trees. Otherwise a decode after a prompt belongs to the second run, where its
attention takes up to an eighth longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import sub

from draftmark import Geometry, Mode
from draftmark_engines import EngineError

ROW_TILE = 128
"""Packed rows (rows times query heads of a KV head) that one CTA attends at a time in EXTEND."""
SHORT_KEYS = 16384
"""KV tokens of a request that one CTA reads in about the time that the host needs for the launches of two runs."""
CACHE_SIZE = 1024
"""Number of steps with a cached split. Steps with the same row counts recur often."""


@dataclass(slots=True)  # not frozen: a frozen object takes twice as long to create, in every step with a prompt
class BatchRun:
    """Describes a run: consecutive requests of one step that are served in one mode. Fields must not be reassigned.

    Attributes:
        mode: DECODE, VERIFY, RAGGED_VERIFY, DRAFT_BLOCK or EXTEND.
        first_req: index of the run's first request in the step.
        first_row: index of the run's first row in the step.
        num_reqs: number of live requests.
        q_lens: rows of each request, padding requests last. In a uniform mode padding requests have equal rows too.
            Bounds if the device decides the rows.
        budget: query rows if the device decides each request's rows; None if `q_lens` are exact.
    """

    mode: Mode
    first_req: int
    first_row: int
    num_reqs: int
    q_lens: tuple[int, ...]
    budget: int | None = None

    @property
    def padded_reqs(self) -> int:
        """Number of requests, padding requests included."""
        return len(self.q_lens)

    @property
    def num_rows(self) -> int:
        """Number of query rows, padding included."""
        return sum(self.q_lens) if self.budget is None else self.budget


@lru_cache(CACHE_SIZE)
def split_decodes_prefills(
    query_start: tuple[int, ...], num_rows: int, verify_rows: int, ragged: bool
) -> tuple[BatchRun, ...]:
    """Split a step into runs of consecutive requests, each served in one mode.

    A step that replays a full graph is padded. vLLM gives a padding request no rows in `query_start`, but the graph was
    captured with `num_rows` rows, equal for every request. The returned run has rows for its padding requests.

    Args:
        query_start: first row of each request, then the end of the last. Padding requests repeat the end.
        num_rows: rows of the step, padding included.
        verify_rows: rows of a request in a verify step; 1 without drafts.
        ragged: whether the backend serves RAGGED_VERIFY.

    Returns:
        One or two runs; none if no request has a row.
    """
    lens, live, leading = _decodes_first(query_start, verify_rows)
    rows = set(lens[:leading])
    if leading and rows in ({1}, {verify_rows}):
        (each,) = rows
        padded = len(lens) if leading == live and len(lens) * each == num_rows else leading
        head = BatchRun(Mode.DECODE if each == 1 else Mode.VERIFY, 0, 0, leading, (each,) * padded)
    elif leading and ragged:
        head = BatchRun(Mode.RAGGED_VERIFY, 0, 0, leading, tuple(lens[:leading]))
    else:
        leading = next((n for n, count in enumerate(lens[:live]) if count != 1), live)
        head = BatchRun(Mode.DECODE, 0, 0, leading, (1,) * leading)
    return tuple([run for run in (head, _extend(query_start, lens[leading:live], leading)) if run.num_reqs])


@lru_cache(CACHE_SIZE)
def split_adaptive(query_start: tuple[int, ...], num_rows: int, verify_rows: int) -> tuple[BatchRun, ...]:
    """Split a step in which the device decides the rows of each verify (vLLM's adaptive verification).

    The host knows the verifies' rows in sum, but spreads them evenly. vLLM puts decodes and verifies before prompts,
    and the rows of prompts are exact. Every request of the first run gets the bound `verify_rows`, in captured steps
    too.

    Args:
        query_start, num_rows, verify_rows: as in `split_decodes_prefills`.
    """
    lens, live, leading = _decodes_first(query_start, verify_rows)
    # Without prompts the step may replay a full graph, captured with all its requests and rows.
    reqs, rows = (len(lens), num_rows) if leading == live else (leading, query_start[leading])
    head = BatchRun(Mode.RAGGED_VERIFY, 0, 0, leading, (verify_rows,) * reqs, rows)
    return tuple([run for run in (head, _extend(query_start, lens[leading:live], leading)) if run.num_reqs])


def _decodes_first(query_start: tuple[int, ...], verify_rows: int) -> tuple[list[int], int, int]:
    """Return each request's rows, the number of requests without the padding ones, and the leading decodes' number.

    A request of at most `verify_rows` rows is a decode or a verify. A padding request has no rows and stands last.
    """
    lens = list(map(sub, query_start[1:], query_start))
    live = len(lens)
    while live and not lens[live - 1]:
        live -= 1
    leading = 0
    while leading < live and lens[leading] <= verify_rows:
        leading += 1
    return lens, live, leading


def _extend(query_start: tuple[int, ...], lens: list[int], first_req: int) -> BatchRun:
    """Return the run of all requests from `first_req`, of `lens` rows each; it may be empty."""
    return BatchRun(Mode.EXTEND, first_req, query_start[first_req], len(lens), tuple(lens))


@lru_cache(CACHE_SIZE)
def block_run(query_start: tuple[int, ...], num_rows: int, block: int) -> BatchRun | None:
    """Return the run of a block drafter's step, in which each live request has `block` rows; None without requests.

    Args:
        query_start, num_rows: as in `split_decodes_prefills`.

    Raises:
        EngineError: a request has another number of rows.
    """
    lens = [after - before for before, after in pairwise(query_start)]
    live = next((n for n, rows in enumerate(lens) if not rows), len(lens))
    if any(rows != block for rows in lens[:live]) or any(lens[live:]):
        served = f"only blocks of {block} rows" if block else "which is not served; use another backend of vLLM"
        raise EngineError(f"a step with requests of {lens} rows has attention that is not causal, {served}")
    padded = len(lens) if len(lens) * block == num_rows else live
    return BatchRun(Mode.DRAFT_BLOCK, 0, 0, live, (block,) * padded) if live else None


def joined_run(
    query_start: tuple[int, ...], verify_rows: int, ragged: bool, kv_lens: tuple[int, ...], geometry: Geometry
) -> BatchRun | None:
    """Return one EXTEND run in place of two, unless one long request could take as long as all others together.

    A joined run takes half of the launches, for which an eager layer waits, and its decodes load keys while its prompts
    compute. But EXTEND can leave all keys of a request and KV head to one CTA, while decodes split them evenly. So a
    request of more than SHORT_KEYS tokens must not exceed half of a CTA's even share of all keys that row tiles read.

    A step with prompts seldom recurs, and requests wait while the host prepares it. So this function works on plain
    integers, without splitting the step into runs and without a cache.

    Args:
        query_start, verify_rows, ragged: as in `split_decodes_prefills`.
        kv_lens: upper bounds of the requests' KV tokens, including the rows of this step.
        geometry: geometry for EXTEND.

    Returns:
        The run; None if the step needs no EXTEND run, or if two runs are better.
    """
    lens = tuple(map(sub, query_start[1:], query_start))
    while lens and not lens[-1]:
        lens = lens[:-1]
    if not lens or (max(lens) <= verify_rows and (ragged or set(lens) in ({1}, {verify_rows}))):
        return None
    longest = max(kv_lens[: len(lens)])
    if longest > SHORT_KEYS:
        group = geometry.attention.group_size
        keys = sum([-(-count * group // ROW_TILE) * n for count, n in zip(lens, kv_lens, strict=False)])
        if 2 * longest * geometry.device.num_sms > keys * geometry.attention.num_kv_heads:
            return None
    return BatchRun(Mode.EXTEND, 0, 0, len(lens), lens)
