"""Judge items for vLLM's MLA backends: one MLA layer with the head widths of a real model and random projections.

vLLM's own layer, builder, KV write, decode kernel and prefill run. The layer absorbs the projection of keys into the
queries of decodes, and expands prompts. In float64 both forms are equal, and the absorbed form checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark_contract.cases.forwards import ForwardCase, ragged, uniform
from draftmark_contract.check import ContractViolation, Refused
from draftmark_contract.harness.assertions import assert_stored
from draftmark_contract.judge.devices import device_of
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.step import Step, step_of
from draftmark_contract.oracle.attention import attend
from draftmark_contract.runner.item import Item, item_of

from .batch import RunnerBuffers
from .config import head_widths, max_model_len
from .driver import capturable
from .latent_layer import LatentLayers
from .order import in_runner_order

MATCH, STORES = "numerics.match_float64", "purity.each_call_writes_its_own"
CAPTURED, REPLAY = "graphs.captured_run_is_right", "graphs.replay_equals_eager"
AS_DENSE = "an MLA layer equals dense float64 attention over its stored rows"
AS_STORED = "a step stores its own rows, bit for bit, and changes no other slot"
AS_CAPTURED = "metadata of a capture is rebuilt for each step in the same memory, padded to the captured size"
ROUNDED = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest relative error of an output row in each dtype, by Euclidean norm."""
STALE = 448.0
"""Value in slots that no row of a step owns: finite, as old rows are, and visible with a small weight."""
CAPTURED_SIZE = 4


@dataclass(frozen=True)
class MlaFacts:
    """Describes what one MLA backend runs on a device.

    Attributes:
        dtype: dtype of the items.
        widths: (latent, rest) of the rows. heads: query heads. pages: page sizes.
        verifies: whether verifies run here. vLLM's CPU kernel does not serve them.
        contexts: whether prompts with a context run here. vLLM gathers their rows on a GPU only.
    """

    dtype: str
    widths: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    pages: tuple[int, ...]
    verifies: bool = True
    contexts: bool = False


def facts_of(name: str, device: str) -> MlaFacts:
    """Return the facts of a backend, by vLLM's name."""
    on_cpu = device_of(device).host
    if name == "CPU_MLA":
        return MlaFacts("float32", ((512, 64),), (4, 20), (16,), verifies=False)
    widths, heads = ((512, 64), (256, 64)), (4, 16) if on_cpu else (16, 20, 128)
    if name != "TRITON_MLA":
        return MlaFacts("bfloat16", ((512, 64),), heads, (64,), contexts=True)
    return MlaFacts("float16" if on_cpu else "bfloat16", widths, heads, (16, 64), contexts=not on_cpu)


def items(backend: Any, name: str, device: str) -> Sequence[Item]:
    """Return the items of an MLA backend. Building them opens no backend."""
    facts, found = facts_of(name, device), []
    for latent, rest in facts.widths:
        for heads in facts.heads:
            for page in facts.pages:
                geometry, case = _geometry(facts, latent, rest, heads, page), f"mla{latent}+{rest}-h{heads}-p{page}"
                for forward in _forwards(facts, geometry):
                    run = partial(_eager, backend, device, facts, forward)
                    found.append(item_of(MATCH, f"{case}-{forward.name}", run, AS_DENSE))
        geometry, case = _geometry(facts, latent, rest, facts.heads[0], facts.pages[0]), f"mla{latent}+{rest}"
        forward = _forwards(facts, geometry)[0]
        found.append(item_of(STORES, case, partial(_eager, backend, device, facts, forward), AS_STORED))
        for mode, rows in ((Mode.DECODE, 1), (Mode.VERIFY, geometry.draft.num_draft_tokens)):
            if rows == 1 or facts.verifies:
                run = partial(_replays, backend, device, facts, geometry, mode, rows)
                found.append(item_of(CAPTURED, f"{case}-{mode.value}", partial(run, 1), AS_CAPTURED))
                found.append(item_of(REPLAY, f"{case}-{mode.value}", partial(run, 4), AS_CAPTURED))
    return found


def _geometry(facts: MlaFacts, latent: int, rest: int, heads: int, page: int) -> Geometry:
    shape = AttentionShape(
        heads,
        1,
        latent + rest,
        page,
        facts.dtype,
        facts.dtype,
        softmax_scale=1.0,
        value_dim=latent,
        latent=True,
    )
    key, rope, _ = head_widths(shape)
    shape = replace(shape, softmax_scale=(key + rope) ** -0.5)
    limits = Limits(max_num_reqs=6, max_context_len=1300, max_extend_tokens=64, capture_batch_sizes=(CAPTURED_SIZE,))
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    return Geometry.create(shape, limits, DraftShape(topk=1, num_steps=4, num_draft_tokens=5), modes=modes)


