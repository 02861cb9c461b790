"""What one verification leaves for the head to take over: the accepted path, in static tensors."""

from __future__ import annotations

import torch

from draftmark.geometry import Geometry
from draftmark.tree import VerifyResult


class Accepted:
    """Written at the end of VERIFY, read by DRAFT_EXTEND. Rows are batch entries.

    Attributes:
        prefix_lens: int32 ``[max_reqs]``, committed tokens *before* the round: where the path begins.
        tokens: int64 ``[max_reqs, D]``, the token behind each kept node; -1 beyond counts.
        counts: int64 ``[max_reqs]``, kept nodes.
        features: ``[max_reqs, D, width]``, the target's features of each kept node; beyond counts of any node.
    """

    def __init__(self, geometry: Geometry, width: int, dtype: torch.dtype, device: torch.device) -> None:
        reqs, nodes = geometry.max_reqs, geometry.draft.num_draft_tokens
        self.prefix_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self.tokens = torch.full((reqs, nodes), -1, dtype=torch.int64, device=device)
        self.accept_lens = torch.ones(reqs, dtype=torch.int64, device=device)
        self.features = torch.zeros(reqs, nodes, width, dtype=dtype, device=device)

    def write(self, prefix_lens: torch.Tensor, verdict: VerifyResult, features: torch.Tensor) -> None:
        """Keep a round's path. Capturable.

        Args:
            prefix_lens: int32 ``[R]``, of the verified batch.
            features: ``[R · D, width]``, of every node.
        """
        size, nodes = verdict.accept_index.shape
        by_node = features.view(size, nodes, -1)
        path = verdict.accept_index[:, :, None].expand(-1, -1, by_node.shape[-1])
        self.prefix_lens[:size].copy_(prefix_lens)
        self.tokens[:size].copy_(verdict.tokens)
        self.accept_lens[:size].copy_(verdict.accept_lens)
        torch.gather(by_node, 1, path, out=self.features[:size])
