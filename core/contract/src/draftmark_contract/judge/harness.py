"""Harness of an engine's layer: runs a step with the contract's tensors, and checks output, KV cache and inputs.

It has the methods of `harness.harness.Harness` that a check uses, so the body of a check serves plugins and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from draftmark.geometry import Geometry

from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..harness import assertions
from ..harness.contents import fill
from ..harness.expected import store
from ..harness.forward_runner import KINDS
from ..harness.opening import open_harness
from ..harness.pools import raw
from ..harness.tensor_forms import RowForm
from ..harness.tensors import CaseTensors
from ..harness.watch import Watch
from ..oracle import attention
from . import eight_bits
from .driver import Driver, EngineCapabilities
from .step import Step, step_of

STALE = 448.0
"""KV value in slots that no row owns: finite like old KV, and so large that a weight of 1e-3 on it is visible."""
FP8_STEP = 2.0**-3
"""Relative distance between neighbouring numbers of e4m3; a rounded value lies within half of it."""
Runs = Callable[[Step, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EngineHarness:
    """Holds an opened backend (`Driver`) and the tensors for any step of its geometry.

    Attributes:
        caps: the backend's capabilities.
        geometry: geometry of the layer.
        driver: opened layer.
        tensors: q, k, v and cache tensors on the device.
        slots: all slots of the layer's memory, int64.
        host, host_kinds: kind of host lengths that a check uses, and all kinds that an engine may have.
        row_forms: layouts in which engines pass q, k and v.
    """

    host = KINDS[-1]
    host_kinds = KINDS
    row_forms = (RowForm.PROJECTED, RowForm.AFTER_ROPE)

    def __init__(self, caps: EngineCapabilities, geometry: Geometry, num_pages: int) -> None:
        self.caps, self.geometry = caps, geometry
        self.driver: Driver = caps.open(geometry, num_pages)
        self.tensors = CaseTensors(geometry, caps.device, num_pages)
        size = geometry.attention.page_size
        self.slots = torch.arange(num_pages * size, dtype=torch.int64, device=caps.device)
        self._loose = {"exact": 0, "tight_bound": 1, "upper_bound": 33, "mixed_bound": size + 1, "unknown": 1000}

    def fresh(self) -> EngineHarness:
        """Return a harness that opens this layer again, on new tensors."""
        return EngineHarness(self.caps, self.geometry, self.tensors.num_pages)

    def more_tensors(self) -> CaseTensors:
        """Return another set of rows and batch tensors."""
        return CaseTensors(self.geometry, self.caps.device, self.tensors.num_pages)

    def place(self, forward: ForwardCase | Step) -> Step:
        """Return the step of a forward, with drafts as the engine has them and without padded requests."""
        return forward if isinstance(forward, Step) else step_of(forward, self.caps.trees)

    def poison(self) -> None:
        """Do nothing: an engine owns the buffers of its metadata."""

    # -- steps --------------------------------------------------------------------------------------------

    def load(self, step: Step, host: str = KINDS[-1], seed: int = 0, contents: Contents = Contents.USUAL) -> Step:
        """Fill the rows with new values, and the layer's KV memory with new contents.

        Args:
            host: kind of host lengths; it decides how far the host's upper bounds exceed the lengths.

        Returns:
            The step with these bounds.
        """
        fill(self.tensors, step.forward, contents, seed)
        k, v = self._pools()
        for pool in (k, v):
            nothing = pool.float().isnan()
            raw(pool)[nothing] = raw(torch.full((1,), STALE, dtype=pool.dtype, device=pool.device))
        self._keep(step, (k, v), seed)
        self.driver.write(self.slots, k, v)
        return replace(step, loose=self._loose[host])

    def run(self, step: Step, loaded: Step) -> torch.Tensor:
        """Run a loaded step eagerly, and return a copy of its output."""
        return self.driver.forward(loaded, *self.rows(loaded)).clone()

    def assert_forward(
        self, step: Step, loaded: Step, what: str = "the output", run: Runs | None = None
    ) -> torch.Tensor:
        """Run a loaded step, and check output, KV and inputs.

        Args:
            step: the step.
            loaded: the step as `load` returned it.
            what: name of the output in a violation.
            run: function that runs the step; None runs it eagerly.

        Returns:
            A copy of the output's live rows, ``[live_rows, heads, head_dim]``.

        Raises:
            ContractViolation: the output, a KV slot or an input is wrong.
        """
        q, k, v = self.rows(loaded)
        watch = Watch({"q": q, "k": k, "v": v}, loaded)
        wanted = self._stored(loaded, self.driver.read(self.slots))
        out = (run or self.driver.forward)(loaded, q, k, v)
        self._assert_cache(loaded, wanted)
        watch.assert_unchanged_except((), "forward")
        self._assert_output(loaded, out, wanted, what)
        return out[: loaded.live_rows].clone()

    def assert_metadata_is_fresh(self, step: Step, number: int) -> None:
        """Do nothing: the metadata of an engine has no declared meaning, and the output is compared."""

    def watch(self, step: Step, loaded: Step) -> Watch:
        """Return snapshots of the rows of a step, to detect changes later."""
        return Watch(dict(zip("qkv", self.rows(loaded), strict=True)), loaded)

    def calls(self, step: Step, loaded: Step) -> dict[str, Callable[[], object]]:
        """Return the one call of a layer, which also checks the slots that it writes."""
        return {"forward": lambda: self.assert_forward(step, loaded)}

    def bits(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor as integers, so that NaN equals itself."""
        return raw(tensor).clone()

    def rows(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of a step; padding rows are NaN."""
        more = step.num_rows - step.live_rows
        assert self.tensors.v is not None, "the judge has layers with K and V apart only"
        found = [one[: step.live_rows] for one in (self.tensors.q, self.tensors.k, self.tensors.v)]
        if not more:  # Return slices, not copies: a copy would make strided views contiguous.
            return found[0], found[1], found[2]
        padded = [torch.cat([one, one.new_full((more, *one.shape[1:]), float("nan"))]) for one in found]
        return padded[0], padded[1], padded[2]

    # -- checks of a step's results -----------------------------------------------------------------------

    def _assert_cache(self, step: Step, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Check that every stored row is at its own KV slot, and that no other slot has changed."""
        owners = {slot: row for row, slot in step.truth.writes.items()}
        written, kept = set(step.writes.values()), sorted(step.unstored)
        more = f"; rows {kept} have slot -1" if kept else ""
        for name, got, want in zip("kv", self.driver.read(self.slots), wanted, strict=True):

            def near(slot: int, got: torch.Tensor = got, want: torch.Tensor = want) -> bool:
                return slot in written and _rounded(got[slot], want[slot])

            assertions.assert_stored(name, got, want, owners, step, allowed=near, more=more)

    def _assert_output(
        self, step: Step, out: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor], what: str
    ) -> None:
        a, cache = self.geometry.attention, self.tensors.cache
        # `_assert_cache` has already checked the fp8 KV, so the expected output uses the backend's own rounded values.
        pools = self.driver.read(self.slots) if cache.k_scale is not None else wanted
        q, order, scales = self.tensors.q[: step.live_rows], step.forward.rows, (cache.k_scale, cache.v_scale)
        if self.driver.rounds_queries:
            q = eight_bits.rounded(q)
        answer = attention.attend(q, *pools, step.truth.visible, order, a, scales)
        if self.driver.rounds_queries:
            answer = eight_bits.loosened(answer, q, pools, scales, step)
        assertions.assert_output(out[: step.live_rows], answer, a, step.forward, batch=step, what=what)

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


@open_harness.register(EngineCapabilities)
def _(caps: EngineCapabilities, geometry: Geometry, num_pages: int) -> EngineHarness:
    return EngineHarness(caps, geometry, num_pages)
