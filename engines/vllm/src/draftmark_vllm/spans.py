"""A batch of vLLM's, cut into runs of requests that one mode serves. Integers only.

Two runs cover any batch: requests that bring few rows, decodes and verifies, up to the first that brings more, then
EXTEND, which serves any number of rows. Runner V2 sorts those of few rows to the front by itself. Runner V1 would for a
builder with a `reorder_batch_threshold`, which costs its host 60 to 180 µs of every step, sorted or not, and most steps
have no prompt: so one asks for it only with trees (`builder`), and else a decode behind a prompt is of the second run,
where its attention takes up to an eighth longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from draftmark import Mode

REMEMBERED = 1024
"""Steps whose cut is kept: those in which each request has as many rows come again and again."""


@dataclass(frozen=True)
class Span:
    """Consecutive requests of one step, served in one mode.

    Attributes:
        mode: DECODE, VERIFY, RAGGED_VERIFY or EXTEND.
        first_req, first_row: where it starts in the step.
        num_reqs: live requests. padded_reqs: those that the launch has, of which the last may be padding.
        q_lens: rows of each of the padded_reqs; of padding in a uniform mode as many as of the others.
    """

    mode: Mode
    first_req: int
    first_row: int
    num_reqs: int
    q_lens: tuple[int, ...]

    @property
    def padded_reqs(self) -> int:
        """Requests, padding included."""
        return len(self.q_lens)

    @cached_property
    def num_rows(self) -> int:
        """Query rows, padding included."""
        return sum(self.q_lens)


@lru_cache(REMEMBERED)
def spans(query_start: tuple[int, ...], num_rows: int, verify_rows: int, ragged: bool) -> tuple[Span, ...]:
    """Cut a step.

    A step that replays a full graph is padded: vLLM gives a padding request no rows in `query_start`, but the graph
    was captured with `num_rows`, as many for each request. Its rows come back here.

    Args:
        query_start: first row of each request, and behind the last; of vLLM's padding requests the same again.
        num_rows: rows of the step, padding included.
        verify_rows: rows that a verify brings of each request, 1 without drafts.
        ragged: whether the backend serves RAGGED_VERIFY.

    Returns:
        One or two spans; none if no request has a row.
    """
    lens = [after - before for before, after in pairwise(query_start)]
    live = len(lens)
    while live and not lens[live - 1]:
        live -= 1
    few = next((n for n, rows in enumerate(lens[:live]) if rows > verify_rows), live)
    rows = set(lens[:few])
    if few and rows in ({1}, {verify_rows}):
        (each,) = rows
        padded = len(lens) if few == live and len(lens) * each == num_rows else few
        head = Span(Mode.DECODE if each == 1 else Mode.VERIFY, 0, 0, few, (each,) * padded)
    elif few and ragged:
        head = Span(Mode.RAGGED_VERIFY, 0, 0, few, tuple(lens[:few]))
    else:
        few = next((n for n, count in enumerate(lens[:live]) if count != 1), live)
        head = Span(Mode.DECODE, 0, 0, few, (1,) * few)
    tail = Span(Mode.EXTEND, few, query_start[few], live - few, tuple(lens[few:live])) if few < live else None
    return tuple([one for one in (head, tail) if one is not None and one.num_reqs])
