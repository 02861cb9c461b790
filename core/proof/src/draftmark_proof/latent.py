"""Theorems about latent layers, for any heads, row width, value width, requests, rows and SMs.

Each theorem compares sizes on symbols: the core's formulas by row, and the schedules of `sizing.latent_schedules` of a
batch with the size for the largest batch. The same claims with a schedule sized by requests only are false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark.geometry import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, ceil_div
from draftmark_contract.sizing import latent_schedules as schedules

from .prover import LONG, SHORT, Status, ask
from .solver import Answer, Solver
from .symbols import Context
from .theorems import Claim

BYTES = 2
"""Bytes of a bfloat16 number."""


class Batch:
    """Symbols of one batch and of the largest batch.

    Attributes:
        heads, value, rest: query heads of a rank, elements of a value, and of the rest of a row.
        page: tokens of a page.
        requests, rows: of this batch; rows are those of each request.
        max_requests, max_rows: of the largest batch.
        sms: number of SMs.
    """

    def __init__(self) -> None:
        self.context = Context()
        free: Callable[[str, int], Any] = self.context.variable
        self.heads, self.value, self.rest = free("H", 1), free("V", 1), free("rest", 0)
        self.page, self.sms = free("P", 1), free("SMs", 1)
        self.requests, self.rows = free("R", 1), free("q", 1)
        self.max_requests, self.max_rows = free("max_R", 1), free("max_q", 1)
        self.context.assume(self.requests <= self.max_requests)
        self.context.assume(self.rows <= self.max_rows)

    @property
    def packed(self) -> Any:
        """Packed rows of a request of this batch: rows · heads."""
        return self.rows * self.heads

    @property
    def max_packed(self) -> Any:
        """Packed rows of a request of the largest batch."""
        return self.max_rows * self.heads

    def geometry(self, latent: bool) -> Geometry:
        """Return a geometry of these symbols, with one KV head."""
        width = self.value + self.rest
        shape = AttentionShape(self.heads, 1, width, self.page, softmax_scale=1.0, value_dim=self.value, latent=latent)
        limits = Limits(self.max_requests, 1, 1)
        return Geometry(shape, DraftShape(num_draft_tokens=self.max_rows), limits, DeviceProfile("cuda", 90, self.sms))


Statement = Callable[[Batch], Any]
"""Goal about a batch: a condition on symbols."""


def _row_bytes(b: Batch) -> Any:
    latent, apart = b.geometry(True), b.geometry(False)
    row = (b.value + b.rest) * BYTES
    narrow = (b.value + b.rest + b.value) * BYTES
    pages = (latent.page_bytes == b.page * row) & (apart.page_bytes == b.page * narrow)
    return (latent.row_bytes == row) & (apart.row_bytes == narrow) & pages


def _staging(b: Batch) -> Any:
    """State that queries and outputs of a batch fit max_rows rows of query_width and output_width."""
    geometry = b.geometry(True)
    rows, most = b.requests * b.rows, b.max_requests * b.max_rows
    queries = rows * b.heads * (b.value + b.rest) <= most * geometry.query_width
    return queries & (rows * b.heads * b.value <= most * geometry.output_width)


def _flashmla_schedule(b: Batch) -> Any:
    """State that one row has the most parts: a schedule is sized by one row, not by the largest batch."""
    return schedules.flashmla_parts(b.packed, b.sms) <= schedules.flashmla_parts(b.heads, b.sms)


def _flashmla_partials(b: Batch) -> Any:
    needed = schedules.flashmla_partials(b.requests, b.packed, b.value, b.sms)
    return needed <= schedules.flashmla_partials_bound(b.max_requests, b.max_packed, b.value, b.sms)


def _flash_attention_3(b: Batch) -> Any:
    return schedules.flash_attention_3(b.requests) <= schedules.flash_attention_3_reserved(b.max_requests)


def _flashinfer(b: Batch) -> Any:
    works = schedules.flashinfer_works
    return works(b.requests, b.packed, b.sms) <= works(b.max_requests, b.max_packed, b.sms)


def _flashinfer_extend(b: Batch) -> Any:
    """State the bound for requests of equal rows, which stand for all by the per-request lemma of `domain`."""
    works = b.requests * ceil_div(b.packed, schedules.TILE) + b.sms
    return works <= schedules.flashinfer_extend_works(b.requests, b.requests * b.rows, b.heads, b.sms)


def _partials_of_one_row(b: Batch) -> Any:
    needed = schedules.flashmla_partials(b.requests, b.packed, b.value, b.sms)
    return needed <= schedules.flashmla_partials_bound(b.max_requests, b.heads, b.value, b.sms)


def _works_of_requests(b: Batch) -> Any:
    works = schedules.flashinfer_works
    return works(b.requests, b.packed, b.sms) <= works(b.max_requests, b.heads, b.sms)


def _schedule_of_the_largest(b: Batch) -> Any:
    return schedules.flashmla_parts(b.packed, b.sms) <= schedules.flashmla_parts(b.max_packed, b.sms)


THEOREMS: dict[str, Statement] = {
    "bytes of a row are its width times the dtype": _row_bytes,
    "queries and outputs fit their widths": _staging,
    "FlashMLA's schedule fits the parts of one row": _flashmla_schedule,
    "FlashMLA's partials fit rows times heads": _flashmla_partials,
    "FlashAttention 3's metadata fits vLLM's reservation": _flash_attention_3,
    "FlashInfer's works fit rows times heads": _flashinfer,
    "FlashInfer's works of a prefill fit its rows times heads": _flashinfer_extend,
}
"""Statements that hold for every batch."""
FALSE: dict[str, Statement] = {
    "FlashMLA's partials fit requests times heads": _partials_of_one_row,
    "FlashInfer's works fit requests times heads": _works_of_requests,
    "FlashMLA's schedule fits the parts of the largest batch": _schedule_of_the_largest,
}
"""Statements that some batch violates. Code that relies on the first two: sglang#11012, vllm#27368."""


def decide(statement: Callable[[Any], Any], batch: Any = None) -> tuple[Status, Answer]:
    """Prove a statement about every batch, or find a batch that violates it.

    Args:
        batch: object with a `context` and symbols; None for a `Batch`.

    Returns:
        PROVED, REFUTED with the batch in the answer's model, or UNDECIDED.
    """
    batch = Batch() if batch is None else batch
    goal = statement(batch)
    claim = Claim(batch.context, [], [*batch.context.obligations(), goal.term])
    with Solver() as solver:
        for encoding, hinted, effort in (("native", True, SHORT), ("skolem", True, LONG), ("native", False, SHORT)):
            answer = ask(claim, solver, encoding, hinted, effort)
            if answer.status == "unsat":
                return Status.PROVED, answer
            if answer.status == "sat":
                return Status.REFUTED, answer
    return Status.UNDECIDED, answer
