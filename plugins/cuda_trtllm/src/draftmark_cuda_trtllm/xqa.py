"""Calls of `flashinfer.xqa.xqa`, the library's public function; nothing below that function is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Xqa:
    """XQA function bound to one geometry's sizes and workspaces.

    Attributes:
        function: `flashinfer.xqa.xqa`. It selects a module by dtypes, page size, head size, group, window and q_rows,
            and builds the module on the first call.
        num_kv_heads: KV heads of the cache.
        page_size: tokens per page of the cache.
        window: positions that a row sees, its own included; 0 for all.
        num_sms: SMs for XQA's split-KV decision. This is the sizing's number, not the driver's.
        scratch: uint8 buffer of the arena.
        semaphores: int32 buffer of the arena.
    """

    function: Callable[..., None]
    num_kv_heads: int
    page_size: int
    window: int
    num_sms: int
    scratch: torch.Tensor
    semaphores: torch.Tensor

    def decode(self, q: torch.Tensor, cache: Any, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor,
               scales: tuple[Any, Any], sinks: torch.Tensor | None = None) -> None:  # fmt: skip
        """Compute attention of one row per request.

        Args:
            q: ``[R, heads, dim]``; out has its shape.
            table: int32 ``[R, pages]``. lens: int32 ``[R]``, new tokens included.
            scales: (q_scale, kv_scale); see `XqaBackend._scales`.
            sinks: float32 ``[heads]`` in natural units, as in `KVCache`.
        """
        self._call(q[:, None], cache, table, lens, out[:, None], scales, sinks)

    def tree(self, q: torch.Tensor, cache: Any, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor,
             scales: tuple[Any, Any], rows: int, indptr: torch.Tensor, mask: torch.Tensor,
             sinks: torch.Tensor | None = None) -> None:  # fmt: skip
        """Compute attention of ragged rows under a mask.

        Args:
            q: ``[n, heads, dim]``; request r has rows indptr[r] … indptr[r+1]. out has the shape of q.
            rows: q_rows (`forms.q_rows`): the grid covers the first `rows` rows of each request.
            indptr: int32 ``[R + 1]``.
            mask: row i begins at int32 word ``i · ceil(rows / 32)`` and covers the last indptr[r+1] - indptr[r]
                positions of request r.
        """
        self._call(q, cache, table, lens, out, scales, sinks, q_seq_len=rows, mask=mask, q_cu_seq_lens=indptr)

    def _call(self, q: torch.Tensor, cache: Any, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor,
              scales: tuple[Any, Any], sinks: torch.Tensor | None, **tree: Any) -> None:  # fmt: skip
        self.function(
            q, cache.k, cache.v, table, lens, out, self.scratch, self.semaphores, self.num_kv_heads, self.page_size,
            sinks=sinks, q_scale=scales[0], kv_scale=scales[1], sliding_win_size=self.window, kv_layout="NHD",
            sm_count=self.num_sms, **tree,
        )  # fmt: skip
