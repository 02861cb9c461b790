"""Model of the persistent buffers in vLLM's model runner, with `CommonAttentionMetadata` as views of the buffers.

The buffers behave as in vLLM's runners. They are filled in place in every step. A captured size has padding requests
after the live ones: no rows, length 0, null page 0 and slots of -1. Host bounds are the lengths that the scheduler
assumed.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark import Geometry
from draftmark_contract.judge.step import Step

from .config import max_model_len, max_reqs, max_tokens, takes

ALIGNMENT = 128
"""vLLM rounds the width of its block tables up to a multiple of this number of tokens."""


class RunnerBuffers:
    """Holds the tensors that vLLM's model runner keeps at fixed addresses.

    Attributes:
        slots: slot mapping, int64 ``[max_tokens]``.
        table: block table, int32 ``[max_reqs, columns]``.
        positions: int64 ``[max_tokens]``.
        starts: first row of each request, int32 ``[max_reqs + 1]``.
        lens: sequence lengths, int32 ``[max_reqs]``.
        starts_host, lens_host: copies of `starts` and `lens` on the host.
        bounds: upper bounds of `lens` on the host, int32 ``[max_reqs]``.
        known: True if the bounds are the lengths. False in asynchronous steps with drafts: the host has bounds only.
    """

    def __init__(self, geometry: Geometry, num_pages: int, device: str) -> None:
        self.geometry, self.device = geometry, device
        reqs, tokens = max_reqs(geometry), max_tokens(geometry)
        columns = -(-(max_model_len(geometry) + ALIGNMENT) // geometry.attention.page_size) + 1
        integers = {"dtype": torch.int32, "device": device}
        self.starts, self.lens = torch.zeros(reqs + 1, **integers), torch.zeros(reqs, **integers)  # type: ignore[call-overload]
        # In vLLM, a request's row of the table has stale page ids after its own pages. This fill value stands for them.
        self.table = torch.full((reqs, columns), num_pages - 1, **integers)  # type: ignore[call-overload]
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.starts_host, self.bounds = torch.zeros(reqs + 1, dtype=torch.int32), torch.zeros(reqs, dtype=torch.int32)
        self.lens_host = torch.zeros(reqs, dtype=torch.int32)
        self.known = True

    def fill(self, step: Step, padded: int) -> None:
        """Write a step's live requests into the buffers, then padding requests up to `padded` requests."""
        requests, longest = step.forward.requests, max_model_len(self.geometry)
        starts = [0]
        for one in requests:
            starts.append(starts[-1] + one.rows)
        lens = [one.prefix + one.rows for one in requests]
        self._put(self.starts, starts + [starts[-1]] * (len(self.starts) - len(starts)))
        self.starts_host.copy_(self.starts.cpu())
        self._put(self.lens, lens + [0] * (len(self.lens) - len(lens)))
        self.lens_host.copy_(self.lens.cpu())
        self.known = not step.loose
        bounds = [min(n + step.loose, longest) for n in lens]
        self.bounds.copy_(torch.tensor(bounds + [0] * (len(self.bounds) - len(bounds)), dtype=torch.int32))
        for number, one in enumerate(requests):
            self._put(self.table[number], list(one.pages), whole=False)
        self.table[len(requests) : padded].zero_()
        self.slots.fill_(-1)
        self._put(self.slots, [step.writes.get(row, -1) for row in step.forward.rows], whole=False)
        at = [one.prefix + row for one in requests for row in range(one.rows)]
        self.positions.zero_()
        self._put(self.positions, at, whole=False)

    def dummy(self, rows_each: int, requests: int) -> None:
        """Write the dummy batch that a runner captures: requests without a prefix, and slot -1 for every row."""
        self.known = True
        counts = [rows_each * n for n in range(requests + 1)]
        self._put(self.starts, counts + counts[-1:] * (len(self.starts) - len(counts)))
        self.starts_host.copy_(self.starts.cpu())
        for lens in (self.lens, self.lens_host, self.bounds):
            lens.zero_()
            lens[:requests] = rows_each
        self.table[:requests].zero_()
        self.slots.fill_(-1)
        self.positions.zero_()

    def metadata(self, requests: int, rows: int, max_query_len: int, max_seq_len: int) -> Any:
        """Return `CommonAttentionMetadata` with views of the first requests and rows."""
        from .api import CommonAttentionMetadata

        prefixes = (self.lens_host[:requests] - self.starts_host[: requests + 1].diff()).clamp(min=0)
        computed = (self.bounds[:requests] - self.starts_host[: requests + 1].diff()).clamp(min=0)
        values = {
            "query_start_loc": self.starts[: requests + 1],
            "query_start_loc_cpu": self.starts_host[: requests + 1],
            "seq_lens": self.lens[:requests],
            "num_reqs": requests,
            "num_actual_tokens": rows,
            "max_query_len": max_query_len,
            "max_seq_len": max_seq_len,
            "block_table_tensor": self.table[:requests],
            "slot_mapping": self.slots[:rows],
            "causal": True,
            "positions": self.positions[:rows],
            "is_prefilling": prefixes == 0,
            "seq_lens_cpu_upper_bound": self.bounds[:requests],
            # None if the host has only bounds, as in vLLM's runners: a builder that reads lengths then copies them from
            # the device. If these were bounds, FlashInfer would plan from them and read KV after a request's last
            # token.
            "_seq_lens_cpu": self.bounds[:requests] if self.known else None,
            "_num_computed_tokens_cpu": computed if self.known else None,
            # Older vLLM releases have no bounds field: they read host lengths from these two fields only.
            "seq_lens_cpu": self.bounds[:requests],
            "num_computed_tokens_cpu": computed,
        }
        return CommonAttentionMetadata(**takes(CommonAttentionMetadata, values))

    def _put(self, tensor: torch.Tensor, values: list[int], whole: bool = True) -> None:
        assert not whole or len(values) == len(tensor), "the values must fill the whole buffer"
        tensor[: len(values)] = torch.tensor(values, dtype=tensor.dtype).to(self.device)
