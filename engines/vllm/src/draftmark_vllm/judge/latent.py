"""Judge items for vLLM's MLA backends: one MLA layer with projections that change nothing.

With `qk_nope_head_dim` and `v_head_dim` equal to `kv_lora_rank`, and with an identity as each head's part of
`kv_b_proj`, a query before absorption equals the query after it, and an output equals attention over the stored rows.
So vLLM's own layer, builder, KV write, decode kernel and prefill run, and dense float64 attention checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark_contract.cases.forwards import ForwardCase, ragged, uniform
from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.driver import Capturable
from draftmark_contract.judge.item import Item, NotAsked, NotServed
from draftmark_contract.judge.step import Step, step_of

from .batch import RunnerBuffers
from .config import max_model_len
from .driver import capturable
from .latent_layer import LatentLayers

MATCH, STORES = "numerics.match_float64", "purity.each_call_writes_its_own"
CAPTURED, REPLAY = "graphs.captured_run_is_right", "graphs.replay_equals_eager"
AS_IDENTITY = "an MLA layer with identity projections equals dense attention over its stored rows"
AS_STORED = "a step stores its own rows, bit for bit, and changes no other slot"
AS_CAPTURED = "metadata of a capture is rebuilt for each step in the same memory, padded to the captured size"
ROUNDED = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest relative error of an output row in each dtype, by Euclidean norm."""
STALE = 448.0
"""Value in slots that no row of a step owns: finite, as old rows are, and visible with a small weight."""
SCALE = 192**-0.5
CAPTURED_SIZE = 4


@dataclass(frozen=True)
class MlaFacts:
    """Describes what one MLA backend runs on a device.

    Attributes:
        dtype: dtype of the items.
        widths: (latent, rest) of the rows. heads: query heads. pages: page sizes.
        verifies: whether verifies run in the decode kernel. False: vLLM runs them as prompts with a context.
        prompts: whether prompts run here. On a GPU they do not: a head is a row wide, and vLLM's prefill kernels take
            at most 256 elements. Prompts with a context run nowhere: vLLM gathers their rows on a GPU only.
    """

    dtype: str
    widths: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    pages: tuple[int, ...]
    verifies: bool = True
    prompts: bool = True


def facts_of(name: str, device: str) -> MlaFacts:
    """Return the facts of a backend, by vLLM's name."""
    on_cpu = device == "cpu"
    if name == "CPU_MLA":
        return MlaFacts("float32", ((512, 64),), (4, 20), (16,), verifies=False)
    widths, heads = ((512, 64), (256, 64)), (4, 16) if on_cpu else (16, 20, 128)
    if name != "TRITON_MLA":
        return MlaFacts("bfloat16", ((512, 64),), heads, (64,), prompts=False)
    return MlaFacts("float16" if on_cpu else "bfloat16", widths, heads, (16, 64), prompts=on_cpu)


def items(backend: Any, name: str, device: str) -> Sequence[Item]:
    """Return the items of an MLA backend. Building them opens no backend."""
    facts, found = facts_of(name, device), []
    for latent, rest in facts.widths:
        for heads in facts.heads:
            for page in facts.pages:
                geometry, case = _geometry(facts, latent, rest, heads, page), f"mla{latent}+{rest}-h{heads}-p{page}"
                for forward in _forwards(facts, geometry):
                    run = partial(_eager, backend, device, facts, forward)
                    found.append(Item(MATCH, f"{case}-{forward.name}", run, AS_IDENTITY))
        geometry, case = _geometry(facts, latent, rest, facts.heads[0], facts.pages[0]), f"mla{latent}+{rest}"
        forward = _forwards(facts, geometry)[0]
        found.append(Item(STORES, case, partial(_eager, backend, device, facts, forward), AS_STORED))
        for mode, rows in ((Mode.DECODE, 1), (Mode.VERIFY, geometry.draft.num_draft_tokens)):
            if rows == 1 or facts.verifies:
                run = partial(_replays, backend, device, facts, geometry, mode, rows)
                found.append(Item(CAPTURED, f"{case}-{mode.value}", partial(run, 1), AS_CAPTURED))
                found.append(Item(REPLAY, f"{case}-{mode.value}", partial(run, 4), AS_CAPTURED))
    return found


