"""EXTEND in chunks against a float64 loop over tokens, for every recurrence and gate; on a GPU if present."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from draftmark import DeviceProfile, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape
from draftmark.runtime import ForwardBatch, Unknown, ragged
from draftmark_cuda_triton.state import extend_sizing
from draftmark_cuda_triton.state.extend import Extend

DELTA, DECAY, HEAD, KEY, CONSTANT = Recurrence.DELTA, Recurrence.DECAY, Gate.HEAD, Gate.KEY, Gate.CONSTANT
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [(DELTA, HEAD), (DELTA, KEY), (DELTA, CONSTANT), (DECAY, HEAD), (DECAY, CONSTANT)]
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Largest error relative to the norm: rounded operands dominate it in 16 bits."""


class Prompts(NamedTuple):
    """Inputs of an EXTEND batch, and its slots; request r has slot r + 1.

    Attributes:
        lens, prefixes: rows and prefix length of each request.
        inputs: q, k, v, log_decay, beta, as in `StateBackend.recur`.
        state: ``[requests + 2, heads, value_dim, key_dim]``; NaN in slots of requests without a prefix.
    """

    lens: list[int]
    prefixes: list[int]
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    state: torch.Tensor


def shape_of(kind: tuple[Recurrence, Gate], heads=(2, 1), dims=(16, 16), dtype="float32", state_dtype="float32"):
    """Return a layer shape; `heads` are its heads and key heads, `dims` key_dim and value_dim.

    Prompts of 16 bits may round, so that they run in chunks.
    """
    return StateShape(*kind, *heads, *dims, 0, 0, dtype, state_dtype, round_prompts=dtype != "float32")


def draw(shape: StateShape, lens: list[int], prefixes: list[int], seed: int = 0, strength: float = 1.0) -> Prompts:
    """Draw inputs; `strength` multiplies the logarithms of the decays."""
    generator, rows, s = torch.Generator().manual_seed(seed), sum(lens), shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    dtype = getattr(torch, s.dtype)
    q, k = (torch.nn.functional.normalize(normal(rows, s.num_key_heads, s.key_dim), dim=-1) for _ in range(2))
    per_row = {HEAD: (rows, s.num_heads), KEY: (rows, s.num_heads, s.key_dim), CONSTANT: (s.num_heads,)}[s.gate]
    log_decay = -strength * (normal(*per_row) - 2).exp()
    beta = torch.rand(rows, s.num_heads, generator=generator) if s.recurrence is DELTA else None
    state = normal(len(lens) + 2, s.num_heads, s.value_dim, s.key_dim).to(getattr(torch, s.state_dtype))
    for request, prefix in enumerate(prefixes):
        if prefix == 0:
            state[request + 1] = float("nan")
    v = normal(rows, s.num_heads, s.value_dim)
    inputs = q.to(dtype), k.to(dtype), v.to(dtype), log_decay, beta
    moved = tuple(None if one is None else one.to(DEVICE) for one in inputs)
    return Prompts(lens, prefixes, moved, state.to(DEVICE))  # type: ignore[arg-type]


def run(shape: StateShape, prompts: Prompts, state: torch.Tensor) -> torch.Tensor:
    """Run EXTEND over `state` in place and return the outputs; scratch memory and outputs start as NaN."""
    lens, rows = prompts.lens, sum(prompts.lens)
    limits = Limits(len(lens), 8192, max(rows, 64))
    device = DeviceProfile(DEVICE, 90) if DEVICE == "cuda" else None
    geometry = StateGeometry.create(shape, limits, None, device, (Mode.EXTEND,))
    buffers = {
        one.name: torch.full(tuple(map(int, one.shape)), float("nan"), dtype=getattr(torch, one.dtype), device=DEVICE)
        for one in extend_sizing.extend_buffers(geometry)
    }
    q, k, v, log_decay, beta = prompts.inputs
    out = torch.full(v.shape, float("nan"), dtype=v.dtype, device=DEVICE)
    Extend(geometry, buffers).recur(q, k, v, log_decay, beta, state, batch_of(geometry, prompts), out)
    return out


