"""The calls of `flashinfer.xqa`: the library's public function, keyword by keyword, and nothing below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Xqa:
    """One geometry's XQA.

    Attributes:
        function: `flashinfer.xqa.xqa`. It finds its module by dtypes, page size, head size, group, window and q_rows,
            and builds it on the first call.
        num_kv_heads, page_size: of the cache.
        window: positions a row sees with its own, 0 for all.
        num_sms: what the split over keys is computed from; the sizing's number, not the driver's.
        scratch, semaphores: uint8 and int32 arena buffers.
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
        """One row a request: q, out ``[R, heads, dim]``; table int32 ``[R, pages]``; lens int32 ``[R]``, with tail;
        sinks float32 ``[heads]`` in natural units, as `KVCache` has them.
        """
        self._call(q[:, None], cache, table, lens, out[:, None], scales, sinks)

    def tree(self, q: torch.Tensor, cache: Any, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor,
             scales: tuple[Any, Any], rows: int, indptr: torch.Tensor, mask: torch.Tensor,
             sinks: torch.Tensor | None = None) -> None:  # fmt: skip
        """Rows behind an indptr.

        Args:
            q, out: ``[n, heads, dim]``; request r has rows indptr[r] … indptr[r+1] of it.
            rows: see `forms.q_rows`: the grid covers the first `rows` rows of each request.
            indptr: int32 ``[R + 1]``. mask: its row i at word ``i · ceil(rows / 32)`` (of int32), over the last
                indptr[r+1] - indptr[r] positions of request r.
        """
        self._call(q, cache, table, lens, out, scales, sinks, q_seq_len=rows, mask=mask, q_cu_seq_lens=indptr)

    def _call(self, q: torch.Tensor, cache: Any, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor,
              scales: tuple[Any, Any], sinks: torch.Tensor | None, **tree: Any) -> None:  # fmt: skip
        self.function(
            q, cache.k, cache.v, table, lens, out, self.scratch, self.semaphores, self.num_kv_heads, self.page_size,
            sinks=sinks, q_scale=scales[0], kv_scale=scales[1], sliding_win_size=self.window, kv_layout="NHD",
            sm_count=self.num_sms, **tree,
        )  # fmt: skip
