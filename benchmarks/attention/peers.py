"""Kernels of other libraries that cuda_triton is compared with. Each is optional and reports why it is absent.

A peer is a function ``(inputs) -> Peer``. If it cannot compute a case exactly, it computes a named simpler problem and
is checked against the reference of that problem (`Peer.tail`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import Inputs
from .models import Model
from .stubs import Absent

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Peer:
    """Holds the calls and outputs of one peer (a kernel of another library) in one case.

    Attributes:
        calls: one per KV set; each writes its own output.
        outs: the output of each call.
        tail: problem that the peer computes: "exact", "causal" (a chain instead of the tree) or "none" (only the
            prefix).
        note: remark for the reader of the row.
        rounds: True if the peer is allowed to round queries and softmax weights to e4m3 when KV is e4m3.
    """

    calls: list[Callable[[], object]]
    outs: list[torch.Tensor]
    tail: str = "exact"
    note: str = ""
    rounds: bool = False


def _csr(inputs: Inputs, tails: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FlashInfer's indptr, indices and last_page_len of each request's prefix and the given tail slots."""
    model = inputs.case.model
    lens = [n + tail for n, tail in zip(inputs.case.lens, tails, strict=True)]
    counts = [-(-n // model.page) for n in lens]
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.cat([inputs.page_table[r, :n] for r, n in enumerate(counts)])
    last = torch.tensor([(n - 1) % model.page + 1 for n in lens], dtype=torch.int32)
    return indptr.cuda(), indices.int(), last.cuda()


def _options(model: Model) -> dict[str, object]:
    """Return FlashInfer's options for dtypes and scores. The scale of e4m3 KV is 1 here."""
    if model.sinks:
        raise Absent("FlashInfer's fa2 kernels have no sinks")
    return {
        "q_data_type": torch.bfloat16, "kv_data_type": getattr(torch, model.kv_dtype),
        "window_left": model.window_left, "logits_soft_cap": model.cap,
    }  # fmt: skip


def import_flashinfer() -> object:
    """Return the library, or raise `Absent` with the reason."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # a missing optional dependency can raise many types of errors
        raise Absent(f"flashinfer cannot be imported: {type(error).__name__}: {error}") from None


def flashinfer(inputs: Inputs) -> Peer:
    """Run FlashInfer fa2 as engines do: verify with a custom mask over all keys, draft with one row per branch."""
    model = inputs.case.model
    fi, case = import_flashinfer(), inputs.case
    if case.name.startswith("draft"):
        return _flashinfer_branches(fi, inputs)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
    indptr, indices, last = _csr(inputs, case.tail_lens)
    mask = None
    if case.tree:
        mask = torch.cat(
            [torch.cat([torch.ones(case.q_len, n, dtype=torch.bool, device="cuda"), inputs.seen[r]], 1).flatten()
             for r, n in enumerate(case.lens)]
        )  # fmt: skip
    wrapper.plan(inputs.q_indptr, indptr, indices, last, model.heads, model.kv_heads, model.dim, model.page,
                 custom_mask=mask, causal=mask is None, sm_scale=model.scale, **_options(model))  # fmt: skip
    return _runs(wrapper, inputs.q, inputs.caches)


def flashinfer_decode(inputs: Inputs) -> Peer:
    """Run FlashInfer's decode wrapper with tensor cores."""
    model = inputs.case.model
    fi = import_flashinfer()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True, backend="fa2")
    indptr, indices, last = _csr(inputs, inputs.case.tail_lens)
    wrapper.plan(indptr, indices, last, model.heads, model.kv_heads, model.dim, model.page, sm_scale=model.scale,
                 **_options(model))  # fmt: skip
    return _runs(wrapper, inputs.q, inputs.caches)


def _flashinfer_branches(fi: object, inputs: Inputs) -> Peer:
    """Run one decode row per branch, with its prefix and ancestors as token indices (page size 1)."""
    model = inputs.case.model
    case = inputs.case
    positions = torch.arange(max(case.lens) + case.tail_len, device="cuda")
    rows, counts = [], []
    for r, n in enumerate(case.lens):
        at = positions[: n + case.tail_len]
        slots = inputs.page_table[r, at // model.page] * model.page + at % model.page
        for j in range(case.q_len):
            rows.append(torch.cat([slots[:n], slots[n:][inputs.seen[r, j]]]))
            counts.append(rows[-1].numel())
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True, backend="fa2")
    indptr = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    ones = torch.ones(len(counts), dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, torch.cat(rows).int(), ones, model.heads, model.kv_heads, model.dim, 1, sm_scale=model.scale,
                 **_options(model))  # fmt: skip
    return _runs(wrapper, inputs.q, [as_tokens(pair) for pair in inputs.caches])


def flashinfer_once(inputs: Inputs) -> Peer:
    """Run FlashInfer in three calls: the prefix without a mask, the tail with the tree mask, and a merge."""
    model = inputs.case.model
    fi, case = import_flashinfer(), inputs.case
    if not case.tree:
        raise Absent("no tree in this case")
    if model.window:
        raise Absent("its window counts rows, where a tree's counts depths")
    prefix = fi.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
    committed = _csr(inputs, (0,) * len(case.lens))
    prefix.plan(inputs.q_indptr, *committed, model.heads, model.kv_heads, model.dim, model.page,
                causal=False, sm_scale=model.scale, **_options(model))  # fmt: skip
    tail = fi.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa2")
    requests = len(case.lens)
    offset = torch.arange(case.tail_len, device="cuda")
    slots = torch.cat([inputs.page_table[r, (n + offset) // model.page] * model.page + (n + offset) % model.page
                       for r, n in enumerate(case.lens)])  # fmt: skip
    tail.plan(inputs.q_indptr, torch.arange(requests + 1, dtype=torch.int32, device="cuda") * case.tail_len,
              slots.int(), torch.ones(requests, dtype=torch.int32, device="cuda"), model.heads, model.kv_heads,
              model.dim, 1, custom_mask=inputs.seen.flatten(), sm_scale=model.scale,
              **_options(model))  # fmt: skip
    shape = inputs.q.shape
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]
    lses = [[torch.empty(shape[:2], dtype=torch.float32, device="cuda") for _ in range(2)] for _ in outs]
    other = torch.empty_like(inputs.q)

    def call(i: int) -> None:
        prefix.run(inputs.q, inputs.caches[i], out=outs[i], lse=lses[i][0], return_lse=True)
        tail.run(inputs.q, as_tokens(inputs.caches[i]), out=other, lse=lses[i][1], return_lse=True)
        fi.merge_state_in_place(outs[i], lses[i][0], other, lses[i][1])

    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs)


