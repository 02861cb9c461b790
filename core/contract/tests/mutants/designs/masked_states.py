"""Correct recurrent state that computes all rows of a tree from the committed state and the ancestor mask."""

from __future__ import annotations

import torch

from draftmark import BufferSpec, Gate, StateGeometry
from draftmark.runtime import ForwardBatch, StateCache, Tree, VerifyResult

from .state_designs import LEAVES_STATE, StateDesign, Tensor, View, channels_buffer, rows_of

CHUNK = 16
"""Rows that `Masked` computes at once in a prompt."""


class Masked(StateDesign):
    """Computes all rows of a chunk from the committed state and the ancestor mask, and stores records of rows."""

    @staticmethod
    def buffers(geometry: StateGeometry) -> list[BufferSpec]:
        """Return the records of the rows of the largest batch: update, key and decay."""
        s, rows = geometry.state, rows_of(geometry)
        parts = {"updates": s.value_dim, "keys": s.key_dim, "decays": s.key_dim if s.gate is Gate.KEY else 1}
        specs = [
            BufferSpec(
                name,
                (*rows, s.num_heads, width),
                s.compute_dtype,
                "layers · max_reqs · D",
            )
            for name, width in parts.items()
        ]
        return [*(specs if s.num_heads else []), *channels_buffer(geometry)]

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: Tensor,
    ) -> None:
        """Compute a verify at once, and a prompt chunk by chunk."""
        view = self.view(batch)
        q, k, v, decay, strength = self.inputs(q, k, v, log_decay, beta, view)
        state = self.first(cache.state, view)
        if batch.mode not in LEAVES_STATE:
            reach = self.reach(batch, view)
            total = self.along(reach, decay)
            u = self.updates(state, k, v, strength, total, reach)
            self.spread(self.outputs(state, q, k, u, total, reach), view, out)
            self.keep_records(cache, view, u, k, decay)
            return
        found = []
        for start in range(0, view.index.shape[1], CHUNK):
            chunk = slice(start, start + CHUNK)
            reach = torch.ones(k[:, chunk].shape[1], k[:, chunk].shape[1], dtype=torch.bool, device=k.device).tril()
            reach = reach & view.valid[:, None, chunk]
            total = self.along(reach, decay[:, chunk])
            u = self.updates(state, k[:, chunk], v[:, chunk], strength[:, chunk], total, reach)
            found.append(self.outputs(state, q[:, chunk], k[:, chunk], u, total, reach))
            state = self.folded(state, k[:, chunk], u, decay[:, chunk], view.valid[:, chunk])
        self.spread(torch.cat(found, 1), view, out)
        self.store(cache.state, view.slots, state, view.count > 0)

    def reach(self, batch: ForwardBatch, view: View) -> Tensor:
        """Return the ancestors of each row, itself included, bool ``[R, T, T]``."""
        t = torch.arange(view.index.shape[1], device=view.index.device)
        if not isinstance(batch.tail, Tree):
            return (t <= t[:, None]) & view.valid[:, None]
        words = batch.tail.mask[view.index].long()
        bits = words.gather(-1, (t // 32).expand(*view.index.shape, -1)) >> (t % 32)
        return (bits & 1).bool() & view.valid[:, None]

    @staticmethod
    def along(reach: Tensor, decay: Tensor) -> Tensor:
        """Return the log decay from the committed state to each row, ``[R, T, heads, keys]``."""
        return torch.einsum("rtj,rjhk->rthk", reach.to(decay.dtype), decay)

    @staticmethod
    def weights(q: Tensor, k: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return ``(G_t / G_j) k_j · q_t`` for each row t and ancestor j, ``[R, heads, T, T]``."""
        ratio = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
        found = (q[:, :, None] * k[:, None] * ratio).sum(-1)
        return torch.where(reach[..., None], found, 0.0).permute(0, 3, 1, 2)

    def updates(self, state: Tensor, k: Tensor, v: Tensor, strength: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return the update of each row, by forward substitution."""
        if not self.delta:
            return v * strength[..., None]
        prior = v - torch.einsum("rhvk,rthk->rthv", state, k * total.exp())
        own = torch.eye(reach.shape[1], dtype=torch.bool, device=reach.device)
        mixed = self.weights(k, k, total, reach & ~own) * strength.permute(0, 2, 1)[..., None]
        system = torch.eye(reach.shape[1], dtype=k.dtype, device=k.device) + mixed
        right = (prior * strength[..., None]).permute(0, 2, 1, 3)
        return torch.linalg.solve_triangular(system, right, upper=False).permute(0, 2, 1, 3)

    def outputs(self, state: Tensor, q: Tensor, k: Tensor, u: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        """Return the output of each row, ``[R, T, heads, value_dim]``."""
        prefix = torch.einsum("rhvk,rthk->rthv", state, q * total.exp())
        return prefix + torch.einsum("rhtj,rjhv->rthv", self.weights(q, k, total, reach), u)

    @staticmethod
    def folded(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, valid: Tensor) -> Tensor:
        """Return the state after the valid rows of a chain."""
        decay = torch.where(valid[..., None, None], decay, 0.0)
        after = decay.flip(1).cumsum(1).flip(1) - decay
        kept = torch.where(valid[..., None, None], u, 0.0)
        return state * decay.sum(1)[:, :, None].exp() + torch.einsum("rthv,rthk->rhvk", kept, k * after.exp())

    def keep_records(self, cache: StateCache, view: View, u: Tensor, k: Tensor, decay: Tensor) -> None:
        """Store the records of a verify for its commit."""
        for name, values in (("updates", u), ("keys", k), ("decays", decay)):
            self.arena[name][cache.layer, : len(view.slots), : u.shape[1]] = values

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        """Return the committed state plus the records of `count` accepted rows."""
        path = accepted.accept_index
        valid = torch.arange(path.shape[1], device=path.device) < count[:, None]

        def taken(name: str) -> Tensor:
            kept = self.arena[name][cache.layer, : len(path)]
            found = kept.gather(1, path[..., None, None].expand(-1, -1, *kept.shape[2:]))
            return torch.where(valid[..., None, None], found, 0.0)

        u, k, decay = (taken(name) for name in ("updates", "keys", "decays"))
        return self.folded(self.first(cache.state, view), k, u, decay, valid)
