"""Makes steps as vLLM's tensors, with their right outputs by dense float64 attention, without code of the adapter."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass, replace

import torch

from draftmark import LAYOUT_FORMS, AttentionShape, DeviceProfile, Form, load
from draftmark.runtime import KVCache
from draftmark_engines import EngineLimits
from draftmark_vllm.batch_runs import BatchRun, split_decodes_prefills
from draftmark_vllm.bound_backends import BoundBackends
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.step import Step, StepBuffers

MAX_REQS, MAX_LEN, MAX_TOKENS = 6, 96, 160


@dataclass(frozen=True)
class Request:
    """Describes a request: its committed tokens, and its rows in this step. Rows in `unstored` have slot -1."""

    prefix: int
    rows: int
    unstored: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Describes one step: its requests, its padding, and the length bounds on the host.

    Attributes:
        padding: padding requests of a full graph, each with the rows of a live request.
        surplus: rows with slot -1 after the last request, as in a step padded to a captured number of rows.
        loose: host bounds minus lengths; None if the host has no bounds.
    """

    shape: AttentionShape
    requests: tuple[Request, ...]
    verify_rows: int
    padding: int = 0
    surplus: int = 0
    loose: int | None = 0
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"{self.shape}\n verify_rows {self.verify_rows}, padding {self.padding}, surplus {self.surplus}, loose "
            f"{self.loose}\n " + "\n ".join(map(str, self.requests))
        )


def limits(verify_rows: int) -> EngineLimits:
    """Return limits that are large enough for every problem."""
    return EngineLimits(MAX_REQS, MAX_LEN, MAX_TOKENS, verify_rows, host_lag=verify_rows > 1)


