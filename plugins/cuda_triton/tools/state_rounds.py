"""Random rounds of layers with recurrent state, compared with a float64 loop over rows that shares no code with them.

Slots without a prefix hold NaN, outputs start as NaN, and slots that a round must not write keep their bytes. Layers
share the scratch memory of a verify, and run without a wait between them. So a kernel that starts too early is caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from draftmark import Gate, Mode, Recurrence, StateGeometry, load
from draftmark.lengths import Exact
from draftmark.runtime import BatchBuffers, ForwardBatch, StatePool, VerifyResult, ragged, write_tail
from plugins.cuda_triton.tools.state_layers import LAYERS, REQUESTS

ROUNDOFF = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 8e-3}
"""Largest relative error by norm, by dtype."""


@dataclass
class Row:
    """One row's inputs in every layer, in float64, and the values after it: states, windows."""

    given: dict[str, torch.Tensor]
    state: torch.Tensor | None = None
    window: torch.Tensor | None = None


class Rounds:
    """Requests on one backend, with a float64 copy of each slot; every round is compared with it.

    Attributes:
        worst: largest relative errors by norm, by what was compared.
    """

    def __init__(self, geometry: StateGeometry, device: str, seed: int) -> None:
        self.geometry, self.shape, self.device = geometry, geometry.state, device
        self.random, self.dice = torch.Generator(device).manual_seed(seed), random.Random(seed)
        self.backend = load("cuda_triton").open_state(geometry, device, guard=device == "cpu", checked=False)
        self.pool = StatePool(geometry, 2 * REQUESTS + 2, 1, device)
        self.buffers = BatchBuffers(geometry, device)
        self.worst: dict[str, float] = {}
        s = self.shape
        self.weight = self._draw(LAYERS, s.conv_channels, max(1, s.conv_kernel)).to(self._dtype(s.dtype))
        self.bias = self._draw(LAYERS, s.conv_channels).to(self._dtype(s.dtype)) if self.dice.random() < 0.5 else None
        scale = torch.tensor([(1e-4, 1.0, 12.0)[head % 3] for head in range(s.num_heads)], device=device)
        self.decay_scale = scale.double()
        self.constant = -self._draw(LAYERS, s.num_heads).abs() * self.decay_scale
        self.lens = [0] * REQUESTS
        self.slots = self.dice.sample(range(1, 2 * REQUESTS + 2), 2 * REQUESTS)
        self.saves, self.slots = self.slots[REQUESTS:], self.slots[:REQUESTS]
        self._restart(range(REQUESTS))

    def _restart(self, requests: Sequence[int]) -> None:
        """Give requests a prefix of no token, or a random one."""
        s, w = self.shape, self.geometry.window
        for r in requests:
            self.lens[r] = self.dice.choice((0, 0, 1, self.dice.randrange(1, 900)))
            fill = float("nan") if self.lens[r] == 0 else 0.0
            state = self._draw(LAYERS, s.num_heads, s.value_dim, s.key_dim) + fill
            window = self._draw(LAYERS, s.conv_channels, w) + fill
            self.pool.state[:, self.slots[r]] = state.to(self.pool.state.dtype)
            self.pool.conv[:, self.slots[r]] = window.to(self.pool.conv.dtype)

    # -- rounds -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run one round of a random mode."""
        if self.dice.random() < 0.3:
            self._restart([self.dice.randrange(REQUESTS)])
        mode = self.dice.choice([Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.RAGGED_VERIFY, Mode.DECODE, Mode.EXTEND])
        nodes, live = self.geometry.draft.num_draft_tokens, self.dice.randrange(1, REQUESTS + 1)
        requests = self.dice.sample(range(REQUESTS), live)
        tree = self.dice.random() < 0.7
        if mode is Mode.EXTEND:
            counts = [self.dice.choice((0, 1, 2, self.dice.randrange(1, 75))) for _ in requests]
            counts[0] = max(1, counts[0])
        elif mode is Mode.RAGGED_VERIFY:
            counts = [self.dice.randrange(nodes + 1) for _ in requests]
        else:
            counts = [1 if mode is Mode.DECODE else nodes] * live
        is_tree = tree and mode in (Mode.VERIFY, Mode.RAGGED_VERIFY)
        parents = [[self._parent(j, is_tree) for j in range(count)] for count in counts]
        batch = self._batch(mode, requests, counts, parents, is_tree)
        self._compare(batch, requests, parents)

    def _parent(self, row: int, tree: bool) -> int:
        return self.dice.randrange(max(0, row - 9), row) if tree and row else row - 1

    def _batch(
        self, mode: Mode, requests: list[int], counts: list[int], parents: list[list[int]], tree: bool
    ) -> ForwardBatch:
        """Return a batch of the requests, padded in graph modes."""

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        lens, slots = [self.lens[r] for r in requests], [self.slots[r] for r in requests]
        if mode is Mode.EXTEND:
            table = torch.zeros(len(requests), 0, dtype=torch.int32, device=self.device)
            return ragged(self.geometry, ints(lens), table, tuple(counts), Exact(tuple(lens)), state_slots=ints(slots))
        padded = REQUESTS + 1
        more = padded - len(requests)
        if mode is Mode.RAGGED_VERIFY:
            budget = next(one for one in self.geometry.limits.row_budgets if one >= sum(counts))
            batch = self.buffers.ragged_verify(budget, len(requests), Exact(tuple(lens)), tree=tree, padded_reqs=padded)
            starts = torch.tensor([0, *counts, *[0] * more]).cumsum(0)
            batch.q_indptr.copy_(starts.to(batch.q_indptr))
            if tree:
                self._write_tree(batch, [one for one in parents if one])
        else:
            batch = self.buffers.uniform(mode, 0, padded, len(requests), Exact(tuple(lens)), tree=tree)
        batch.prefix_lens.copy_(ints(lens + [0] * more))
        batch.state_slots.copy_(ints(slots + [0] * more))
        if mode is not Mode.RAGGED_VERIFY:
            nodes = batch.q_lens[0]
            rows = torch.tensor(parents + [[j - 1 for j in range(nodes)]] * more, device=self.device)
            write_tail(batch, self.geometry, rows if tree else None)
        return batch

    def _write_tree(self, batch: ForwardBatch, parents: list[list[int]]) -> None:
        """Write masks and parents of ragged rows; what follows is stale."""
        tail: Any = batch.tail
        tail.mask.fill_(-1)
        tail.parents.fill_(99)
        lines, flat = [], []
        for one in parents:
            masks: list[int] = []
            for row, parent in enumerate(one):
                masks.append((masks[parent] if parent >= 0 else 0) | 1 << row)
            lines += masks
            flat += one
        words = [[line >> 32 * word & 0xFFFFFFFF for word in range(self.geometry.mask_words)] for line in lines]
        signed = [[word - 2**32 if word >= 2**31 else word for word in line] for line in words]
        if flat:
            tail.mask[: len(flat)] = torch.tensor(signed, dtype=torch.int32)
            tail.parents[: len(flat)] = torch.tensor(flat, dtype=torch.int32)

    # -- comparison ---------------------------------------------------------------------------------------

    def _compare(self, batch: ForwardBatch, requests: list[int], parents: list[list[int]]) -> None:
        given = self._inputs(batch.num_rows)
        starts = [sum(map(len, parents[:i])) for i in range(len(parents) + 1)]
        before = self.pool.state.clone(), self.pool.conv.clone()
        expected = [
            self._rows(r, parents[i], {name: one[:, starts[i] : starts[i + 1]] for name, one in given.items()})
            for i, r in enumerate(requests)
        ]
        calls, outs = self._calls(batch, given)
        self.backend.plan(batch)
        self._launch(calls, batch.mode is not Mode.EXTEND)
        for what, name in (("convolution", "conv_out"), ("output", "out")):
            for layer, out in enumerate(outs[what]):
                self._check(what, out, [row.given[name][layer] for one in expected for row in one])
        self._commit(batch, requests, parents, expected, before)

    def _calls(
        self, batch: ForwardBatch, given: dict[str, torch.Tensor]
    ) -> tuple[list[Callable[[], None]], dict[str, list[torch.Tensor]]]:
        """Return the calls of a forward in every layer, and the outputs that they write, filled with NaN."""
        s, n = self.shape, batch.num_rows
        calls: list[Callable[[], None]] = [partial(self.backend.write_metadata, batch)]
        outs: dict[str, list[torch.Tensor]] = {"convolution": [], "output": []}
        for layer, cache in enumerate(self.pool.layers):
            x = {name: self._as_given(name, one[layer]) for name, one in given.items()}
            if s.conv_kernel:
                out = torch.full_like(x["x"], float("nan"))
                bias = None if self.bias is None else self.bias[layer]
                calls.append(partial(self.backend.convolve, x["x"], self.weight[layer], bias, cache, batch, out))
                outs["convolution"].append(out)
            if s.recurrence is not Recurrence.NONE:
                out = torch.full((n, s.num_heads, s.value_dim), float("nan"), dtype=x["v"].dtype, device=self.device)
                decay = self.constant[layer].float() if s.gate is Gate.CONSTANT else x["log_decay"]
                beta = x["beta"] if s.recurrence is Recurrence.DELTA else None
                calls.append(partial(self.backend.recur, x["q"], x["k"], x["v"], decay, beta, cache, batch, out))
                outs["output"].append(out)
        return calls, outs

    def _launch(self, calls: Sequence[Callable[[], None]], capturable: bool) -> None:
        """Make calls one after another without waiting, in half of the rounds on a GPU as one CUDA graph."""
        if self.device == "cpu" or not capturable or self.dice.random() < 0.5:
            for call in calls:
                call()
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()

    def _commit(
        self, batch: ForwardBatch, requests: list[int], parents: list[list[int]], expected: list[list[Row]], before: Any
    ) -> None:
        """Commit random paths, and compare every slot."""
        padded, nodes = batch.padded_reqs, self.geometry.draft.num_draft_tokens
        accepted, paths = None, [list(range(len(one))) for one in parents]
        if batch.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY):
            assert all(
                torch.equal(one.view(torch.uint8), now.view(torch.uint8))
                for one, now in zip(before, (self.pool.state, self.pool.conv), strict=True)
            ), "a verify wrote a slot"
            paths = [self._path(one) for one in parents]
            index = torch.randint(0, nodes, (padded, nodes), generator=self.random, device=self.device)
            counts = torch.ones(padded, dtype=torch.int64)
            for i, path in enumerate(paths):
                index[i, : len(path)] = torch.tensor(path, dtype=torch.int64)
                counts[i] = len(path) if parents[i] else 1
            counts = counts.to(self.device)
            accepted = VerifyResult(torch.zeros_like(index), counts, index)
        lends = [self.dice.random() < 0.7 for _ in requests]
        saves = [self.saves[r] if lends[i] else 0 for i, r in enumerate(requests)] + [0] * (padded - len(requests))
        save_slots = torch.tensor(saves, dtype=torch.int32, device=self.device)
        self._launch([partial(self.backend.commit, self.pool, batch, accepted, save_slots)], True)
        written, interval = {0}, self.geometry.limits.state_interval
        kind = "a prompt" if batch.mode is Mode.EXTEND else "rows"
        rounds = batch.mode is Mode.EXTEND and self.shape.round_prompts
        limit = 3 * ROUNDOFF[self.shape.dtype] if rounds else 0.0
        for i, r in enumerate(requests):
            length, path = self.lens[r], paths[i]
            reached = (length + len(path)) // interval * interval if interval else 0
            if path:
                self._check_slot(f"slot after {kind}", self.slots[r], expected[i][path[-1]], limit)
                written.add(self.slots[r])
            if reached > length and lends[i] and (accepted is not None or reached == length + len(path)):
                save = expected[i][path[reached - length - 1]]
                self._check_slot(f"checkpoint after {kind}", self.saves[r], save, limit)
                written.add(self.saves[r])
                self.slots[r], self.saves[r] = self.slots[r], self.saves[r]
            self.lens[r] += len(path)
        kept = [slot for slot in range(self.pool.num_slots) if slot not in written]
        for one, now in zip(before, (self.pool.state, self.pool.conv), strict=True):
            same = torch.equal(one[:, kept].view(torch.uint8), now[:, kept].view(torch.uint8))
            assert same, f"a slot that is not written changed: {self.geometry} {batch.mode}"

    def _path(self, parents: list[int]) -> list[int]:
        """Return a random path from a root, or none."""
        node = self.dice.randrange(-1, len(parents)) if parents else -1
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        return path if path[:1] == [0] else []

    def _rows(self, request: int, parents: list[int], given: dict[str, torch.Tensor]) -> list[Row]:
        """Return a request's rows in float64, computed one after another, in every layer."""
        s, slot = self.shape, self.slots[request]
        live = self.lens[request] > 0
        state = self.pool.state[:, slot].double() if live else torch.zeros_like(self.pool.state[:, slot]).double()
        window = self.pool.conv[:, slot].to(self._dtype(s.dtype)).double()
        root = Row({}, state, window if live else torch.zeros_like(window))
        rows: list[Row] = []
        for j, parent in enumerate(parents):
            above = rows[parent] if parent >= 0 else root
            row = Row({name: one[:, j] for name, one in given.items()})
            assert above.state is not None and above.window is not None
            if s.conv_kernel:
                taps = torch.cat((above.window, row.given["x"][..., None]), -1)
                found = (taps * self.weight.double()).sum(-1)
                found = found if self.bias is None else found + self.bias.double()
                row.given["conv_out"] = torch.nn.functional.silu(found) if s.conv_silu else found
                row.window = taps[..., 1:]
            else:
                row.window = above.window
            row.state = above.state
            if s.recurrence is not Recurrence.NONE:
                row.state, row.given["out"] = self._step(above.state, row.given)
            rows.append(row)
        return rows

    def _step(self, state: torch.Tensor, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        k, q = (given[name].repeat_interleave(s.heads_per_key, 1) for name in ("k", "q"))
        log = self.constant.float().double() if s.gate is Gate.CONSTANT else given["log_decay"]
        state = state * (log[..., None, :] if s.gate is Gate.KEY else log[..., None, None]).exp()
        write = given["v"]
        if s.recurrence is Recurrence.DELTA:
            write = given["beta"][..., None] * (write - torch.einsum("lhvk,lhk->lhv", state, k))
        state = state + write[..., None] * k[..., None, :]
        return state, torch.einsum("lhvk,lhk->lhv", state, q)

    def _check(self, what: str, out: torch.Tensor, expected: list[torch.Tensor]) -> None:
        assert bool(out.isfinite().all()), f"a row of the {what} is not finite or not written: {self.geometry}"
        if expected:
            self._measure(what, out[: len(expected)], torch.stack(expected), self.shape.dtype)

    def _check_slot(self, what: str, slot: int, row: Row, limit: float) -> None:
        s = self.shape
        assert row.state is not None and row.window is not None
        if s.recurrence is not Recurrence.NONE:
            self._measure(f"{what}'s state", self.pool.state[:, slot], row.state, s.state_dtype, limit)
        if s.conv_kernel:
            window = row.window.to(self.pool.conv.dtype)
            assert torch.equal(self.pool.conv[:, slot], window), f"the {what}'s window is wrong: {self.geometry}"

    def _measure(self, what: str, found: torch.Tensor, expected: torch.Tensor, dtype: str, limit: float = 0.0) -> None:
        error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-6))
        name = f"{what}, {dtype}"
        self.worst[name] = max(self.worst.get(name, 0.0), error)
        assert error <= max(ROUNDOFF[dtype], limit), f"the {what} is off by {error:.2e}: {self.geometry}"

    # -- inputs -------------------------------------------------------------------------------------------

    def _inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Draw rows of every layer, ``[layers, rows, …]``, rounded to the layer's dtypes, in float64."""
        s = self.shape
        found = {"x": self._draw(LAYERS, rows, s.conv_channels)}
        if s.recurrence is not Recurrence.NONE:
            keys = LAYERS, rows, s.num_key_heads, s.key_dim
            found["q"] = self._draw(*keys) * s.key_dim**-0.5
            found["k"] = torch.nn.functional.normalize(self._draw(*keys), dim=-1)
            found["v"] = self._draw(LAYERS, rows, s.num_heads, s.value_dim)
            found["beta"] = torch.sigmoid(self._draw(LAYERS, rows, s.num_heads))
            if s.gate is not Gate.CONSTANT:
                gates = (s.key_dim,) if s.gate is Gate.KEY else ()
                decays = self._draw(LAYERS, rows, s.num_heads, *gates).abs()
                found["log_decay"] = -decays * self.decay_scale.view(-1, *[1] * len(gates))
        return {name: self._as_given(name, one).double() for name, one in found.items()}

    def _as_given(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float32 if name in ("beta", "log_decay") else self._dtype(self.shape.dtype))

    @staticmethod
    def _dtype(name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, name)
        return found

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64, device=self.device)
