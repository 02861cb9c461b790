"""Compares every recurrent layer of a running server with float64, forward by forward, also inside CUDA graphs.

The check copies what a layer reads and writes. A captured graph repeats the copies, so each replay is compared too. It
serves Gated DeltaNet layers (`draftmark_sglang.state_layers`). The stages of a row:

    lengths    committed lengths and slots of the batch, against SGLang's own
    kept       state and window at the start of a forward, against those after the forward before
    inputs     q, k, v, decay and write strength, against convolution and gates in float64
    output     output rows, against the recurrence in float64 over the layer's own inputs
    state      state and window after a prompt or a decode
    commit     state and window after a commit
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from draftmark import Mode
from draftmark.runtime import Tree

LARGE = 0.02
"""Error relative to the largest number, above which a stage is wrong. bfloat16 rounds by 0.004."""


@dataclass
class Seen:
    """Copies of what one layer read and wrote in its last forward."""

    x: torch.Tensor
    gates: list[torch.Tensor]
    slots: torch.Tensor
    prefix: torch.Tensor
    indptr: torch.Tensor
    parents: torch.Tensor | None
    state: torch.Tensor
    window: torch.Tensor
    inputs: Any = None
    out: torch.Tensor | None = None
    state_after: torch.Tensor | None = None
    window_after: torch.Tensor | None = None

    def of_live(self, live: int) -> Seen:
        """Return the copies of the first `live` requests."""
        rows = int(self.indptr[live])
        assert self.out is not None and self.state_after is not None and self.window_after is not None
        return Seen(
            self.x[:rows], [one[:rows] for one in self.gates], self.slots[:live], self.prefix[:live],
            self.indptr[: live + 1], None if self.parents is None else self.parents[:live], self.state[:live],
            self.window[:live], [one[:rows] for one in self.inputs], self.out[:rows], self.state_after[:live],
            self.window_after[:live],
        )  # fmt: skip


class StateCheck:
    """Largest errors of each mode, layer and stage.

    Attributes:
        errors: by (mode, layer, stage): largest error, and the number of the first forward with an error above LARGE.
        forwards: forwards that were compared.
    """

    def __init__(self) -> None:
        self.errors: dict[tuple[str, int, str], list[Any]] = {}
        self.forwards = 0
        self._seen: dict[tuple[Any, ...], Seen] = {}
        self._after: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layers: dict[int, Any] = {}
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def install(self) -> None:
        """Replace the methods of SGLang and the adapter that run and commit layers."""
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
        from sglang.srt.model_executor.model_runner import ModelRunner

        from draftmark_sglang.state_layers import StateLayers

        layers: Any = StateLayers
        run, commit = layers.run, layers.commit
        forward, made = ModelRunner.forward, RadixLinearAttention.__init__
        check = self

        def new_init(layer: Any, *arguments: Any, **named: Any) -> None:
            made(layer, *arguments, **named)
            check._layers[layer.layer_id] = layer

        def new_run(states: Any, layer_id: int, x: Any, weight: Any, bias: Any, gates: Any, inputs: Any) -> Any:
            return check._run(run, states, layer_id, x, weight, bias, gates, inputs)

        def new_commit(states: Any, lens: Any, index: Any, saves: Any) -> None:
            check._commit(commit, states, lens, index, saves)

        def new_forward(runner: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            result = forward(runner, batch, *arguments, **named)
            states = getattr(getattr(runner.attn_backend, "full_attn_backend", None), "states", None)
            if states is not None and not batch.forward_mode.is_idle():
                check._compare(states, batch)
            return result

        RadixLinearAttention.__init__ = new_init
        layers.run, layers.commit, ModelRunner.forward = new_run, new_commit, new_forward

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each mode, layer and stage."""
        return [
            dict(mode=mode, layer=layer, stage=stage, error=error, first_forward=first, compared=count)
            for (mode, layer, stage), (error, first, count) in sorted(self.errors.items())
        ]

    # -- copies, which graphs repeat ----------------------------------------------------------------------

    def _run(
        self, run: Any, states: Any, layer_id: int, x: Any, weight: Any, bias: Any, gates: Any, inputs: Any
    ) -> Any:
        batch = states._pieces[0].batch
        cache, slots, rows = states.pool.layers[_index(states, layer_id)], batch.state_slots.long(), batch.num_rows
        parents = batch.tail.parents if isinstance(batch.tail, Tree) else None
        seen = Seen(
            x[:rows].clone(), [one[:rows].clone() for one in gates], slots.clone(), batch.prefix_lens.clone(),
            batch.q_indptr.clone(), None if parents is None else parents.clone(), cache.state[slots], cache.conv[slots],
        )  # fmt: skip

        def copied(*arguments: Any) -> Any:
            own = inputs(*arguments)
            seen.inputs = [one.clone() for one in own[:5]]
            return own

        out = run(states, layer_id, x, weight, bias, gates, copied)
        seen.out, seen.state_after, seen.window_after = out[:rows].clone(), cache.state[slots], cache.conv[slots]
        self._seen[batch.mode, batch.padded_reqs, layer_id] = seen
        return out

    # -- comparisons --------------------------------------------------------------------------------------

    def _compare(self, states: Any, forward: Any) -> None:
        _wait()
        self.forwards += 1
        batch = states._pieces[0].batch
        live = forward.batch_size
        if batch.mode is not Mode.EXTEND:
            counted = 1 if batch.mode is Mode.DECODE else 0
            mapped = states._requests.req_index_to_mamba_index_mapping[forward.req_pool_indices[:live]]
            wrong = (batch.prefix_lens[:live] != forward.seq_lens[:live] - counted).sum()
            wrong += (batch.state_slots[:live] != mapped).sum() + (batch.state_slots[live:] != 0).sum()
            self._note(batch.mode, -1, "lengths", float(wrong))
        for (mode, reqs, layer_id), seen in self._seen.items():
            if mode is batch.mode and reqs == batch.padded_reqs:
                self._compare_layer(states, mode, layer_id, seen.of_live(live))
        self._keep(states)

    def _compare_layer(self, states: Any, mode: Mode, layer_id: int, seen: Seen) -> None:
        layer, number = self._layers[layer_id], _index(states, layer_id)
        old = (seen.prefix > 0).nonzero()[:, 0]
        if self._kept is not None and len(old):
            slots = seen.slots[old]
            for kept, found in zip(self._kept, (seen.state, seen.window), strict=True):
                self._note(mode, layer_id, "kept", _error(found[old], kept[number][slots]))
        windows = _windows(seen)
        expected = _inputs(layer, seen, windows)
        for found, want in zip(seen.inputs, expected, strict=True):
            self._note(mode, layer_id, "inputs", _error(found.view(want.shape), want))
        want, states_of_rows = _recurrence(seen)
        if mode is Mode.VERIFY:
            self._after[layer_id] = states_of_rows, windows
        self._note(mode, layer_id, "output", _error(_there(seen.out), want))
        if mode is not Mode.VERIFY:
            last = seen.indptr[1:].long() - 1
            self._note(mode, layer_id, "state", _error(_there(seen.state_after), states_of_rows[last]))
            self._note(mode, layer_id, "state", _error(_there(seen.window_after), windows[last]))

    def _commit(self, commit: Any, states: Any, lens: torch.Tensor, index: torch.Tensor, saves: Any) -> None:
        commit(states, lens, index, saves)
        _wait()
        batch, live = states._pieces[0].batch, len(lens)
        last = index[:, : states.geometry.draft.num_draft_tokens].gather(1, (lens[:, None] - 1).long().clamp(min=0))[
            :, 0
        ]
        for (mode, reqs, layer_id), seen in self._seen.items():
            if mode is not Mode.VERIFY or reqs != batch.padded_reqs:
                continue
            cache, slots = states.pool.layers[_index(states, layer_id)], seen.slots[:live]
            moved = (lens > 0)[:, None, None]
            states_of_rows, windows = self._after[layer_id]
            state = torch.where(moved[..., None], states_of_rows[last.long()], seen.state[:live].double())
            window = torch.where(moved, windows[last.long()], seen.window[:live].double())
            self._note(mode, layer_id, "commit", _error(cache.state[slots], state))
            self._note(mode, layer_id, "commit", _error(cache.conv[slots], window))
        self._keep(states)

    def _keep(self, states: Any) -> None:
        self._kept = states.pool.state.clone(), states.pool.conv.clone()

    def _note(self, mode: Mode, layer: int, stage: str, error: float) -> None:
        row = self.errors.setdefault((mode.name, layer, stage), [0.0, None, 0])
        bad = not error <= LARGE
        if bad and row[1] is None:
            row[1] = self.forwards
        row[0], row[2] = max(row[0], error) if error == error else float("inf"), row[2] + 1


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the layer has run"
    return tensor


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _index(states: Any, layer_id: int) -> int:
    return int(states._requests.mamba2_layer_index(layer_id))


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest error relative to the largest expected number, 0 for nothing to compare."""
    if not want.numel():
        return 0.0
    scale = want.double().abs().amax().clamp(min=1e-30)
    return float((found.double() - want.double()).abs().amax() / scale)


def _histories(seen: Seen) -> list[tuple[int, int]]:
    """Return (request, parent row or -1) of each row; the parent of a row without ancestors in its tail is -1."""
    indptr, found = seen.indptr.tolist(), []
    parents = None if seen.parents is None else seen.parents.flatten().tolist()
    for request, (first, end) in enumerate(pairwise(indptr)):
        for row in range(first, end):
            above = row - first - 1 if parents is None else parents[row]
            found.append((request, first + above if above >= 0 else -1))
    return found


def _windows(seen: Seen) -> torch.Tensor:
    """Return the window after each row, float64 ``[rows, channels, columns]``."""
    start = torch.where((seen.prefix > 0)[:, None, None], seen.window.double(), 0.0)
    found: list[torch.Tensor] = []
    for row, (request, parent) in enumerate(_histories(seen)):
        before = start[request] if parent < 0 else found[parent]
        found.append(torch.cat([before[:, 1:], seen.x[row].double()[:, None]], 1))
    return torch.stack(found)


def _inputs(layer: Any, seen: Seen, windows: torch.Tensor) -> list[torch.Tensor]:
    """Return q, k, v, decay and write strength of each row, in float64 with the roundings of the rows' dtype."""
    start = torch.where((seen.prefix > 0)[:, None, None], seen.window.double(), 0.0)
    weight = layer.conv_weights.double()
    firsts = torch.stack(
        [(start[r] if above < 0 else windows[above])[:, :1] for r, above in _histories(seen)]
    )  # the column that has left the window of the row
    mixed = (torch.cat([firsts, windows], 2) * weight).sum(2)
    if layer.bias is not None:
        mixed += layer.bias.double()
    mixed = torch.nn.functional.silu(mixed).to(seen.x.dtype).double()
    q, k, v = torch.split(mixed, [layer.q_dim, layer.k_dim, layer.v_dim], 1)
    q, k = (one.reshape(len(one), -1, layer.head_k_dim) for one in (q, k))
    q, k = ((one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for one in (q, k))
    a, b = (one.double() for one in seen.gates)
    decay = -layer.A_log.double().exp() * torch.nn.functional.softplus(a + layer.dt_bias.double())
    return [q * layer.head_k_dim**-0.5, k, v.reshape(len(v), layer.num_v_heads, -1), decay, b.sigmoid()]


def _recurrence(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the state after each row, in float64, from the layer's own inputs."""
    q, k, v, decay, beta = (one.double() for one in seen.inputs)
    groups = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    start = torch.where((seen.prefix > 0)[:, None, None, None], seen.state.double(), 0.0)
    found: list[torch.Tensor] = []
    outputs = []
    for row, (request, parent) in enumerate(_histories(seen)):
        held = (start[request] if parent < 0 else found[parent]) * decay[row].exp()[:, None, None]
        update = beta[row][:, None] * (v[row] - (held * k[row][:, None]).sum(-1))
        held = held + update[..., None] * k[row][:, None]
        outputs.append((held * q[row][:, None]).sum(-1))
        found.append(held)
    return torch.stack(outputs), torch.stack(found)
