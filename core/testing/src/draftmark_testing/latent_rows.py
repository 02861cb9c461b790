"""Float64 attention of single rows over latent KV, for the tests of plugins.

It shares no code with the plugins, with the core's `scene_attention` or with the contract's oracle.
"""

from __future__ import annotations

import torch

from draftmark.batch import ForwardBatch


def slots_at(batch: ForwardBatch, request: int, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the KV slots of a request's positions, int64, on the device of `positions`."""
    pages = batch.page_table[request].to(positions.device)
    return pages[positions // page_size].long() * page_size + positions % page_size


def assert_latent_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    value_dim: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    atol: float = 2e-3,
    about: object = "",
) -> None:
    """Compare one row's output, and its log-sum-exp if it is given, with attention in float64.

    Args:
        q: queries of the row, ``[heads, head_dim]``.
        keys: latent rows that it sees, ``[keys, head_dim]``; their first `value_dim` elements are the values.
        value_dim: elements of a value.
        scale: softmax scale.
        out: output, ``[heads, value_dim]``.
        lse: log-sum-exp, ``[heads]``.
        atol: largest error of `lse`.
        about: names the row in the failure.
    """
    logits = q.double() @ keys.double().T * scale
    want = logits.softmax(-1) @ keys[:, :value_dim].double()
    error = float((out.double() - want).norm() / want.norm())
    assert error < 1e-2, (about, error)
    if lse is not None:
        torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=atol, rtol=0)