def _geometry(facts: MlaFacts, latent: int, rest: int, heads: int, page: int) -> Geometry:
    shape = AttentionShape(
        heads,
        1,
        latent + rest,
        page,
        facts.dtype,
        facts.dtype,
        softmax_scale=SCALE,
        value_dim=latent,
        latent=True,
    )
    limits = Limits(max_num_reqs=6, max_context_len=1300, max_extend_tokens=64, capture_batch_sizes=(CAPTURED_SIZE,))
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    return Geometry.create(shape, limits, DraftShape(topk=1, num_steps=4, num_draft_tokens=5), modes=modes)


def _forwards(facts: MlaFacts, geometry: Geometry) -> list[ForwardCase]:
    """Return forwards: decodes, also of long requests, verifies, prompts, and steps that mix decodes and prompts."""
    page = geometry.attention.page_size
    lens = (0, page - 1, page, 250)
    found = [uniform("decode", geometry, Mode.DECODE, lens, len(lens))]
    found.append(uniform("long", geometry, Mode.DECODE, (1200, 3), 2))
    if facts.verifies:
        found.append(uniform("verify", geometry, Mode.VERIFY, lens, len(lens), tree="chain"))
    if facts.prompts:
        found.append(ragged("prompts", geometry, (0, 0), (19, 7), seed=1))
        found.append(ragged("mixed", geometry, (page, 131, 0), (1, 1, 20), seed=2))
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
        self.q = torch.randn(step.num_rows, a.num_qo_heads, a.head_dim, generator=make).to(dtype).to(self.device)
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
        changed = (memory.flatten(0, 1) != wanted).any(-1).nonzero().flatten().tolist()
        if changed:
            raise ContractViolation(
                "the KV memory differs from the one where each row was stored at its own slot",
                batch=step,
                got=f"differences at slots {changed[:8]}",
                expected="no difference",
            )
        for number, row in enumerate(step.forward.rows):
            keys = wanted[list(step.truth.visible[row])].double()
            scores = (self.q[number].double() @ keys.T) * SCALE
            right = scores.softmax(-1) @ keys[:, : a.value_width]
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
        common = subject.prepare(step, len(step.forward.requests), step.num_rows, longest)
        with subject.layers.current():
            metadata = subject.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
        return subject.layers.attention(metadata, subject.slots(step.num_rows), subject.q, subject.rows)

    subject.check(step, run)


def _replays(backend: Any, device: str, facts: MlaFacts, geometry: Geometry, mode: Mode, rows: int, count: int) -> None:
    """Capture metadata for `CAPTURED_SIZE` requests, then run `count` steps of other lengths with that metadata."""
    if device != "cpu":
        raise NotAsked("MLA layers are captured on a CPU only, where the captured metadata stands for the graph")
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
        raise NotServed(f"full graphs of {mode.value}: the backend declares {support.name}")
    total = CAPTURED_SIZE * rows
    subject.buffers.dummy(rows, CAPTURED_SIZE)
    common = subject.buffers.metadata(CAPTURED_SIZE, total, rows, max_model_len(geometry))
    with subject.layers.current():
        captured = subject.layers.builder.build_for_cudagraph_capture(common)
    for number, step in enumerate(steps):
        subject.fill(step, number)

        def run(step: Step = step) -> torch.Tensor:
            common = subject.prepare(step, CAPTURED_SIZE, total, rows)
            with subject.layers.current():
                subject.layers.builder.build(common_prefix_len=0, common_attn_metadata=common)
            return subject.layers.attention(captured, subject.slots(total), subject.q, subject.rows)

        subject.check(step, run)
