"""The cases on other libraries: FLA's kernels, vLLM's slots for every verified row, and SGLang's snapshots.

Each function returns a `Runner`, or raises `Absent` if the library does not serve the case. Nothing of a library is
copied: `stubs.kernels` imports its files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from draftmark import Recurrence

from .cases import Case
from .inputs import DEVICE, Inputs
from .ours import Runner
from .stubs import Absent, kernels

FLA_OPS = {"gdn": "gated_delta_rule", "kda": "kda", "mamba2": "simple_gla"}
VLLM_FLA = "vllm.third_party.flash_linear_attention.ops"
VLLM_MAMBA = "vllm.model_executor.layers.mamba.ops"
SGLANG = "sglang.kernels.ops"
MAMBA_CHUNK = 128
"""chunk_size of Nemotron-H's configuration."""


def peers(case: Case) -> dict[str, Callable[[Case, list[Inputs]], Runner]]:
    """Return the libraries that may serve a case, by backend name."""
    return {"fla": fla, "vllm-slots": vllm, "sglang-snapshots": sglang}


# -- FLA ------------------------------------------------------------------------------------------------------


def fla(case: Case, layers: list[Inputs]) -> Runner:
    """Run fla-core: `fused_recurrent` for one row of each request, `chunk` for prompts. It allocates new states."""
    if case.mode in ("chain", "tree"):
        raise Absent("FLA keeps no state of verified rows for these layers")
    operation = FLA_OPS[case.layer.name]
    way = "chunk" if case.mode == "extend" else "fused_recurrent"
    function = getattr(kernels(f"fla.ops.{operation}"), f"{way}_{operation}")
    starts = _starts(case).long()
    states = [one.state[1:].transpose(-1, -2).contiguous() for one in layers]
    results: list[Any] = [None] * len(layers)
    keys = [_expanded(case, one) for one in layers]

    def call() -> None:
        for n, (one, state, (q, k)) in enumerate(zip(layers, states, keys, strict=True)):
            arguments = [q[None], k[None], one.v[None], one.log_decay[None]]
            named = {"beta": one.beta[None]} if one.beta is not None else {}
            results[n] = function(
                *arguments, **named, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=starts
            )

    def slots() -> torch.Tensor:
        return torch.cat((layers[0].state[:1], results[0][1].transpose(-1, -2).float()))

    note = "q and k of each head, as simple_gla has no groups" if case.layer.name == "mamba2" else ""
    return Runner(call, lambda: results[0][0][0], slots, 2, 0, lambda: None, note)


