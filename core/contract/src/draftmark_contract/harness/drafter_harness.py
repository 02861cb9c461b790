"""Runs a target and a drafter over one KV, and names what a wrong drafter reads differently from its target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..backend_under_test import BackendUnderTest
from ..cases.drafters import Rounds
from ..cases.forwards import ForwardCase
from ..check import ContractViolation
from ..oracle import attention
from ..oracle.attention import tolerance
from ..oracle.history import Request, chain
from ..oracle.truth import enumerate_truth
from .harness import Harness
from .pools import at_slots, raw

Pools = tuple[torch.Tensor, torch.Tensor]


class DrafterHarness:
    """Opens a backend for a target and for a drafter that shares the target's KV pages, scales and sinks.

    Raises `Refused` if the backend refuses one of the two geometries.
    """

    def __init__(self, subject: BackendUnderTest, rounds: Rounds) -> None:
        pages = rounds.forwards[0][0].num_pages
        self.target, self.draft = (Harness(subject, one, pages) for one in (rounds.target, rounds.draft))
        theirs = self.target.tensors
        self.draft.tensors.share_pages(theirs)
        self.draft.tensors.cache = theirs.cache
        self._null_pages = max(self.target.null_pages, self.draft.null_pages)
        self._earlier: list[tuple[ForwardCase, Pools]] = []

    def run(self, rounds: Rounds) -> None:
        """Run all rounds and check every forward. Each forward reads the KV that the forwards before it stored."""
        seed = 0
        for number, forwards in enumerate(rounds.forwards, start=1):
            for forward in forwards:
                if self._null_pages != forward.null_pages:
                    forward = forward.with_null_pages(self._null_pages)
                if not seed:
                    self._fill(forward)
                seed += 1
                self._step(forward, seed, f"round {number}, {forward.name}")

    def _fill(self, forward: ForwardCase) -> None:
        """Fill the whole pool with random KV, zeros in the null pages. NaN would make all wrong outputs alike."""
        dice = torch.Generator().manual_seed(0)
        for pool in (self.target.tensors.cache.k, self.target.tensors.cache.v):
            raw(pool).copy_(raw(torch.randn(pool.shape, generator=dice).to(pool.dtype)))
            raw(pool)[: forward.null_pages] = 0

    def _step(self, forward: ForwardCase, seed: int, what: str) -> None:
        is_draft = forward.geometry is not self.target.geometry and forward.mode not in self.target.geometry.modes
        harness = self.draft if is_draft else self.target
        batch = harness.set(forward)
        harness.tensors.fill_rows(forward, seed)
        before = self._pools()
        expected = harness.expected(forward)
        harness.run(forward, batch)
        try:
            harness.assert_step(forward, batch, expected, f"{what}: the output")
        except ContractViolation as wrong:
            if not is_draft:
                raise
            raise self._named(forward, wrong, what) from wrong
        self._earlier.append((forward, before))

    def _pools(self) -> Pools:
        cache = self.target.tensors.cache
        return cache.k.clone(), cache.v.clone()

    def _named(self, forward: ForwardCase, wrong: ContractViolation, what: str) -> ContractViolation:
        """Return the failure with the name of what the drafter reads differently, if one difference explains it."""
        found = next((name for name, out in self._explanations(forward) if self._explains(forward, out)), "")
        cause = f"it reads another {found} than its target" if found else "no single difference explains its output"
        details = wrong.details
        return ContractViolation(
            f"{what}: the drafter is wrong: {cause}. {wrong.what}",
            batch=forward,
            got=details.get("got"),
            expected=details.get("expected"),
            formula="the drafter's KV, scales, window and positions are the target's",
            bug="vllm#49262, tokenspeed#613",
            remedy="give the drafter's layer the target's pages, scales, window and lengths of this round",
            wrong=wrong.wrong,
        )

    def _explains(self, forward: ForwardCase, answer: attention.Answer) -> bool:
        # Twice the usual bound also covers the roundoffs that a plugin may declare.
        a, live = forward.geometry.attention, forward.live_rows
        out, want = self.draft.tensors.rows(forward)[3][:live].to(answer.out.device).double(), answer.out[:live]
        return bool(((out - want).abs() <= 2 * tolerance(answer, a.q_dtype, a)[:live]).all())

    def _explanations(self, forward: ForwardCase) -> Iterator[tuple[str, attention.Answer]]:
        """Yield the output of a drafter with one difference, and the difference's name: scale, window, position, KV."""
        cache, a, now = self.draft.tensors.cache, forward.geometry.attention, self._pools()
        k_scale, v_scale = cache.k_scale, cache.v_scale
        if k_scale is not None and v_scale is not None:
            for scales in ((None, v_scale), (k_scale, None), (None, None), (v_scale, k_scale)):
                yield "KV scale", self._answer(forward, now, scales=scales)
        if a.window_left >= 0:
            for window in (a.window_left + 1, max(0, a.window_left - 1), -1):
                yield "window", self._answer(forward, now, window=window)
        for shift in (-1, 1):
            yield "position", self._answer(forward, now, shift=shift)
        if not forward.causal and a.window_left >= 0:
            yield (
                "position",
                self._answer(forward, now, requests=[_with_slots_as_depths(one) for one in forward.requests]),
            )
        for _, pools in reversed(self._earlier):
            yield "KV", self._answer(forward, pools, own=now)
            yield "KV", self._answer(forward, pools)
        for earlier, _ in reversed(self._earlier):
            yield "KV", self._answer(forward, now, reaching=earlier)

    def _answer(
        self,
        forward: ForwardCase,
        pools: Pools,
        *,
        scales: attention.Scales | None = None,
        window: int | None = None,
        shift: int = 0,
        own: Pools | None = None,
        reaching: ForwardCase | None = None,
        requests: list[Request] | None = None,
    ) -> attention.Answer:
        """Return the oracle's output of the drafter's rows with one difference.

        Args:
            window: another window.
            shift: committed tokens that each row sees too many, or too few if negative.
            own: pools from which the rows read the new tokens; by default `pools`.
            reaching: an earlier forward; rows also see the new tokens that it stored after the prefix.
            requests: other positions of the rows; by default the forward's.
        """
        a, cache = forward.geometry.attention, self.draft.tensors.cache
        truth = enumerate_truth(requests or forward.requests, a.page_size, a.window_left if window is None else window)
        visible, new = {}, set[int]()
        for row in forward.rows[: forward.live_rows]:
            request, slots = forward.requests[row[0]], truth.visible[row]
            new |= set(truth.visible[row]) & {truth.writes[one] for one in forward.rows[: forward.live_rows]}
            at = [page * a.page_size + i for page in request.pages for i in range(a.page_size)]
            if shift < 0:
                slots = tuple(slot for slot in slots if slot not in at[request.prefix + shift : request.prefix])
            if shift > 0:
                end = request.prefix + request.tail
                slots = (*slots, *at[end : end + shift])
            if reaching is not None:
                past = reaching.requests[row[0]]
                slots = tuple(dict.fromkeys((*slots, *at[request.prefix : past.prefix + past.tail])))
            visible[row] = slots
        union = sorted(set().union(*visible.values()))
        index = {slot: number for number, slot in enumerate(union)}
        held = [at_slots(pool, torch.tensor(union)) for pool in pools]
        if own is not None:
            fresh = [index[slot] for slot in union if slot in new]
            for pool, one in zip(own, held, strict=True):
                one[fresh] = at_slots(pool, torch.tensor([union[number] for number in fresh], dtype=torch.int64))
        seen = {row: tuple(index[slot] for slot in slots) for row, slots in visible.items()}
        both = (cache.k_scale, cache.v_scale) if scales is None else scales
        rows, q = forward.rows, self.draft.tensors.rows(forward)[0]
        return attention.attend(q, held[0], held[1], seen, rows, a, both, cache.sinks)


def _with_slots_as_depths(request: Request) -> Request:
    """Return a request with the same masks, in which the position of a new token is L + its slot."""
    masks = tuple(tuple(request.seen(slot)) for slot in range(request.tail))
    return replace(request, parents=chain(request.tail), masks=masks)
