"""Check of FlashAttention 3's calls for a draft tree over latent rows (MLA), with stand-ins for its two kernels.

SGLang's own class builds the metadata and makes the calls. The stand-ins follow the kernels' documentation: key j of a
request is at offset j % P of page ``page_table[request, j // P]``, where P is the second axis of the cache.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from .bare import bare, member

MODULE = "srt.layers.attention.flashattention_backend"
VALUE, REST, HEADS, SCALE = 16, 4, 3, 0.3
LENGTH, CONTEXT, SLOTS = 37, 64, 192
PARENTS = (-1, 0, 0, 1, 1, 2)
"""Parent of each draft token; -1 for the root."""
DRAFTS, TOPK = len(PARENTS), 4


def check(page_size: int) -> None:
    """Check the rows of a verification against attention over the slots of `req_to_token`.

    Raises:
        ContractViolation: a call reads a page that the KV pool does not have, or a row is wrong.
    """
    scene = _Scene(page_size)
    made, layer, batch = _backend(scene), _layer(), scene.batch()
    with _Kernels():
        made.init_forward_metadata(batch)
        out = made.forward_extend(scene.q, None, None, layer, batch, save_kv_cache=False).view(DRAFTS, HEADS, VALUE)
    wrong = (out.double() - scene.answer()).abs().flatten(1).amax(1) > 1e-5
    if wrong.any():
        raise ContractViolation(
            f"{int(wrong.sum())} of {DRAFTS} rows are wrong",
            batch=scene.described(),
            got=f"wrong rows {wrong.nonzero().flatten().tolist()}",
            expected="attention over the prefix and each row's own ancestors",
        )


class _Scene:
    """Holds one request with a draft tree, on whole pages in any order, and the right answer."""

    def __init__(self, page_size: int) -> None:
        make = torch.Generator().manual_seed(0)
        self.page_size = page_size
        pages = torch.randperm(SLOTS // page_size - 1, generator=make) + 1
        position = torch.arange(LENGTH + DRAFTS)
        self.table = torch.zeros(4, 2 * CONTEXT, dtype=torch.int32)
        self.table[1, : len(position)] = (pages[position // page_size] * page_size + position % page_size).int()
        self.pool = torch.randn(SLOTS, 1, VALUE + REST, generator=make)
        self.q = torch.randn(DRAFTS, HEADS, VALUE + REST, generator=make)
        tree = torch.eye(DRAFTS, dtype=torch.bool)
        for node, parent in enumerate(PARENTS):
            if parent >= 0:
                tree[node] |= tree[parent]
        self.visible = torch.cat([torch.ones(DRAFTS, LENGTH, dtype=torch.bool), tree], 1)

    def batch(self) -> Any:
        """Return SGLang's batch of this verification."""
        lens = torch.tensor([LENGTH])
        verify = member("srt.model_executor.forward_batch_info", "ForwardMode").TARGET_VERIFY
        return SimpleNamespace(
            forward_mode=verify,
            batch_size=1,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=torch.tensor([1]),
            spec_info=SimpleNamespace(custom_mask=self.visible.flatten(), ragged_verify_layout=None),
            **dict.fromkeys(
                ("encoder_lens", "out_cache_loc", "attn_attend_prefix_cache", "attn_cp_metadata", "kv_loc_plan")
            ),
        )

    def answer(self) -> torch.Tensor:
        """Return attention in float64, ``[drafts, heads, value]``."""
        rows = self.pool[self.table[1, : LENGTH + DRAFTS].long(), 0].double()
        scores = torch.einsum("qhd,nd->hqn", self.q.double(), rows) * SCALE
        weights = scores.masked_fill(~self.visible, float("-inf")).softmax(-1)
        return torch.einsum("hqn,nd->qhd", weights, rows[:, :VALUE])

    def described(self) -> str:
        """Return one line about the batch."""
        return f"verification of a tree: length {LENGTH}, parents {list(PARENTS)}, page size {self.page_size}, MLA rows"