def _runs(wrapper: object, q: torch.Tensor, caches: list) -> Peer:
    outs = [torch.empty_like(q) for _ in caches]
    return Peer([lambda c=c, o=o: wrapper.run(q, c, out=o) for c, o in zip(caches, outs, strict=True)], outs)


def xqa(inputs: Inputs) -> Peer:
    """Run TensorRT-LLM's XQA through FlashInfer. It needs one query row for each new token of a request.

    Its Hopper kernel for e4m3 rounds rows and weights.
    """
    model = inputs.case.model
    fi, case = import_flashinfer(), inputs.case
    if model.cap:
        raise Absent("XQA has no soft cap")
    if case.ragged or case.uneven or case.q_len != case.tail_len:
        raise Absent("XQA's mask is q x q: it needs equal tails and query rows in all requests, and has no prefill")
    mask = None
    if case.q_len > 1:
        words = 2 * math.ceil(case.q_len / 32)
        bits = torch.zeros(len(case.lens), case.q_len, words * 16, dtype=torch.int32, device="cuda")
        chain = torch.ones(case.q_len, case.q_len, dtype=torch.bool, device="cuda").tril()
        bits[:, :, : case.tail_len] = chain if inputs.seen is None else inputs.seen
        packed = (bits.view(*bits.shape[:2], words, 16) << torch.arange(16, device="cuda")).sum(-1)
        mask = packed.to(torch.int32).to(torch.uint16)
    lens = inputs.prefix_lens + case.tail_len
    workspace = torch.zeros(WORKSPACE_BYTES // 2, dtype=torch.uint8, device="cuda")
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]
    longest = max(case.lens) + case.tail_len

    def call(i: int) -> None:
        out = outs[i] if case.q_len == 1 else outs[i].view(len(case.lens), case.q_len, model.heads, model.dim)
        fi.decode.xqa_batch_decode_with_kv_cache(
            inputs.q, inputs.caches[i], workspace, inputs.page_table, lens, longest, bmm1_scale=model.scale,
            bmm2_scale=1.0, out=out, kv_layout="NHD", q_len_per_req=case.q_len, mask=mask,
            window_left=model.window_left, sinks=inputs.sinks,
        )  # fmt: skip

    return Peer([lambda i=i: call(i) for i in range(len(outs))], outs, rounds=model.is_narrow)


def as_tokens(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the cache with page size 1."""
    return tuple(cache.view(-1, 1, *cache.shape[2:]) for cache in pair)


_workspaces: list[torch.Tensor] = []


def _workspace() -> torch.Tensor:
    # FlashInfer's plan is stored in the wrapper's own integer workspace. The float workspace is scratch, so wrappers
    # share it, except two wrappers of one call.
    while len(_workspaces) < 2:
        _workspaces.append(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
    _workspaces.reverse()
    return _workspaces[0]