def _expanded(case: Case, one: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, for each head where the library has no groups of heads."""
    if case.layer.name != "mamba2":
        return one.q, one.k
    shared = case.layer.shape.heads_per_key
    return one.q.repeat_interleave(shared, 1), one.k.repeat_interleave(shared, 1)


@cache
def _zeros(count: int) -> torch.Tensor:
    """Return zeros: A_log, dt_bias and D, which then change nothing."""
    return torch.zeros(count, device=DEVICE)


@cache
def _minus_ones(count: int) -> torch.Tensor:
    """Return Mamba2's A, for which the logarithm of the decay is -dt."""
    return -torch.ones(count, device=DEVICE)


@cache
def _starts(case: Case) -> torch.Tensor:
    """Return the first row of each request, int32 ``[requests + 1]``."""
    return torch.tensor((0, *case.rows), device=DEVICE).cumsum(0).int()


# -- vLLM -----------------------------------------------------------------------------------------------------


def vllm(case: Case, layers: list[Inputs]) -> Runner:
    """Run vLLM: its copy of FLA and of Mamba's kernels. Each verified row has a slot of its own."""
    if case.mode == "tree":
        raise Absent("vLLM verifies no trees over recurrent state")
    if case.mode == "extend":
        return _vllm_prompts(case, layers)
    width = case.nodes
    columns = torch.arange(1, 1 + case.requests * width, device=DEVICE, dtype=torch.int32).view(case.requests, width)
    count = len(case.path)
    first = columns[:, count - 1].long()
    pools = [one.state.new_empty(1 + case.requests * width, *one.state.shape[1:]) for one in layers]
    outs = [torch.empty_like(one.v) for one in layers]
    accepted = torch.full((case.requests,), count, dtype=torch.int32, device=DEVICE) if width > 1 else None
    run = _vllm_mamba if case.layer.shape.recurrence is Recurrence.DECAY else _vllm_delta

    def call() -> None:
        for n, (one, pool) in enumerate(zip(layers, pools, strict=True)):
            outs[n] = run(case, one, pool, columns, accepted, outs[n])

    def reset() -> None:
        for one, pool in zip(layers, pools, strict=True):
            pool[first] = one.state[1:]

    def slots() -> torch.Tensor:
        return torch.cat((layers[0].state[:1], pools[0][first]))

    moved = 2 if width == 1 else width + 1
    return Runner(call, lambda: outs[0], slots, moved, (width - 1) * case.all_states, reset)


def _vllm_delta(
    case: Case, one: Inputs, pool: torch.Tensor, columns: torch.Tensor, accepted: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Run one layer of a delta rule and return its outputs."""
    starts, values = _starts(case), (one.q[None], one.k[None], one.v[None], one.log_decay[None])
    assert one.beta is not None
    if case.layer.name == "gdn" and accepted is None:
        decode = kernels(f"{VLLM_FLA}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
        return _packed_decode(case, one, decode, pool, columns[:, 0], out)
    table = columns[:, 0] if accepted is None else columns
    if case.layer.name == "gdn":
        run = kernels(f"{VLLM_FLA}.fused_recurrent").fused_recurrent_gated_delta_rule
        found = run(
            *values, beta=one.beta[None], scale=1.0, initial_state=pool, inplace_final_state=True, cu_seqlens=starts,
            ssm_state_indices=table, num_accepted_tokens=accepted,
        )  # fmt: skip
    else:
        run = kernels(f"{VLLM_FLA}.kda").fused_recurrent_kda_fwd
        found = run(*values, one.beta[None], 1.0, pool, True, starts, table, accepted)
    rows: torch.Tensor = found[0][0]
    return rows


def _packed_decode(
    case: Case, one: Inputs, decode: Any, pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Run the engines' decode over packed q, k and v, with fused gates."""
    zeros, bias = _zeros(case.layer.shape.num_heads), _zeros(one.raw_decay[0].numel())
    decode(one.packed, one.raw_decay.flatten(1), one.raw_beta, zeros, bias, 1.0, pool, out[:, None], slots)
    return out


def _vllm_mamba(
    case: Case, one: Inputs, pool: torch.Tensor, columns: torch.Tensor, accepted: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Run one Mamba2 layer and return its outputs."""
    update = kernels(f"{VLLM_MAMBA}.mamba_ssm").selective_state_update
    starts = None if accepted is None else _starts(case)
    update(
        pool, *_mamba_rows(case, one), state_batch_indices=columns, out=out, num_accepted_tokens=accepted,
        cu_seqlens=starts,
    )  # fmt: skip
    return out


def _mamba_rows(case: Case, one: Inputs) -> tuple[torch.Tensor, ...]:
    """Return x, dt, A, B, C, D and dt_bias of Mamba2's update; per-head values have stride 0, as in the engines."""
    s = case.layer.shape
    heads = _zeros(s.num_heads)
    decay = _minus_ones(s.num_heads)[:, None, None].expand(-1, s.value_dim, s.key_dim)
    per_head = heads[:, None].expand(-1, s.value_dim)
    assert one.x is not None and one.dt is not None
    return one.x, one.dt[..., None].expand(-1, -1, s.value_dim), decay, one.k, one.q, per_head, per_head


def _vllm_prompts(case: Case, layers: list[Inputs]) -> Runner:
    starts, results = _starts(case), [(one.v, one.state) for one in layers]
    states = [one.state[1:].contiguous() for one in layers]
    if case.layer.name == "mamba2":
        call = _vllm_mamba_prompts(case, layers, states, results)
    else:
        name, file = ("chunk_gated_delta_rule", "chunk") if case.layer.name == "gdn" else ("chunk_kda", "kda")
        function = getattr(kernels(f"{VLLM_FLA}.{file}"), name)

        def call() -> None:
            for n, (one, state) in enumerate(zip(layers, states, strict=True)):
                assert one.beta is not None
                out, after = function(
                    one.q[None], one.k[None], one.v[None], one.log_decay[None], one.beta[None], scale=1.0,
                    initial_state=state, output_final_state=True, cu_seqlens=starts,
                )  # fmt: skip
                results[n] = out[0], after

    return Runner(
        call, lambda: results[0][0], lambda: torch.cat((layers[0].state[:1], results[0][1].float())), 2, 0, lambda: None
    )


def _vllm_mamba_prompts(
    case: Case, layers: list[Inputs], states: list[torch.Tensor], results: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Return the call of Mamba2's chunk scan. Chunks start at each request's first row."""
    scan = kernels(f"{VLLM_MAMBA}.ssd_combined").mamba_chunk_scan_combined_varlen
    cuts, owners, last = [0], list[int](), list[int]()
    for request, rows in enumerate(case.rows):
        start = cuts[-1]
        cuts += [start + min(rows, at + MAMBA_CHUNK) for at in range(0, rows, MAMBA_CHUNK)]
        owners += [request] * (len(cuts) - 1 - len(owners))
        last.append(len(owners) - 1)
    chunks, owner, ends = (torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (cuts, owners, last))
    heads, outs = _minus_ones(case.layer.shape.num_heads), [torch.empty_like(one.v) for one in layers]

    def call() -> None:
        for n, (one, state) in enumerate(zip(layers, states, strict=True)):
            after = scan(
                one.x, one.dt, heads, one.k, one.q, MAMBA_CHUNK, _starts(case), chunks, ends, owner, outs[n],
                initial_states=state, state_dtype=torch.float32,
            )  # fmt: skip
            results[n] = outs[n], after

    return call


# -- SGLang ---------------------------------------------------------------------------------------------------


def sglang(case: Case, layers: list[Inputs]) -> Runner:
    """Run SGLang: a verify stores the state after every row, and one launch copies the accepted ones to the slots."""
    if case.mode == "extend":
        return _sglang_prompts(case, layers)
    requests, width, verifies = case.requests, case.nodes, case.mode != "decode"
    shape = layers[0].state.shape[1:]
    pool = torch.stack([one.state for one in layers])
    scratch = pool.new_empty(len(layers), requests + 1, width, *shape) if verifies else None
    slots = torch.arange(1, requests + 1, dtype=torch.int32, device=DEVICE)
    entries = torch.arange(requests, dtype=torch.int32, device=DEVICE)
    steps = torch.full((requests,), case.path[-1], dtype=torch.int32, device=DEVICE)
    parents = None
    if case.mode == "tree":
        parents = torch.tensor(case.parents, dtype=torch.int64, device=DEVICE).repeat(requests, 1)
    outs = [torch.empty_like(one.v) for one in layers]
    run = _sglang_mamba if case.layer.shape.recurrence is Recurrence.DECAY else _sglang_delta
    scatter = kernels(f"{SGLANG}.mamba.mamba_state_scatter_triton").fused_mamba_state_scatter_with_mask

    def call() -> None:
        for n, one in enumerate(layers):
            held = {}
            if scratch is not None:
                held = {
                    "disable_state_update": True, "intermediate_states_buffer": scratch[n], "cache_steps": width,
                    "intermediate_state_indices": entries, "retrieve_parent_token": parents,
                }  # fmt: skip
            outs[n] = run(case, one, pool[n], slots, held, outs[n])
        if scratch is not None:
            scatter(pool, scratch, slots, steps, entries)

    def reset() -> None:
        for one, own in zip(layers, pool, strict=True):
            own.copy_(one.state)

    moved = 2 if not verifies else 2 * width + 2 if parents is not None else width + 3
    held = (requests + 1) * width * case.layer.state_bytes if verifies else 0
    return Runner(call, lambda: outs[0], lambda: pool[0], moved, held, reset)


def _sglang_delta(
    case: Case, one: Inputs, pool: torch.Tensor, slots: torch.Tensor, held: dict[str, Any], out: torch.Tensor
) -> torch.Tensor:
    """Run one layer of a delta rule and return its outputs."""
    s, key_gate = case.layer.shape, case.layer.name == "kda"
    if not held:
        name = "fused_recurrent_kda_packed_decode" if key_gate else "fused_recurrent_gated_delta_rule_packed_decode"
        decode = getattr(kernels(f"{SGLANG}.attention.fla.fused_recurrent"), name)
        return _packed_decode(case, one, decode, pool, slots, out)
    update = kernels(f"{SGLANG}.attention.linear.fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
    zeros, bias = _zeros(s.num_heads), _zeros(one.raw_decay[0].numel())
    found = update(
        zeros, one.raw_decay.flatten(1), bias, 1.0, 20.0, one.q[None], one.k[None], one.v[None], one.raw_beta, pool,
        slots, scale=1.0, cu_seqlens=_starts(case), is_kda=key_gate, **held,
    )  # fmt: skip
    rows: torch.Tensor = found.view(out.shape)
    return rows


def _sglang_mamba(
    case: Case, one: Inputs, pool: torch.Tensor, slots: torch.Tensor, held: dict[str, Any], out: torch.Tensor
) -> torch.Tensor:
    """Run one Mamba2 layer and return its outputs."""
    update = kernels(f"{SGLANG}.mamba.triton_ops.mamba_ssm").selective_state_update
    x, dt, decay, key, query, skip, bias = _mamba_rows(case, one)

    def by_request(rows: torch.Tensor) -> torch.Tensor:
        return rows.as_strided(
            (case.requests, case.nodes, *rows.shape[1:]), (case.nodes * rows.stride(0), *rows.stride())
        )

    update(
        pool, *map(by_request, (x, dt)), decay, *map(by_request, (key, query)), skip, dt_bias=bias,
        state_batch_indices=slots, out=by_request(out), **held,
    )  # fmt: skip
    return out


def _sglang_prompts(case: Case, layers: list[Inputs]) -> Runner:
    if case.layer.name == "mamba2":
        raise Absent("SGLang's chunk scan is the same kernel as vLLM's, with another interface")
    starts, slots = _starts(case).long(), torch.arange(1, case.requests + 1, dtype=torch.int32, device=DEVICE)
    name, file = ("chunk_gated_delta_rule", "chunk") if case.layer.name == "gdn" else ("chunk_kda", "kda")
    function = getattr(kernels(f"{SGLANG}.attention.fla.{file}"), name)
    pools, outs = [one.state.clone() for one in layers], [one.v for one in layers]

    def call() -> None:
        for n, (one, pool) in enumerate(zip(layers, pools, strict=True)):
            assert one.beta is not None
            found = function(
                one.q[None], one.k[None], one.v[None], one.log_decay[None], one.beta[None], scale=1.0,
                initial_state=pool, initial_state_indices=slots, cu_seqlens=starts,
            )  # fmt: skip
            outs[n] = (found[0] if isinstance(found, tuple) else found).view(one.v.shape)

    def reset() -> None:
        for one, pool in zip(layers, pools, strict=True):
            pool.copy_(one.state)

    return Runner(call, lambda: outs[0], lambda: pools[0], 2, 0, reset)
