"""Replays of a recorded graph equal eager mode bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from draftmark_reference.graphs import RecordedGraph

torch.set_num_threads(1)


def statics() -> SimpleNamespace:
    """Return the static tensors of a step: two matrices, a KV cache, indices, a mask, integers and outputs."""
    return SimpleNamespace(
        x=torch.zeros(4, 8),
        y=torch.zeros(4, 8),
        w=torch.zeros(8, 8),
        half=torch.zeros(4, 8, dtype=torch.bfloat16),
        q=torch.zeros(2, 4, 3, 8),
        kv=torch.zeros(2, 2, 3, 8),
        rows=torch.zeros(4, dtype=torch.int64),
        lens=torch.zeros(4, dtype=torch.int32),
        mask=torch.zeros(4, 8, dtype=torch.bool),
        out=torch.zeros(4, 8),
    )


def fill(t: SimpleNamespace, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in vars(t).values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randint(0, 2 if tensor.dtype == torch.bool else 4, tensor.shape, generator=generator))


def in_place_chain(t: SimpleNamespace) -> Any:
    t.x.mul_(2).add_(t.y, alpha=0.5)
    t.x[1:3].neg_()
    t.x[0] = 5.0
    t.x[:, 2:4] = t.y[:, :2]
    t.x[t.mask] = 0.0
    return t.x.t()


def grown_output(t: SimpleNamespace) -> Any:
    out = torch.empty(0)
    torch.add(t.x, t.y, out=out)
    return out * 2


def reshaped_in_place(t: SimpleNamespace) -> Any:
    return (t.x + 0).transpose_(0, 1).unsqueeze_(0).mul_(2)


def profiled(t: SimpleNamespace) -> Any:
    with torch.profiler.record_function("attention"):
        return t.x + 1


def partly_written(t: SimpleNamespace) -> Any:
    buffer = torch.empty(4, 16)
    buffer[:, :8] = t.x
    buffer[:, 8:] = t.y
    return buffer


STEPS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "arithmetic": lambda t: (t.x + t.y * 3 - 1) / (t.y.abs() + 1),
    "composite": lambda t: F.linear(t.x, t.w, t.w[0]).reshape(2, 16).softmax(-1),
    "matmul": lambda t: (t.x @ t.w, torch.einsum("ab,cb->ac", t.x, t.y), t.half @ t.half.t()),
    "views": lambda t: t.x.view(2, 16)[:, ::2].transpose(0, 1).unsqueeze(0).expand(3, -1, -1),
    "view_of_static": lambda t: t.x[1:],
    "in_place": in_place_chain,
    "out": lambda t: (torch.mul(t.x, t.y, out=t.out), torch.index_select(t.x, 0, t.rows, out=t.out)),
    "grown_output": grown_output,
    "reshaped_in_place": reshaped_in_place,
    "partly_written": partly_written,
    "index": lambda t: (t.x[t.rows], t.x[t.rows, t.rows], t.x[:, t.rows]),
    "gather": lambda t: (t.x.gather(1, t.rows[:, None]), t.x.take_along_dim(t.rows[:, None], 1)),
    "index_put": lambda t: t.x.index_put_((t.rows, t.rows), t.y[:, 0], accumulate=True),
    "scatter": lambda t: (t.x.scatter(1, t.rows[:, None], 9.0), t.out.index_copy_(0, t.rows.cumsum(0) % 4, t.y)),
    "slice_assign": lambda t: t.kv[:, :, 1:].copy_(t.q[:, :2, 1:]),
    "split": lambda t: (t.x.split([3, 5], 1), t.x.chunk(2), t.x.unbind()),
    "cat": lambda t: (torch.cat(t.x.split([3, 5], 1)[::-1], 1), torch.stack((t.x, t.y))),
    "several_results": lambda t: (t.x.topk(3), t.x.sort(1), t.x.max(1), torch.var_mean(t.x, 1)),
    "reductions": lambda t: (t.x.logsumexp(1), t.x.argmax(1), t.x.norm(), t.mask.any(1)),
    "scans": lambda t: (t.x.cumsum(0), t.lens.cumsum(0), t.x.cummax(1)),
    "casts": lambda t: (t.x.to(torch.bfloat16).float(), t.half.float(), t.lens.long(), t.mask.int(), t.x.to(t.y)),
    "masks": lambda t: (t.x.masked_fill(t.mask, 0), t.x.tril()),
    "where": lambda t: (torch.where(t.mask, t.x, -torch.inf), torch.where(t.mask, 1.0, 0.0)),
    "bits": lambda t: ((t.lens << 2) | (t.lens & 1), (t.lens[:, None] >> torch.arange(8)) & 1, t.lens.bitwise_not()),
    "factories": lambda t: (torch.zeros(4).add_(t.x[:, 0]), torch.arange(8) + t.rows[:1], t.x.new_full((2,), 7)),
    "recurrent": lambda t: torch.lstm_cell(t.x, (t.y, t.out), t.w.repeat(4, 1), t.w.repeat(4, 1)),
    "host_scalar": lambda t: t.x.clamp(min=torch.tensor(0.25)) + torch.tensor(2),
    "repeat": lambda t: t.x.repeat_interleave(2, 0) + t.y.repeat_interleave(t.rows * 0 + 2, 0, output_size=8),
    "norms": lambda t: (F.layer_norm(t.x, (8,), t.w[0]), F.rms_norm(t.x, (8,), t.w[0]), F.silu(t.x), F.gelu(t.half)),
    "embedding": lambda t: F.embedding(t.rows, t.w),
    "attention": lambda t: F.scaled_dot_product_attention(t.q, t.q, t.q, is_causal=True),
    "grouped_attention": lambda t: F.scaled_dot_product_attention(t.q, t.kv, t.kv, enable_gqa=True),
    "masked_attention": lambda t: F.scaled_dot_product_attention(t.q, t.q, t.q, attn_mask=t.q[..., :3] > 0),
    "foreach": lambda t: (torch._foreach_add([t.x, t.y], 1), torch._foreach_mul_([t.x, t.y], 2)),
    "profiled": profiled,
    "contiguous": lambda t: (t.x.t().contiguous(), t.x.clone(memory_format=torch.contiguous_format), t.x.flatten()),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", STEPS)
def test_replays_equal_eager_bit_for_bit(name: str, mode: Callable[[], Any]) -> None:
    """After each of several replays, outputs and static tensors equal an eager run on equal contents."""
    step = STEPS[name]
    with mode():
        captured, eager = statics(), statics()
        fill(captured, 0)
        graph = RecordedGraph(lambda: step(captured))
    for seed in (1, 2, 3):
        with mode():
            fill(captured, seed)
            fill(eager, seed)
            expected = step(eager)
        graph.replay()
        pairs = zip(tree_leaves((graph.outputs, vars(captured))), tree_leaves((expected, vars(eager))), strict=True)
        for got, want in pairs:
            assert want is None or (got.dtype == want.dtype and torch.equal(got, want)), (name, seed, got, want)


def test_a_self_feeding_step_advances_on_every_replay() -> None:
    """State in static tensors carries over from replay to replay, as lengths and positions do."""
    lens, tokens = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)

    def step() -> None:
        tokens.scatter_(1, lens.long()[:, None], lens[:, None] * 10)
        lens.add_(1)

    graph = RecordedGraph(step)
    for _ in range(5):
        graph.replay()
    assert tokens.tolist() == [[0, 10, 20, 30, 40]] * 2
    assert lens.tolist() == [5, 5]


def test_views_and_allocations_cost_no_call() -> None:
    """The tape contains only calls that a device would launch."""
    x = torch.ones(4, 4)
    assert len(RecordedGraph(lambda: (x.view(16)[2:].unsqueeze(0), torch.empty(3)))) == 0
    assert len(RecordedGraph(lambda: x.view(16)[2:] + 1)) == 1