def random_problem(seed: int, **attention: object) -> Problem:
    """Return a random step: decodes, verifies, uneven rows, prompt chunks, a mix in any order, or a padded capture."""
    rng = random.Random(seed)
    verify_rows = rng.choice((1, 3, 5))
    shape = AttentionShape(
        **{
            "num_qo_heads": 4,
            "num_kv_heads": rng.choice((1, 2, 4)),
            "head_dim": 16,
            "page_size": rng.choice((16, 32)),
            "q_dtype": "float32",
            "kv_dtype": "float32",
            "softmax_scale": rng.choice((None, 0.3)),
            "window_left": rng.choice((-1, -1, 0, 7, 31)),
            "logits_soft_cap": rng.choice((0.0, 0.0, 5.0)),
            **attention,
        }
    )
    kind = rng.choice(("decode", "verify", "uneven", "extend", "mixed", "mixed"))
    rows = {
        "decode": lambda: 1,
        "verify": lambda: verify_rows,
        "uneven": lambda: rng.randint(1, verify_rows),
        "extend": lambda: rng.randint(1, 20),
        "mixed": lambda: rng.randint(1, verify_rows),
    }[kind]
    lens = [rows() for _ in range(rng.randint(1, MAX_REQS - 1))]
    if kind == "mixed":
        lens = lens[: MAX_REQS - 2] + [rng.randint(verify_rows + 1, 30) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.5:  # runner V1 does not sort requests
            rng.shuffle(lens)
    requests = []
    for count in lens:
        prefix = rng.choice((0, rng.randint(0, MAX_LEN - count), MAX_LEN - count))
        unstored = tuple(row for row in range(count) if rng.random() < 0.1)
        requests.append(Request(prefix, count, unstored))
    uniform = len(set(lens)) == 1 and lens[0] in (1, verify_rows)
    padding = rng.randint(0, MAX_REQS - len(lens)) if uniform else 0
    surplus = 0 if padding else rng.choice((0, 0, 3))
    return Problem(shape, tuple(requests), verify_rows, padding, surplus, rng.choice((0, 0, 4, 200, None)), seed)


class StepData:
    """Holds the tensors of a `Problem` as vLLM passes them, and the right output.

    Attributes:
        step: input of the adapter. pages: vLLM's KV memory ``[pages, 2 · KV heads, page_size, head_dim]``.
        q, k, v: rows of the step, surplus and padding included. wanted: right output of the live rows, float64.
    """

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        self.problem, a = problem, problem.shape
        generator = torch.Generator().manual_seed(problem.seed)
        dtype = getattr(torch, a.q_dtype)
        live = [one.rows for one in problem.requests]
        self.num_rows = sum(live) + problem.padding * (live[0] if live else 0) + problem.surplus
        shapes = ((a.num_qo_heads,), (a.num_kv_heads,), (a.num_kv_heads,))
        self.q, self.k, self.v = (
            torch.randn(self.num_rows, *heads, a.head_dim, generator=generator).to(dtype).to(device) for heads in shapes
        )
        self._fill(generator, dtype, device)
        self.sinks = 2 + torch.randn(a.num_qo_heads, generator=generator).to(device) if a.sinks else None
        self.wanted = self._answer()

    def _fill(self, generator: torch.Generator, dtype: torch.dtype, device: str) -> None:
        problem, a = self.problem, self.problem.shape
        # vLLM's page table can be wider than a request needs, so 3 columns are unused.
        reqs, width = len(problem.requests) + problem.padding, -(-MAX_LEN // a.page_size) + 3
        each = -(-MAX_LEN // a.page_size)
        ids = torch.randperm(len(problem.requests) * each, generator=generator).view(-1, each) + 1
        table = torch.zeros(reqs, width, dtype=torch.int32)
        table[: len(ids), :each] = ids.int()
        # Unwritten memory is NaN, so a row that reads it becomes NaN. Page 0 starts as zeros, as in vLLM.
        memory = torch.full((int(ids.max()) + 1, a.page_size, 2 * a.num_kv_heads, a.head_dim), float("nan"))
        memory[0] = 0
        memory = memory.to(dtype)
        slots, self.history = torch.full((self.num_rows,), -1, dtype=torch.int64), []
        first = 0
        for number, one in enumerate(problem.requests):
            old = torch.randn(2, one.prefix, a.num_kv_heads, a.head_dim, generator=generator).to(dtype)
            rows = slice(first, first + one.rows)
            kv = torch.cat([old, torch.stack([self.k[rows].cpu(), self.v[rows].cpu()])], 1)
            self.history.append(kv)
            for position in range(one.prefix + one.rows):
                page, offset = int(table[number, position // a.page_size]), position % a.page_size
                row = position - one.prefix
                if row < 0 or row in one.unstored:
                    memory[page, offset] = kv[:, position].reshape(2 * a.num_kv_heads, a.head_dim)
                else:
                    slots[first + row] = page * a.page_size + offset
            first += one.rows
        self.pages = memory.to(device).transpose(1, 2)
        self.step = self._step(table.to(device), slots.to(device), device)

    def _step(self, table: torch.Tensor, slots: torch.Tensor, device: str) -> Step:
        problem = self.problem
        starts = [0]
        for one in problem.requests:
            starts.append(starts[-1] + one.rows)
        starts += [starts[-1]] * problem.padding
        lens = [one.prefix + one.rows for one in problem.requests] + [0] * problem.padding
        return Step(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            query_start_host=tuple(starts),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            page_table=table,
            slots=slots,
            num_rows=self.num_rows,
            seq_bounds=None if problem.loose is None else tuple(n + problem.loose for n in lens),
            exact=problem.loose == 0 and problem.verify_rows == 1,
        )

    def _answer(self) -> torch.Tensor:
        a, first, found = self.problem.shape, 0, []
        scale = a.head_dim**-0.5 if a.softmax_scale is None else a.softmax_scale
        for one, kv in zip(self.problem.requests, self.history, strict=True):
            q = self.q[first : first + one.rows].cpu().double()
            k, v = kv.double().repeat_interleave(a.group_size, 2)
            scores = torch.einsum("qhd,nhd->hqn", q, k) * scale
            if a.logits_soft_cap:
                scores = a.logits_soft_cap * torch.tanh(scores / a.logits_soft_cap)
            row, key = torch.arange(one.rows)[:, None] + one.prefix, torch.arange(one.prefix + one.rows)
            hidden = key > row
            if a.window_left >= 0:
                hidden |= key < row - a.window_left
            column = torch.full((a.num_qo_heads,), float("-inf")) if self.sinks is None else self.sinks.cpu()
            column = column.double()[:, None, None].expand(-1, one.rows, 1)
            weights = torch.cat([scores.masked_fill(hidden, float("-inf")), column], -1).softmax(-1)[..., :-1]
            found.append(torch.einsum("hqn,nhd->qhd", weights, v))
            first += one.rows
        return torch.cat(found)


def bound_backends(
    problem: Problem, backend: str = "reference", device: str = "cpu", forms: tuple[Form, ...] = LAYOUT_FORMS
) -> BoundBackends:
    """Open the backends for a problem. `forms` lists the vLLM input formats (`Form`) to use."""
    loaded = copy(load(backend))
    loaded.info = replace(loaded.info, forms=tuple(one for one in loaded.info.forms if one in forms))
    return BoundBackends(loaded, [problem.shape], limits(problem.verify_rows), DeviceProfile(), torch.device(device))


def separate_halves(pages: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return a copy of `pages` in the layout with separate halves: K of all pages, then V of all pages."""
    halves = [one.transpose(1, 2).flatten(2) for one in (pages[:, :num_kv_heads], pages[:, num_kv_heads:])]
    return torch.stack(halves).transpose(0, 1)


def attention(
    made: StepData,
    ours: BoundBackends,
    buffers: StepBuffers,
    cache: KVCache | None = None,
    shape: AttentionShape | None = None,
    runs: tuple[BatchRun, ...] | None = None,
) -> torch.Tensor:
    """Run a step as vLLM's builder and layer do, on `cache` or by default on its own pages. Return its live rows.

    `runs` replaces the builder's usual split of the step.
    """
    shape, out = shape or made.problem.shape, torch.full_like(made.q, float("nan"))
    cache = replace(cache or kv_cache(made.pages, shape.num_kv_heads, None, None), sinks=made.sinks)
    verify_rows, ragged = made.problem.verify_rows, ours.any.ragged
    cut = runs or split_decodes_prefills(made.step.query_start_host, made.step.num_rows, verify_rows, ragged)
    parts = []
    for run in cut:
        batch = buffers.forward(made.step, run, ours.geometry(run.mode))
        ours.prepare(batch)
        parts.append((slice(run.first_row, run.first_row + run.num_rows), batch, ours.of(run.mode)[shape]))
    for rows, batch, one in parts:
        one.write_kv(made.k[rows], made.v[rows], cache, batch)
    for rows, batch, one in parts:
        one.attend(made.q[rows], cache, batch, out[rows])
    return out[: len(made.wanted)]