def _forwards(facts: MlaFacts, geometry: Geometry) -> list[ForwardCase]:
    """Return forwards: decodes, also of long requests, verifies, prompts, mixed steps and prompts with a context."""
    page = geometry.attention.page_size
    lens = (0, page - 1, page, 250)
    found = [uniform("decode", geometry, Mode.DECODE, lens, len(lens))]
    found.append(uniform("long", geometry, Mode.DECODE, (1200, 3), 2))
    if facts.verifies:
        found.append(uniform("verify", geometry, Mode.VERIFY, lens, len(lens), tree="chain"))
    found.append(ragged("prompts", geometry, (0, 0), (19, 7), seed=1))
    found.append(ragged("mixed", geometry, (page, 131, 0), (1, 1, 20), seed=2))
    if facts.contexts:
        found.append(ragged("contexts", geometry, (1200, page, 0, 3), (5, 20, 7, 9), seed=3))
    return found


class _Subject:
    """Holds one MLA layer with the rows of a step, and checks its outputs and its KV memory."""

    def __init__(self, backend: Any, device: str, facts: MlaFacts, geometry: Geometry, pages: int) -> None:
        self.facts, self.geometry, self.device = facts, geometry, device
        self.layers = LatentLayers(backend, geometry, pages, device)
        self.buffers = RunnerBuffers(geometry, pages, device)

    def fill(self, step: Step, seed: int) -> None:
        """Fill queries and new rows, and the KV memory: random rows that requests own, `STALE` elsewhere."""
        make, a = torch.Generator().manual_seed(seed), self.geometry.attention
        dtype = getattr(torch, a.q_dtype)
        width = sum(head_widths(a)[:2])
        self.q = torch.randn(step.num_rows, a.num_qo_heads, width, generator=make).to(dtype).to(self.device)
        self.rows = torch.randn(step.num_rows, a.head_dim, generator=make).to(dtype).to(self.device)
        memory = self.layers.rows
        memory.fill_(STALE)
        owned = sorted(set().union(*step.truth.visible.values()) - set(step.writes.values()))
        old = torch.randn(len(owned), a.head_dim, generator=make).to(dtype)
        slots = torch.tensor(owned, dtype=torch.int64)
        memory[slots // a.page_size, slots % a.page_size] = old.to(self.device)

    def check(self, step: Step, run: Callable[[], torch.Tensor]) -> None:
        """Run a step, and check its KV memory and its outputs.

        Raises:
            ContractViolation: a slot or an output is wrong.
        """
        a, memory = self.geometry.attention, self.layers.rows
        wanted = memory.flatten(0, 1).clone()
        for number, row in enumerate(step.forward.rows):
            wanted[step.writes[row]] = self.rows[number]
        out = run()
        owners = {slot: row for row, slot in step.truth.writes.items()}
        assert_stored("KV", memory.flatten(0, 1), wanted, owners, step)
        of_keys, of_values = self.layers.projections.in_float64()
        width, rows = of_keys.shape[1], wanted.unsqueeze(1)
        q = self.q.double()
        absorbed = torch.cat((torch.einsum("rhk,hkl->rhl", q[..., :width], of_keys), q[..., width:]), -1)
        answer = attend(absorbed, rows, rows[..., : a.value_width], step.truth.visible, step.forward.rows, a)
        expected = torch.einsum("rhl,hvl->rhv", answer.out.to(of_values.device), of_values)
        for number, row in enumerate(step.forward.rows):
            right = expected[number]
            error = (out[number].double() - right).norm(dim=-1) / right.norm(dim=-1)
            if not bool((error <= ROUNDED[a.q_dtype]).all()):
                raise ContractViolation(
                    f"row {row[1]} of request {row[0]} is wrong",
                    batch=step,
                    got=f"a relative error of {float(error.max()):.3g} in head {int(error.argmax())}",
                    expected=f"at most {ROUNDED[a.q_dtype]:g}",
                )

    def prepare(self, step: Step, padded: int, rows: int, longest: int) -> Any:
        """Fill the runner's buffers with a step, and return vLLM's common metadata."""
        self.buffers.fill(step, padded)
        return self.buffers.metadata(padded, rows, longest, max(1, int(self.buffers.bounds.max())))

    def slots(self, rows: int) -> torch.Tensor:
        """Return the slots of the first rows, as the runner passes them to the layer."""
        return self.buffers.slots[:rows]


def _eager(backend: Any, device: str, facts: MlaFacts, forward: ForwardCase) -> None:
    step = step_of(forward)
    subject = _Subject(backend, device, facts, forward.geometry, forward.num_pages)
    subject.fill(step, 1)
    longest = max(one.rows for one in step.forward.requests)

    def run() -> torch.Tensor:
        ordered = in_runner_order(step, subject.layers.builder)
        common = subject.prepare(ordered.step, len(ordered.step.forward.requests), step.num_rows, longest)
        with subject.layers.current():
            metadata = subject.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
        rows = ordered.rows(subject.q, subject.rows)
        return ordered.back(subject.layers.attention(metadata, subject.slots(step.num_rows), *rows))

    subject.check(step, run)


def _replays(backend: Any, device: str, facts: MlaFacts, geometry: Geometry, mode: Mode, rows: int, count: int) -> None:
    """Capture a batch of `CAPTURED_SIZE` requests, then replay `count` steps of other lengths."""
    plans = [(3, 40, 250), (64, 0, 17, 1200), (5,), (250, 31)][:count]
    steps = [
        step_of(
            uniform(f"{mode.value}-round{n}", geometry, mode, lens, len(lens), tree="chain", seed=n),
            padding=CAPTURED_SIZE - len(lens),
        )
        for n, lens in enumerate(plans)
    ]
    subject = _Subject(backend, device, facts, geometry, max(step.forward.num_pages for step in steps))
    support, needed = capturable(subject.layers), Capturable.ONE_ROW if rows == 1 else Capturable.UNIFORM
    if support < needed:
        raise Refused(f"full graphs of {mode.value}: the backend declares {support.name}")
    captured = _Captured(subject, rows)
    for number, step in enumerate(steps):
        subject.fill(step, number)
        subject.check(step, partial(captured.replay, step))


class _Captured:
    """Holds the forward of a captured batch: a graph, or on a device without graphs the metadata of the capture.

    Args:
        rows_each: rows of each of the `CAPTURED_SIZE` requests.
    """

    def __init__(self, subject: _Subject, rows_each: int) -> None:
        self.subject, self.rows_each, self.total = subject, rows_each, CAPTURED_SIZE * rows_each
        self.metadata = self._build()
        self.graph: Any = None
        self._home = device_of(subject.device)
        if self._home.captures:
            self._record()

    def replay(self, step: Step) -> torch.Tensor:
        """Fill the runner's buffers, build metadata padded to the captured size, then run the captured forward."""
        subject = self.subject
        common = subject.prepare(step, CAPTURED_SIZE, self.total, self.rows_each)
        with subject.layers.current():
            subject.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
        if self.graph is None:
            return self._forward(subject.q, subject.rows)
        with torch.inference_mode():
            self.q.copy_(subject.q)
            self.rows.copy_(subject.rows)
            self.out.fill_(float("nan"))
            self.graph.replay()
            self._home.synchronize()
            out: torch.Tensor = self.out.clone()
            return out

    def _build(self) -> Any:
        """Return the builder's metadata for a capture, of a dummy batch."""
        subject = self.subject
        subject.buffers.dummy(self.rows_each, CAPTURED_SIZE)
        longest = max_model_len(subject.geometry)
        common = subject.buffers.metadata(CAPTURED_SIZE, self.total, self.rows_each, longest)
        with subject.layers.current():
            return subject.layers.builder.build_for_cudagraph_capture(common)

    def _forward(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.subject.layers.attention(self.metadata, self.subject.slots(self.total), q, rows)

    def _record(self) -> None:
        """Run the forward once, then capture it with new metadata, as the runner does.

        FlashMLA plans in the first forward of a metadata object, so metadata of the first run would leave its plan out
        of the graph.
        """
        a, device = self.subject.geometry.attention, self.subject.device
        dtype = getattr(torch, a.q_dtype)
        self.q = torch.zeros(self.total, a.num_qo_heads, sum(head_widths(a)[:2]), dtype=dtype, device=device)
        self.rows = torch.zeros(self.total, a.head_dim, dtype=dtype, device=device)

        def run() -> torch.Tensor:
            return self._forward(self.q, self.rows)

        self._home.warm_up(run)
        self.metadata = self._build()
        self.graph, self.out = self._home.record(run)
