"""Harness of a behaviour check: runs forwards on a backend and asserts their results.

Every ``assert_`` method raises `ContractViolation` with the batch and the two values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import replace

import torch

from draftmark.batch import ForwardBatch
from draftmark.errors import DraftmarkError

from ..cases.forwards import ForwardCase
from ..cases.histories import Failure
from ..check import ContractViolation, Wrong
from ..oracle.decode import Decoded
from ..oracle.problem import DecodeProblem
from ..oracle.truth import Row
from . import assertions
from .expected import Expected, answer_from_cache, truth_of
from .forward_runner import ForwardRunner
from .host_reads import host_reads
from .interruption import expect_interruption, run_until
from .poison import poison_in
from .poisoned_memory import PoisonedMemory
from .pools import raw
from .reachable import reachable_storages
from .tensor_forms import RowForm
from .tensors import CaseTensors
from .watch import Watch, batch_tensors, received


class Harness(ForwardRunner):
    """Runs forwards on one backend and checks them. Raises `Refused` if the backend refuses the geometry."""

    def fresh(self) -> Harness:
        """Return a harness that opens this backend again, on new tensors."""
        num_pages = self.tensors.num_pages - self.null_pages + 1
        return Harness(self.subject, self.geometry, num_pages)

    @property
    def row_forms(self) -> tuple[RowForm, ...]:
        """Layouts of q, k and v that a caller may pass."""
        return tuple(RowForm)

    def poison(self) -> None:
        """Overwrite the backend's buffers."""
        self.arena.poison()

    # -- assertions about whole forwards ------------------------------------------------------------------

    def assert_forward(self, forward: ForwardCase, batch: ForwardBatch, what: str = "the output") -> torch.Tensor:
        """Run one eager forward that is loaded into the tensors, and check it. Return a copy of its output."""
        expected = self.expected(forward)
        out = self.run(forward, batch)
        self.assert_step(forward, batch, expected, what)
        return out

    def assert_step(self, forward: ForwardCase, batch: ForwardBatch, expected: Expected, what: str) -> None:
        """Check metadata, cache, output and guard words of a forward that has run."""
        self.assert_metadata(forward, batch)
        self.assert_cache(forward, expected)
        self.assert_output(forward, expected, what)
        self.assert_guards(forward)

    def assert_sharing_layer(self, forward: ForwardCase, batch: ForwardBatch, seed: int) -> None:
        """Attend with other queries to the KV that a forward stored, as a layer that shares it. Check the output."""
        sharing = replace(forward, shares_kv=True)
        self.tensors.fill_rows(sharing, seed)
        expected = self.expected(sharing)
        self.layer(sharing, batch)
        self.assert_cache(sharing, expected)
        self.assert_output(sharing, expected, "the output of a layer that shares the KV")
        self.assert_guards(sharing)

    def fail(self, forward: ForwardCase, batch: ForwardBatch, failure: Failure) -> None:
        """Run an eager forward until it fails, and drop it."""
        tensors = copy(self.tensors)
        if failure.refused:
            cache, device = tensors.cache, tensors.cache.k.device
            wrong = None if cache.sinks is not None else torch.zeros(tensors.q.shape[1], device=device)
            tensors.cache = replace(cache, sinks=wrong)
        with expect_interruption(), suppress(DraftmarkError):
            run_until(failure, self.calls(forward, batch, tensors))

    def assert_metadata(
        self, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Check that the buffers name the slots that each live row sees and writes, and no others.

        Slots of padded rows must lie in null pages.

        Args:
            arena: copies of the buffers from an earlier time; by default the buffers as they are now.
        """
        found = self._decoded(forward, batch, arena)
        truth, slots = truth_of(forward), forward.slots
        for row in forward.rows[: forward.live_rows]:
            if not found.opaque and found.visible[row] != truth.visible[row]:
                what = f"row {row[1]} of request {row[0]} sees other KV slots than its prefix and tail mask allow"
                raise _slots(what, forward, row, found.visible[row], truth.visible[row])
            if found.writes is not None and found.writes[row] != slots[row]:
                what, formula = "would be stored at a wrong KV slot", "slot of token L + T - q + j"
                what = f"row {row[1]} of request {row[0]} {what}"
                got, want = found.writes[row], slots[row]
                where = Wrong("store", (row,), (want,), (got,))
                raise _violation(what, forward, got, want, formula=formula, wrong=where)
        _assert_padding(forward, found)

    def assert_metadata_is_fresh(self, forward: ForwardCase, number: int) -> None:
        """Check that a forward gives the same metadata as on a fresh arena.

        Args:
            number: number of forwards that ran before it.
        """
        fresh = self.fresh()
        batch = fresh.load(forward)
        fresh.prepare(batch)
        if self.decoded(forward, self.load(forward)) != fresh.decoded(forward, batch):
            raise ContractViolation(
                f"after {number} other forwards the metadata differs from the metadata of a fresh arena",
                batch=forward,
                got="other slots",
                expected="the same slots for every row, padded rows included",
                bug="sglang#10892",
            )

    def _decoded(self, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None) -> Decoded:
        try:
            return self.decoded(forward, batch, arena)
        except DecodeProblem as problem:
            formula = "the backend's MetadataSpec and draftmark_contract.roles.Role"
            raise _violation(problem.what, forward, problem.got, problem.expected, formula=formula) from problem

    def assert_cache(self, forward: ForwardCase, expected: Expected, tensors: CaseTensors | None = None) -> None:
        """Check that the pool contains the live rows at their slots and is unchanged elsewhere, except null pages."""
        null_slots = forward.null_pages * forward.geometry.attention.page_size
        start = null_slots if forward.stores_padding else 0
        stored = (tensors or self.tensors).stored
        owners = {slot: row for row, slot in expected.truth.writes.items()}
        for (name, pool), want in zip(stored.items(), expected.pools, strict=True):
            got = pool.reshape(want.shape)
            assertions.assert_stored(name, got, want, owners, forward, first=start)
            if not bool(torch.isfinite(got[:null_slots].float()).all()):
                raise _violation(f"a null page of {name} is not finite", forward, "NaN or infinity", "finite values")
        others = (tensors or self.tensors).changed_layers
        if others:
            raise _violation(
                "a forward writes to other layers of the KV pool",
                forward,
                f"changes in layers {others} of the pool",
                "changes only in the layer that write_kv received",
                formula="k and v of KVCache are views of a pool, with a storage offset",
                bug="TRT-LLM#16801",
            )

    def assert_output(
        self, forward: ForwardCase, expected: Expected, what: str = "the output", out: torch.Tensor | None = None
    ) -> None:
        """Check that live rows of `out` match float64 within rounding, and that padded rows are finite.

        Args:
            what: name of the output in the error message.
            out: ``[rows, heads, head_dim]``; by default `out` of the harness's tensors.
        """
        out = self.tensors.rows(forward)[3] if out is None else out
        if not forward.attends:
            if not bool(out.isnan().all()):
                raise _violation(
                    f"{what} of a forward without attend is written", forward, "values", "the NaN before it"
                )
            return
        roundoffs = self.subject.roundoffs(forward.geometry, forward.mode)
        assertions.assert_output(
            out, expected.answer, forward.geometry.attention, forward, what=what, roundoffs=roundoffs
        )

    def output_of(self, forward: ForwardCase, tensors: CaseTensors) -> torch.Tensor:
        """Return a copy of a forward's output, for `assert_output`. The copy is device work."""
        return tensors.rows(forward)[3].clone()

    def assert_guards(self, forward: ForwardCase) -> None:
        """Check that no byte before or after any buffer changed."""
        assertions.assert_guards(self.arena, forward)

    def assert_sparse_pool(self, forward: ForwardCase) -> None:
        """Check the cache and the output only at the slots that the forward touches, for a pool too large to copy."""
        truth, stored = truth_of(forward), self.tensors.stored
        for number, row in enumerate(forward.rows[: forward.live_rows if forward.is_stored else 0]):
            at = divmod(truth.writes[row], forward.geometry.attention.page_size)
            for (name, pool), rows in zip(stored.items(), self.tensors.stored_rows(forward), strict=True):
                if not torch.equal(pool[at], rows[number].to(pool.dtype)):
                    what = f"row {row[1]} of request {row[0]} was not stored in the {name} cache at its slot"
                    want = f"its {name} at slot {truth.writes[row]}"
                    raise _violation(what, forward, "other values", want, wrong=Wrong("store", (row,)))
        live = {row: truth.visible[row] for row in forward.rows[: forward.live_rows]}
        self.assert_output(forward, Expected(truth, [], answer_from_cache(forward, self.tensors, live)))

    def more_tensors(self) -> CaseTensors:
        """Return another set of tensors with the shapes of the harness's own, pool included."""
        return CaseTensors(self.geometry, self.subject.device, self.tensors.num_pages)

    def grad_mode(self, mode: str) -> AbstractContextManager[object]:
        """Return a context with torch's ``"inference"`` mode, or with gradients ``"enabled"`` or off (``"none"``)."""
        if mode == "inference":
            return torch.inference_mode()
        return torch.set_grad_enabled(mode == "enabled")

    # -- helpers that find side effects of a call ---------------------------------------------------------

    def watch(self, forward: ForwardCase, batch: ForwardBatch) -> Watch:
        """Return snapshots of every tensor that the backend receives for a forward, to detect changes later."""
        return Watch(received(self.tensors, forward, batch), forward)

    @contextmanager
    def poisoned(self, when: str) -> Iterator[None]:
        """Poison all memory of this harness while the block runs, and check afterwards that nothing wrote to it."""
        memory = PoisonedMemory(self.arena, self.tensors)
        yield
        memory.assert_untouched(when)

    def bits(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor as integers, so that NaN equals itself."""
        return raw(tensor).clone()

    def held(self) -> dict[int, str]:
        """Return the memory that the backend can reach, as a dict from storage address to a name."""
        return reachable_storages(self.backend)

    def assert_keeps_nothing(self, forwards: Sequence[ForwardCase], opened: str, declared: str, interface: str) -> None:
        """Run forwards, also in reverse, and check that the backend reaches no new memory and moves no buffer.

        Args:
            opened, declared: hook that opens the backend, and hook that lists its buffers.
            interface: the backend's protocol.
        """
        before, addresses = self.held(), self.arena.addresses()
        for forward in (*forwards, *forwards[::-1]):
            self.run(forward, self.load(forward))
            fresh = sorted(name for address, name in self.held().items() if address not in before)
            if fresh or self.arena.addresses() != addresses:
                raise ContractViolation(
                    "the backend holds memory that it did not hold when it was opened",
                    batch=forward,
                    got=fresh or "moved arena buffers",
                    expected=f"arena buffers, and what {opened} made",
                    formula=f"a captured graph would keep the old address; {interface}",
                    bug="sglang#27664, rtp-llm#1259",
                    remedy=f"declare the memory in {declared}(), or make it in {opened}()",
                )

    def host_reads(self, forward: ForwardCase, batch: ForwardBatch, call: Callable[[], None]) -> Iterable[str]:
        """Run `call`, and return the names of torch calls in it that read batch or arena tensors on the host."""
        device = [self.arena[spec.name] for spec in self.arena.specs if not spec.pinned]
        cache = self.tensors.cache
        given = [one for one in (cache.k_scale, cache.v_scale, cache.sinks) if one is not None]
        rows = [one for one in self.tensors.rows(forward)[:3] if one is not None]
        with host_reads([*batch_tensors(batch).values(), *device, *given, *rows]) as reads:
            call()
        return reads


def place(harness: ForwardRunner, forward: ForwardCase) -> ForwardCase:
    """Return the forward with its padded requests on the null pages that the backend needs."""
    return harness.place(forward)


def _assert_padding(forward: ForwardCase, found: Decoded) -> None:
    """Check that every KV slot that the buffers name for padded rows lies in a null page."""
    end = forward.null_pages * forward.geometry.attention.page_size
    for row in forward.rows[forward.live_rows :]:
        named = [*found.visible.get(row, ()), *([found.writes[row]] if found.writes and row in found.writes else [])]
        outside = [slot for slot in named if not 0 <= slot < end]
        if outside:
            raise _violation(
                f"row {row[1]} of padded request {row[0]} names KV slots outside the null pages",
                forward,
                outside,
                f"slots 0 … {end - 1}",
                formula="a padded request has prefix 0 and a page table of null pages",
                bug="sglang#24743, lmdeploy#4569",
                wrong=Wrong("keys", (row,), extra=outside),
            )


def _slots(what: str, forward: ForwardCase, row: Row, got: tuple[int, ...], want: tuple[int, ...]) -> ContractViolation:
    missing = sorted(set(want) - set(got))
    extra = sorted(set(got) - set(want))
    twice = sorted(slot for slot, count in Counter(got).items() if count > 1)
    shown = ", ".join(f"{k} {v[:12]}" for k, v in (("missing", missing), ("extra", extra), ("twice", twice)) if v)
    formula = "the prefix [0, L) and the row's tail ancestors, within the window"
    where = Wrong("keys", (row,), missing, [*extra, *twice])
    return _violation(what, forward, shown, f"{len(want)} slots", formula=formula, wrong=where)


def _violation(
    what: str,
    forward: ForwardCase,
    got: object,
    expected: object,
    *,
    poison: str | None = None,
    formula: str = "",
    bug: str = "",
    wrong: Wrong | None = None,
) -> ContractViolation:
    poison = poison_in(got) if poison is None else poison
    return ContractViolation(
        what, batch=forward, got=got, expected=expected, poison=poison, formula=formula, bug=bug, wrong=wrong
    )
