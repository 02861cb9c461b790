"""Stand-in for FlashInfer's MLA module on a CPU, with the causal key bound of its kernels. Used by tests only."""

from __future__ import annotations

import math

import torch

KV_TILE = 64


class StandIn:
    """Replaces `LatentVendor`. `plan` keeps its arguments in the order of plans; `run` computes in float64.

    A causal tile reads whole KV tiles up to the last key of its last row, and rounds that row down, as mla.cuh and
    mla_hopper.cuh do. So a row that continues in the next tile misses keys at some lengths.
    """

    def __init__(self, shape):
        self.shape, self.requests = shape, []

    def plan(self, request, floats, ints, scratch):
        self.requests.append(request)
        return [len(self.requests) - 1]

    def run(self, plan, floats, ints, q, cache, page_table, out, lse, causal):
        request, a = self.requests[plan[0]], self.shape
        assert causal is request.causal
        flat = torch.as_strided(page_table, ((page_table.shape[0] - 1) * page_table.stride(0) + page_table.shape[1],),
                                (1,))  # fmt: skip
        values, rest = cache.parts
        rows, count = request.qo_indptr.tolist(), len(request.kv_lens)
        tile = 128 if rows[-1] * a.num_qo_heads // count > 64 else 64
        for r, kv_len in enumerate(request.kv_lens.tolist()):
            first, q_len = rows[r], rows[r + 1] - rows[r]
            pages = flat[int(request.kv_indptr[r]) :][: -(-kv_len // a.page_size)].long()
            keys = torch.cat([values[pages], rest[pages]], -1).flatten(0, 1)[:kv_len].double()
            packed, heads = torch.arange(q_len * a.num_qo_heads), a.num_qo_heads
            seen = torch.full_like(packed, kv_len)
            if causal:
                end = (kv_len - q_len + (packed // tile + 1) * tile // heads).clamp(max=kv_len)
                last = kv_len - q_len + packed // heads + 1
                seen = torch.minimum(last, (end + KV_TILE - 1) // KV_TILE * KV_TILE)
            mine = slice(first, first + q_len)
            logits = q[mine].flatten(0, 1).double() @ keys.T * a.softmax_scale
            logits = logits.masked_fill(torch.arange(kv_len) >= seen[:, None], -math.inf)
            total = logits.logsumexp(-1) if kv_len else torch.full(packed.shape, -math.inf)
            weights = (logits - total[:, None]).exp().nan_to_num()
            out[mine] = (weights @ keys[:, : a.value_width]).view(q_len, heads, -1).to(out.dtype)
            if lse is not None:
                lse[mine] = total.view(q_len, heads).float()
