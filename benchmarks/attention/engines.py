"""Kernels to compare with (peers): those of SGLang, vLLM and xformers, and torch's flex attention.

`stubs` imports them. Data that an engine prepares once per step (indices, masks, number of splits) is prepared before
the timed call.
"""

from __future__ import annotations

import functools

import torch

from . import stubs
from .cases import Inputs
from .peers import Absent, Peer

SGLANG_SPLITS = 8
"""SGLang's default of `triton_attention_num_kv_splits`."""
VLLM_SEGMENTS, VLLM_PROGRAMS = 16, 128
"""Constants of vLLM's backend: segments of a split sequence, and the number of programs up to which it splits."""

FLEX_OPTIONS: tuple[dict[str, bool | int], ...] = (
    {},
    {"FORCE_USE_FLEX_ATTENTION": True},
    {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 64, "BLOCK_N": 64},
)
"""Kernel options to try in turn: the defaults, then others if the decode kernel does not compile (64 rows, 4 heads)."""


def token_slots(inputs: Inputs, request: int, keys: int) -> torch.Tensor:
    """Return the cache slots of the first `keys` tokens of a request."""
    model = inputs.case.model
    at = torch.arange(keys, device="cuda")
    return inputs.page_table[request, at // model.page].long() * model.page + at % model.page


def _indptr(counts: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(dtype).cuda()


def _flat(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].flatten(0, 1), pair[1].flatten(0, 1)


def _tails(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return packed K and V of the new tokens, as an engine has them before it writes them to its cache."""
    case = inputs.case
    slots = torch.cat([token_slots(inputs, r, n + case.tail_len)[n:] for r, n in enumerate(case.lens)])
    return [tuple(cache[slots] for cache in _flat(pair)) for pair in inputs.caches]  # type: ignore[misc]


def sglang(inputs: Inputs) -> Peer:
    """Run SGLang's Triton kernels at page size 1: draft as one decode row per branch, verify with a full mask."""
    return _sglang_extend(inputs) if _packed(inputs) else _sglang_decode(inputs)


def _packed(inputs: Inputs) -> bool:
    return inputs.case.ragged or (inputs.case.tree and inputs.case.q_len == inputs.case.tail_len)


def _sglang_decode(inputs: Inputs) -> Peer:
    model = inputs.case.model
    engine, case = stubs.sglang(), inputs.case
    rows = []
    for r, n in enumerate(case.lens):
        slots = token_slots(inputs, r, n + case.tail_len)
        seen = [slots[n:][inputs.seen[r, j]] for j in range(case.q_len)] if case.tree else [slots[n:]]
        rows += [torch.cat([slots[:n], own]) for own in seen]
    indptr, indices = _indptr([row.numel() for row in rows]), torch.cat(rows)
    splits = torch.empty(len(rows), dtype=torch.int32, device="cuda")
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    engine.splits[(1,)](
        splits, (inputs.prefix_lens + 1).int(), len(case.lens), case.q_len, model.heads, model.kv_heads, SGLANG_SPLITS,
        cores,
        MAX_NUM_SEQ=256,
    )  # fmt: skip
    logits = torch.empty(len(rows), model.heads, SGLANG_SPLITS, model.dim, dtype=torch.float32, device="cuda")
    lse = torch.empty(len(rows), model.heads, SGLANG_SPLITS, dtype=torch.float32, device="cuda")
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]

    def call(i: int) -> None:
        k, v = _flat(inputs.caches[i])
        engine.decode(
            inputs.q, k, v, outs[i], indptr, indices, logits, lse, splits, SGLANG_SPLITS, model.scale, 1.0, 1.0
        )

    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, note="page size 1")


def _sglang_extend(inputs: Inputs) -> Peer:
    model = inputs.case.model
    engine, case = stubs.sglang(), inputs.case
    indptr = _indptr(list(case.lens))
    indices = torch.cat([token_slots(inputs, r, n) for r, n in enumerate(case.lens)])
    mask = offsets = None
    if case.tree:
        mask = torch.cat(
            [torch.cat([torch.ones(case.q_len, n, dtype=torch.bool, device="cuda"), inputs.seen[r]], 1).flatten()
             for r, n in enumerate(case.lens)]
        )  # fmt: skip
        offsets = _indptr([case.q_len * (n + case.tail_len) for n in case.lens], torch.int64)
    tails = _tails(inputs)
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]

    def call(i: int) -> None:
        engine.extend(
            inputs.q, *tails[i], outs[i], *_flat(inputs.caches[i]), inputs.q_indptr, indptr, indices, mask, True,
            offsets, case.q_len, 1.0, 1.0, model.scale,
        )  # fmt: skip

    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, note="page size 1")


