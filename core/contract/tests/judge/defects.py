"""Wrong backends: subclasses of `PagedDriver` with one defect each, and the rule that must find the defect."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftmark_contract.judge.step import Step

from .paged import Metadata, PagedDriver, _bits


class StaleReplay(PagedDriver):
    """Defect: the lengths are copied to a new tensor at capture, so every replay reads the lengths of the capture."""

    def capture(self, rows_each: int, requests: int) -> Metadata:
        meta = super().capture(rows_each, requests)
        return replace(meta, lens=meta.lens.clone())


class StaleTable(PagedDriver):
    """Defect: each captured batch size keeps the page table of its first replay."""

    def capture(self, rows_each: int, requests: int) -> Metadata:
        meta = super().capture(rows_each, requests)
        return replace(meta, table=meta.table.clone())


class StoresMinusOne(PagedDriver):
    """Defect: slot -1 ("do not store") is used as an index, so the last slot of the pool is overwritten."""

    def store(self, meta: Metadata, k: torch.Tensor, v: torch.Tensor) -> None:
        for pool, rows, scale in zip((self.k, self.v), (k, v), self.scales, strict=True):
            _bits(pool)[meta.slots] = _bits((rows.float() / scale).to(pool.dtype))


class StoresPaddingAtZero(PagedDriver):
    """Defect: slot -1 ("do not store") is clamped to slot 0, so slot 0 is overwritten."""

    def store(self, meta: Metadata, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(replace(meta, slots=meta.slots.clamp(min=0)), k, v)


class WindowOffByOne(PagedDriver):
    """Defect: the sliding window counts the query's own token, so it is one key too short."""

    def visible(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = super().visible(at, key)
        return seen & (key > at - self.a.window_left) if self.a.window_left > 0 else seen


class NoCap(PagedDriver):
    """Defect: the soft cap of the logits is ignored."""

    cap = 0.0


class NoValueScale(PagedDriver):
    """Defect: the scale of fp8 V is not applied when V is read."""

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        kept, self.scales = self.scales, (self.scales[0], 1.0)
        found = super().attend(q, number, meta)
        self.scales = kept
        return found


class DefaultScale(PagedDriver):
    """Defect: the layer's softmax_scale is ignored, and the default head_dim ** -0.5 is used."""

    @property
    def scale(self) -> float:
        return self.a.head_dim**-0.5


class ReadsTheBound(PagedDriver):
    """Defect: the kernel reads KV up to the host's upper bound of the lengths, instead of the exact lengths."""

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        loose = replace(meta, lens=meta.lens.clone())
        loose.lens[number] = (
            max(meta.longest, int(meta.lens[number])) if meta.longest < self.wall else meta.lens[number]
        )
        out = super().attend(torch.cat([q, q[:1]]), number, loose) if meta.longest > int(meta.lens.max()) else None
        return super().attend(q, number, meta) if out is None else out[: len(q)]


class NotCausal(PagedDriver):
    """Defect: every row of a step sees all rows of its request."""

    def visible(self, at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return super().visible(at.max().expand_as(at), key)


class KeepsLongest(PagedDriver):
    """Defect: lengths of a batch row never shrink, so a shorter request is read up to the longest earlier length."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.held = torch.zeros(self.reqs, dtype=torch.int64)

    def build(self, step: Step, padded: int, rows: int) -> Metadata:
        meta = super().build(step, padded, rows)
        self.held = torch.maximum(self.held, self.lens)
        count = len(step.forward.requests)
        self.lens[:count] = torch.where(self.held[:count] > 100, self.held[:count], self.lens[:count])
        return meta


class WrongGroup(PagedDriver):
    """Defect: query heads use the KV heads in round-robin order instead of group by group."""

    def attend(self, q: torch.Tensor, number: int, meta: Metadata) -> torch.Tensor:
        heads, kv = self.a.num_qo_heads, self.a.num_kv_heads
        order = torch.arange(heads).view(kv, -1).t().flatten()
        return super().attend(q[:, order.argsort()], number, meta)[:, order]


class DropsAPage(PagedDriver):
    """Defect: keys after a request's eighth page are read from the first slot."""

    def slots_of(self, number: int, length: int, meta: Metadata) -> torch.Tensor:
        slots = super().slots_of(number, length, meta)
        size = self.a.page_size
        return torch.where(torch.arange(length) // size >= 8, slots[0], slots) if length > 8 * size else slots


class ChangesItsQuery(PagedDriver):
    """Defect: the query is scaled in place."""

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().layer(meta, q, k, v)
        q.mul_(0.5)
        return out


class Random(PagedDriver):
    """Defect: the output differs in its last bits from one run to the next."""

    turn = 0

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        Random.turn += 1
        return super().layer(meta, q, k, v) * (1 + 2.0**-20 * (Random.turn % 2))


class PaddingPoisons(PagedDriver):
    """Defect: padding rows take part in a reduction over the batch, so a NaN in padding reaches live rows."""

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().layer(meta, q, k, v) + 0 * q.sum()


class NeedsContiguousRows(PagedDriver):
    """Defect: k is read as if its rows were contiguous."""

    def store(self, meta: Metadata, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(meta, torch.as_strided(k, k.shape, torch.empty(k.shape).stride()), v)


class KeepsAnAddress(PagedDriver):
    """Defect: the backend keeps the address of the first query tensor and reads it in every later step."""

    kept: torch.Tensor | None = None

    def layer(self, meta: Metadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.shape != q.shape:
            self.kept = q
        return super().layer(meta, self.kept, k, v)


class SmallestGraphWins(PagedDriver):
    """Defect: each capture allocates new buffers, and replays fill only these, so earlier graphs read old values."""

    def capture(self, rows_each: int, requests: int) -> Metadata:
        self.slots, self.lens = self.slots.clone(), self.lens.clone()
        return super().capture(rows_each, requests)


class WritesTheNextSlot(PagedDriver):
    """Defect: row 16 of a step is stored one slot too far."""

    def store(self, meta: Metadata, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = meta.slots.clone()
        if len(slots) > 16 and int(slots[16]) >= 0:
            slots[16] += 1
        super().store(replace(meta, slots=slots), k, v)


DEFECTS: dict[type[PagedDriver], tuple[str, str]] = {
    StaleReplay: ("graphs.replay_equals_eager", "fp32-decode"),
    StaleTable: ("graphs.captured_run_is_right", "fp32-decode"),
    SmallestGraphWins: ("graphs.programs_do_not_disturb_each_other", "fp32"),
    StoresMinusOne: ("padding.changes_no_live_byte", "fp32-decode-surplus1"),
    StoresPaddingAtZero: ("engine.forms_are_taken_as_they_are", "fp32-decode"),
    WindowOffByOne: ("numerics.serve_what_is_not_refused", "window15"),
    NoCap: ("numerics.serve_what_is_not_refused", "cap0.5"),
    NoValueScale: ("numerics.serve_what_is_not_refused", "kv8"),
    DefaultScale: ("numerics.serve_what_is_not_refused", "scale1"),
    ReadsTheBound: ("lengths.of_any_kind_give_one_result", "fp32-decode"),
    NotCausal: ("numerics.match_float64", "fp32-gqa4-64-verify"),
    WrongGroup: ("numerics.match_float64", "fp32-gqa4-64-decode"),
    DropsAPage: ("production.a_crowd_is_right", "crowd-decode"),
    KeepsLongest: ("history.equals_a_fresh_state", "fp32"),
    ChangesItsQuery: ("purity.each_call_writes_its_own", "extend-fresh"),
    Random: ("repeats.give_the_same_bits", "decode"),
    PaddingPoisons: ("padding.changes_no_live_byte", "fp32-chunk-surplus37"),
    NeedsContiguousRows: ("inputs.may_be_views_of_one_projection", "decode"),
    KeepsAnAddress: ("inputs.may_lie_elsewhere_each_time", "decode"),
    WritesTheNextSlot: ("random_history.equals_the_oracle", "fp32-0"),
}
"""Each defect with the rule and the case that find it."""