def batch_of(geometry: StateGeometry, prompts: Prompts) -> ForwardBatch:
    """Return the EXTEND batch of the prompts."""
    count = len(prompts.lens)
    prefixes = torch.tensor(prompts.prefixes, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(count, 0, dtype=torch.int32, device=DEVICE)
    return ragged(
        geometry, prefixes, table, tuple(prompts.lens), Unknown(count, geometry.max_prefix_len), state_slots=slots
    )


def by_token(shape: StateShape, prompts: Prompts, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a request's outputs and its state after them, in float64, token by token."""
    start = sum(prompts.lens[:request])
    rows = slice(start, start + prompts.lens[request])
    q, k, v, log_decay, beta = (None if one is None else one.double() for one in prompts.inputs)
    assert q is not None and k is not None and v is not None and log_decay is not None
    q, k = (one[rows].repeat_interleave(shape.heads_per_key, 1) for one in (q, k))
    state = prompts.state[request + 1].double()
    state = state if prompts.prefixes[request] else torch.zeros_like(state)
    found = torch.empty_like(v[rows])
    for at in range(prompts.lens[request]):
        decay = log_decay if shape.gate is CONSTANT else log_decay[start + at]
        state = state * (decay.exp()[:, None, :] if shape.gate is KEY else decay.exp()[:, None, None])
        write = v[start + at]
        if beta is not None:
            write = beta[start + at][:, None] * (write - (state @ k[at][:, :, None])[..., 0])
        state = state + write[:, :, None] * k[at][:, None, :]
        found[at] = (state @ q[at][:, :, None])[..., 0]
    return found, state


def check(shape: StateShape, prompts: Prompts) -> None:
    """Compare outputs and slots of EXTEND with the loop; slots of other requests must keep their bytes."""
    state = prompts.state.clone()
    out = run(shape, prompts, state).double()
    where, start, tolerance = f"{shape} {prompts.lens} {prompts.prefixes}", 0, TOLERANCES[shape.dtype]
    stored = max(tolerance, 5e-3 if shape.state_dtype == "bfloat16" else 0)
    for request, rows in enumerate(prompts.lens):
        if rows:
            expected, after = by_token(shape, prompts, request)
            found = out[start : start + rows]
            assert (found - expected).norm() <= tolerance * expected.norm(), f"outputs of request {request}: {where}"
            error = (state[request + 1].double() - after).norm()
            assert error <= stored * after.norm(), f"state of request {request}: {where}"
        start += rows
    kept = [0, len(prompts.lens) + 1, *(one + 1 for one, rows in enumerate(prompts.lens) if not rows)]
    same = state[kept].view(torch.uint8), prompts.state[kept].view(torch.uint8)
    assert torch.equal(*same), f"a slot without rows changed: {where}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_prompts_of_any_lengths_are_the_loop_over_tokens(kind):
    """Prompts of 1 row to several chunks, with and without a prefix, and requests without rows, equal the loop."""
    heads = (2, 2) if kind[1] is KEY else (4, 2)
    shape = shape_of(kind, heads)
    check(shape, draw(shape, [1, 70, 0, 64, 129], [0, 5, 0, 0, 9]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_dimensions_between_powers_of_two(kind):
    """Key and value dimensions need not be powers of two."""
    shape = shape_of(kind, (2, 1), (24, 40))
    check(shape, draw(shape, [66, 3], [2, 0]))


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: f"{kind[0]}-{kind[1]}")
@pytest.mark.parametrize("strength", [10.0, 30.0, 1000.0])
def test_decays_below_the_smallest_float32(kind, strength):
    """Decay ratios outside the range of float32 in a block give finite, correct outputs."""
    shape = shape_of(kind, (1, 1))
    check(shape, draw(shape, [80], [1], strength=strength))


def test_repeated_keys_without_decay():
    """The triangular solve is exact for equal keys with full strength, where powers of the matrix would cancel."""
    shape = shape_of((DELTA, HEAD))
    prompts = draw(shape, [64], [1])
    q, k, v, log_decay, beta = prompts.inputs
    assert beta is not None
    inputs = q, k[:1].expand(k.shape).contiguous(), v, log_decay * 0, torch.ones_like(beta)
    check(shape, prompts._replace(inputs=inputs))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3]], ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_activations_of_16_bits(kind):
    """bfloat16 activations lose no more than the rounding of the products' operands."""
    shape = shape_of(kind, (2, 2), (32, 64), "bfloat16")
    check(shape, draw(shape, [70, 1], [0, 4]))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_activations_of_16_bits_are_exact_by_default(kind):
    """Without `round_prompts` outputs are rounded once, and a float32 state has float32's errors."""
    shape = replace(shape_of(kind, (2, 2), (32, 64), "bfloat16"), round_prompts=False)
    assert not extend_sizing.runs_in_chunks(StateGeometry.create(shape, Limits(2, 8192, 71)))
    prompts = draw(shape, [70, 1], [0, 4])
    state = prompts.state.clone()
    run(shape, prompts, state)
    for request in range(2):
        _, expected = by_token(shape, prompts, request)
        assert (state[request + 1].double() - expected).norm() <= TOLERANCES["float32"] * expected.norm()


def test_states_of_16_bits_are_rounded_once():
    """A bfloat16 state is read and written as such; inside a prompt the state stays float32."""
    shape = shape_of((DELTA, HEAD), dtype="float16", state_dtype="bfloat16")
    check(shape, draw(shape, [130, 1], [3, 0]))


def test_scratch_memory_covers_every_chunk():
    """The scratch memory has room for the chunks of every division of max_extend_tokens rows among requests."""
    generator = random.Random(0)
    for _ in range(200):
        requests, rows = generator.randint(1, 9), generator.randint(1, 700)
        cuts = sorted(generator.randint(0, rows) for _ in range(requests - 1))
        starts = [0, *cuts, rows]
        geometry = StateGeometry.create(shape_of((DELTA, HEAD)), Limits(requests, 8192, rows))
        room = extend_sizing.extend_buffers(geometry)[0].shape[0]
        end = 0
        for request, (start, stop) in enumerate(pairwise(starts)):
            first = start // extend_sizing.CHUNK + request
            assert first >= end, f"request {request} of {starts} shares a chunk number"
            end = first - (start - stop) // extend_sizing.CHUNK
        assert end <= room, f"{starts} needs {end} chunks of {room}"


@pytest.mark.device
@pytest.mark.parametrize("seed", range(40))
def test_random_batches_on_a_gpu(seed):
    """Random shapes, dtypes and ragged batches equal the loop."""
    generator = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    key_heads, shared = generator.choice([1, 2, 4]), generator.choice([1, 2, 8])
    dims = generator.choice([(128, 128), (128, 64), (64, 64), (96, 80), (256, 128), (32, 200)])
    dtype, state = (
        generator.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        generator.choice(["float32", "bfloat16"]),
    )
    shape = shape_of(kind, (key_heads * shared, key_heads), dims, dtype, state)
    for _ in range(5):
        lens = [
            generator.choice([0, 1, 2, 63, 64, 65, generator.randint(1, 600)]) for _ in range(generator.randint(1, 9))
        ]
        lens[-1] = max(1, lens[-1])
        prefixes = [generator.choice([0, 1, 77]) for _ in lens]
        check(shape, draw(shape, lens, prefixes, generator.randint(0, 999), generator.choice([0.1, 1.0, 10.0])))