def vllm(inputs: Inputs) -> Peer:
    """Run vLLM's unified Triton kernel. It accepts one tree per batch, so a batch of several trees runs as chains."""
    model = inputs.case.model
    engine, case = stubs.vllm(), inputs.case
    bias = None
    if case.tree and len(case.lens) == 1 and case.q_len == case.tail_len:
        bias = torch.zeros(case.q_len, case.q_len, device="cuda").masked_fill_(~inputs.seen[0], float("-inf"))
    lens = inputs.prefix_lens + case.tail_len
    rows = inputs.q.shape[0]
    partial = functools.partial(torch.empty, dtype=torch.float32, device="cuda")
    parts = (
        (VLLM_PROGRAMS // model.kv_heads, VLLM_SEGMENTS, partial(rows, model.heads, VLLM_SEGMENTS, model.dim),
         *(partial(rows, model.heads, VLLM_SEGMENTS) for _ in range(2)))
        if case.q_len <= 8 else ()
    )  # fmt: skip
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]

    def call(i: int) -> None:
        k, v = inputs.caches[i]
        engine.attention(
            inputs.q, k, v, outs[i], inputs.q_indptr, case.q_len, lens, max(case.lens) + case.tail_len, model.scale,
            True, (-1, -1), inputs.page_table, 0.0, None, None, None, *parts, qq_bias=bias,
        )  # fmt: skip

    tail = "exact" if bias is not None or not case.tree else "causal"
    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, tail)


def xformers(inputs: Inputs) -> Peer:
    """Run the parts of xformers' `tree_attention` (prefix, tail, merge), which accepts only one tree per batch.

    Both parts use xformers' Triton kernel, its only kernel for pages of 64 tokens.
    """
    model = inputs.case.model
    case = inputs.case
    if not case.tree:
        raise Absent("no tree in this case")
    lib = stubs.xformers()
    requests, group = len(case.lens), model.heads // model.kv_heads
    grouped = (requests, case.q_len, model.kv_heads, group, model.dim)
    prefix_bias = lib.bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [case.q_len] * requests, list(case.lens), inputs.page_table, model.page, device=inputs.q.device
    )
    q = inputs.q.view(grouped)
    hidden = torch.zeros(inputs.seen.shape, dtype=torch.bfloat16, device="cuda").masked_fill_(~inputs.seen, -torch.inf)
    tail_bias = hidden[:, None, None].expand(requests, model.kv_heads, group, case.q_len, case.tail_len)
    tails = [
        tuple(x.view(requests, case.tail_len, model.kv_heads, 1, model.dim).expand(-1, -1, -1, group, -1) for x in pair)
        for pair in _tails(inputs)
    ]
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]

    def call(i: int) -> None:
        k, v = (x.view(1, -1, model.kv_heads, 1, model.dim).expand(-1, -1, -1, group, -1) for x in inputs.caches[i])
        near, near_lse = lib.fmha.memory_efficient_attention_partial(
            q.view(1, -1, *grouped[2:]), k, v, attn_bias=prefix_bias, op=lib.splitk
        )
        near_lse = near_lse.view(model.kv_heads, group, requests, case.q_len).permute(2, 0, 1, 3)
        far, far_lse = lib.fmha.memory_efficient_attention_forward_requires_grad(
            q, *tails[i], attn_bias=tail_bias, op=lib.splitk
        )
        merged, _ = lib.fmha.merge_attentions([near.view(grouped), far], [near_lse, far_lse], output_dtype=q.dtype)
        outs[i] = merged.reshape(inputs.q.shape)

    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, note="both parts by its triton_splitk")


def flex(inputs: Inputs) -> Peer:
    """Run torch's flex_attention, compiled. Its KV is made contiguous by request before the timed call."""
    model = inputs.case.model
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    case, requests = inputs.case, len(inputs.case.lens)
    table = torch.nn.functional.pad(inputs.page_table, (0, inputs.page_table.shape[1] % 2)).long()
    keys = table.shape[1] * model.page
    lens, tail, shift = inputs.prefix_lens, case.tail_len, case.tail_len - case.q_len
    seen = inputs.seen

    def tree(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        slot = key - lens[b]
        own = seen[b, row, slot.clamp(0, tail - 1)]
        return (slot < 0) | ((slot < tail) & own)

    def causal(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key - lens[b] <= row + shift

    one_for_all = case.ragged  # requests of a ragged case have equal lengths, so one mask is enough
    mask = create_block_mask(
        tree if case.tree else causal, 1 if one_for_all else requests, None, case.q_len, keys, device="cuda"
    )
    q = inputs.q.view(requests, case.q_len, model.heads, model.dim).transpose(1, 2)
    flat = (requests, keys, model.kv_heads, model.dim)
    kvs = [tuple(c[table].view(flat).transpose(1, 2) for c in pair) for pair in inputs.caches]
    compiled = torch.compile(flex_attention, dynamic=False)
    attend = functools.partial(compiled, q, block_mask=mask, scale=model.scale, enable_gqa=True)
    options, failures = {}, []
    for options in FLEX_OPTIONS:
        try:
            attend(*kvs[0], kernel_options=options)
            break
        except Exception as failure:
            failures.append(f"{options}: {type(failure).__name__}: {' '.join(str(failure).split())[:100]}")
            torch._dynamo.reset()
    else:
        raise Absent(f"does not compile: {'; '.join(failures)}")
    outs = [inputs.q for _ in inputs.caches]

    def call(i: int) -> None:
        outs[i] = attend(*kvs[i], kernel_options=options).transpose(1, 2).reshape(inputs.q.shape)

    note = "contiguous KV, gathered beforehand" + (f"; kernel options {options}" if options else "")
    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, note=note)