class _Kernels:
    """Replaces FlashAttention's kernel and SGLang's merge kernel in the backend's module by stand-ins in torch."""

    NAMES = ("flash_attn_with_kvcache", "merge_state_v2")

    def __enter__(self) -> None:
        self._module = importlib.import_module(f"sglang.{MODULE}")
        self._before = {name: getattr(self._module, name) for name in self.NAMES}
        for name, function in zip(self.NAMES, (flash_attention, merge), strict=True):
            setattr(self._module, name, function)

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(self._module, name, function)


def flash_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    qv: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    **rest: Any,
) -> Any:
    """Return FlashAttention 3's output ``[rows, heads, value]`` and log-sum-exp ``[heads, rows]``, not causal.

    Args:
        q, qv: parts of the query that meet `k_cache` and `v_cache`, ``[rows, heads, …]``.
        k_cache, v_cache: ``[pages, page_size, 1, …]``.

    Raises:
        ContractViolation: the table names a page that the cache does not have.
    """
    assert not causal, "the calls for a tree are not causal"
    pages, size = v_cache.shape[:2]
    outs, sums = [], []
    for number, length in enumerate(cache_seqlens.tolist()):
        rows, key = slice(int(cu_seqlens_q[number]), int(cu_seqlens_q[number + 1])), torch.arange(length)
        page = page_table[number, key // size].long()
        if length and int(page.max()) >= pages:
            raise ContractViolation(
                "the call has token slots as page ids, so the kernel reads past the KV pool, or another request's page",
                batch=f"verification of a tree over MLA rows: length {LENGTH}, {DRAFTS} drafts, page size {size}",
                got=f"page id {int(page.max())} in a cache of {pages} pages of {size} tokens",
                expected="page ids below the number of pages, or a cache in pages of one token as in the calls for MHA",
                formula="page id = token slot // page_size",
            )
        values = v_cache[page, key % size, 0].double()
        keys = torch.cat([values, k_cache[page, key % size, 0].double()], -1)
        scores = torch.einsum("qhd,nd->hqn", torch.cat([qv[rows], q[rows]], -1).double(), keys) * softmax_scale
        outs.append(torch.einsum("hqn,nd->qhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def merge(one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> Any:
    """Return the merged output and log-sum-exp of two parts; log-sum-exps are ``[rows, heads]``."""
    weights = torch.softmax(torch.stack([one_lse, other_lse]), 0)[..., None]
    return weights[0] * one + weights[1] * other, torch.logaddexp(one_lse, other_lse)


def _layer() -> Any:
    names = ("sliding_window_size", "attn_type", "k_scale", "v_scale")
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=1,
        tp_v_head_num=1,
        head_dim=VALUE + REST,
        v_head_dim=VALUE,
        scaling=SCALE,
        logit_cap=0.0,
        is_cross_attention=False,
        **dict.fromkeys(names),
    )


def _backend(scene: _Scene) -> Any:
    off = ["has_swa", "use_sliding_window_kv_pool", "is_prefill_aware_swa", "has_local_attention", "_unified_dense"]
    off += ["fa_skip_kv_cache", "kv_cache_is_mxfp8", "is_encoder_decoder"]
    none = ["local_attn_builder", "attention_chunk_size", "sliding_window_size", "forward_metadata", "_kv_shard_pool"]
    none += ["forward_metadata_spec_decode_expand", "flash_attn_varlen_func", "full_cg_prefill_metadata"]
    return bare(
        member(MODULE, "FlashAttentionBackend"),
        use_mla=True,
        device="cpu",
        topk=TOPK,
        speculative_num_draft_tokens=DRAFTS,
        speculative_num_steps=3,
        speculative_step_id=0,
        page_size=scene.page_size,
        max_context_len=CONTEXT,
        req_to_token=scene.table,
        req_to_token_pool=SimpleNamespace(req_to_token=scene.table),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer_id: scene.pool),
        kv_index_translator=SimpleNamespace(is_translating=False),
        fa_impl_ver=3,
        flash_attn_with_kvcache=flash_attention,
        _get_scheduler_metadata=None,
        num_splits=0,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        attn_cp_size=1,
        **dict.fromkeys(off, False),
        **dict.fromkeys(none),
    )
