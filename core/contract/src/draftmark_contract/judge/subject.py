"""Runs a step on an engine's backend with the contract's tensors, and checks output, KV cache and inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftmark.geometry import Geometry

from ..cases.contents import Contents
from ..check import ContractViolation
from ..failing_batch import Wrong
from ..harness import assertions
from ..harness.contents import fill
from ..harness.expected import store
from ..harness.pools import raw
from ..harness.tensors import CaseTensors
from ..oracle import attention
from . import eight_bits
from .driver import Driver, EngineCapabilities
from .step import Step

STALE = 448.0
"""KV value in slots that no row owns: finite like old KV, and so large that a weight of 1e-3 on it is visible."""
FP8_STEP = 2.0**-3
"""Relative distance between neighbouring numbers of e4m3; a rounded value lies within half of it."""
Runs = Callable[[Step, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EngineSubject:
    """Holds an opened backend (`Driver`) and the tensors for any step of its geometry.

    Attributes:
        caps: the backend's capabilities.
        geometry: geometry of the layer.
        driver: opened layer.
        tensors: q, k, v and cache tensors on the device.
        slots: all slots of the layer's memory, int64.
    """

    def __init__(self, caps: EngineCapabilities, geometry: Geometry, num_pages: int) -> None:
        self.caps, self.geometry = caps, geometry
        self.driver: Driver = caps.open(geometry, num_pages)
        self.tensors = CaseTensors(geometry, caps.device, num_pages)
        size = geometry.attention.page_size
        self.slots = torch.arange(num_pages * size, dtype=torch.int64, device=caps.device)

    def assert_step(
        self,
        step: Step,
        run: Runs | None = None,
        contents: Contents = Contents.USUAL,
        seed: int = 0,
        what: str = "the output",
    ) -> torch.Tensor:
        """Fill new rows and a new cache, run a step, and check output, KV and inputs.

        Args:
            step: step to run.
            run: function that runs the step; None runs it eagerly.
            contents: kind of random numbers.
            seed: seed of the numbers.
            what: name of the output in a violation.

        Returns:
            A copy of the output's live rows, ``[live_rows, heads, head_dim]``.

        Raises:
            ContractViolation: the output, a KV slot or an input is wrong.
        """
        self.load(step, contents, seed)
        return self.assert_loaded_step(step, run, what)

    def load(self, step: Step, contents: Contents = Contents.USUAL, seed: int = 0) -> None:
        """Fill the rows with new values, and the layer's KV memory with new contents."""
        fill(self.tensors, step.forward, contents, seed)
        k, v = self._pools()
        for pool in (k, v):
            nothing = pool.float().isnan()
            raw(pool)[nothing] = raw(torch.full((1,), STALE, dtype=pool.dtype, device=pool.device))
        self._keep(step, (k, v), seed)
        self.driver.write(self.slots, k, v)

    def assert_loaded_step(self, step: Step, run: Runs | None = None, what: str = "the output") -> torch.Tensor:
        """Run a step on the rows and cache that are already loaded, and check the result; see `assert_step`."""
        q, k, v = self.rows(step)
        before = [tensor.clone() for tensor in (q, k, v)]
        wanted = self._stored(step, self.driver.read(self.slots))
        out = (run or self.driver.forward)(step, q, k, v)
        self._assert_cache(step, wanted)
        self._assert_inputs(step, before, (q, k, v))
        self._assert_output(step, out, wanted, what)
        return out[: step.forward.live_rows].clone()

    def rows(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of a step; padding rows are NaN."""
        more = step.num_rows - step.forward.live_rows
        assert self.tensors.v is not None, "the judge has layers with K and V apart only"
        found = [one[: step.forward.live_rows] for one in (self.tensors.q, self.tensors.k, self.tensors.v)]
        if not more:  # Return slices, not copies: a copy would make strided views contiguous.
            return found[0], found[1], found[2]
        padded = [torch.cat([one, one.new_full((more, *one.shape[1:]), float("nan"))]) for one in found]
        return padded[0], padded[1], padded[2]

    # -- checks of a step's results -----------------------------------------------------------------------

    def _assert_cache(self, step: Step, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Check that every stored row is at its own KV slot, and that no other slot has changed."""
        written = set(step.writes.values())
        for name, got, want in zip("kv", self.driver.read(self.slots), wanted, strict=True):
            differs = (raw(got) != raw(want)).flatten(1).any(1).nonzero().flatten().tolist()
            wrong = [slot for slot in differs if slot not in written or not _rounded(got[slot], want[slot])]
            if wrong:
                owners = {slot: row for row, slot in step.truth.writes.items()}
                raise ContractViolation(
                    f"the {name} cache differs from the one where each row was stored at its own slot",
                    batch=step,
                    got=f"differences at slots {wrong[:8]}" + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
                    expected=_owned([slot for slot in wrong if slot in owners], owners, step),
                    formula="row j is stored at the slot of token L + j; rows with slot -1 are not stored",
                    wrong=Wrong("store", [owners[slot] for slot in wrong if slot in owners]),
                )

    def _assert_inputs(self, step: Step, before: list[torch.Tensor], after: tuple[torch.Tensor, ...]) -> None:
        for name, old, new in zip("qkv", before, after, strict=True):
            if not torch.equal(raw(old), raw(new)):
                raise ContractViolation(f"the step changed its input {name}", batch=step, expected="unchanged inputs")

    def _assert_output(
        self, step: Step, out: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor], what: str
    ) -> None:
        a, cache = self.geometry.attention, self.tensors.cache
        # `_assert_cache` has already checked the fp8 KV, so the expected output uses the backend's own rounded values.
        pools = self.driver.read(self.slots) if cache.k_scale is not None else wanted
        q, order, scales = self.tensors.q[: step.forward.live_rows], step.forward.rows, (cache.k_scale, cache.v_scale)
        if self.driver.rounds_queries:
            q = eight_bits.rounded(q)
        answer = attention.attend(q, *pools, step.truth.visible, order, a, scales)
        if self.driver.rounds_queries:
            answer = eight_bits.loosened(answer, q, pools, scales, step)
        assertions.assert_output(out[: step.forward.live_rows], answer, a, step.forward, batch=step, what=what)

    # -- helpers that fill and read KV pools --------------------------------------------------------------

    def _pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache, a = self.tensors.cache, self.geometry.attention
        return cache.k.view(-1, a.num_kv_heads, a.head_dim), cache.v.view(-1, a.num_kv_heads, a.head_dim)

    def _keep(self, step: Step, pools: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
        """Write KV for the rows with slot -1 into the pools, like an engine that stored that KV before this step."""
        slots = [step.truth.writes[row] for row in sorted(step.unstored)]
        dice = torch.Generator().manual_seed(seed + 11)
        for pool in pools:
            values = torch.randn((len(slots), *pool.shape[1:]), generator=dice).to(pool.dtype)
            where = torch.tensor(slots, dtype=torch.int64, device=pool.device)
            raw(pool)[where] = raw(values).to(pool.device)

    def _stored(self, step: Step, before: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV pools as they must be after the step."""
        pools = [pool.clone() for pool in before]
        store(pools, step.writes, step.forward, self.tensors)
        return pools[0], pools[1]


def _rounded(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return True where two fp8 values are neighbours: a kernel may either multiply or divide by the scale."""
    if got.element_size() > 1:
        return False
    near = FP8_STEP * want.float().abs() + 2.0**-9
    return bool(((got.float() - want.float()).abs() <= near).all())


def _owned(slots: list[int], owners: dict[int, tuple[int, int]], step: Step) -> str:
    if not slots:
        return "no difference; no row owns any of these slots"
    rows = [owners[slot] for slot in slots[:8]]
    kept = [row for row in rows if row in step.unstored]
    return f"no difference; rows {rows} (request, row) own slots here" + (f"; {kept} have slot -1" if kept else "")
