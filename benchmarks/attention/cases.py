"""Cases of the attention benchmark, their inputs, and a float64 reference.

The first twelve have one attention shape (`models.STANDARD`) and never change, so that runs compare; `grid` adds other
shapes. Inputs are random. A case has several KV sets, and the timed calls rotate through them, so that a call does not
find the previous call's KV in L2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from draftmark.tree import ancestors, depths, pack_bits
from draftmark_contract.cli.measuring import replayed_us

from .models import STANDARD, Model

L2_BYTES = 60 << 20


@dataclass(frozen=True)
class Case:
    """One case: request lengths, rows, and an attention shape.

    Attributes:
        name: as rows name it, for example verify16-64x8192.
        lens: committed tokens of each request.
        q_len, tail_len: query rows and new tokens (draft tree or chain) of each request. A prefill has prefix 0.
        tree: the new tokens have an arbitrary mask. Otherwise they are causal, a chain if there are several.
        ragged: run as a prefill, through the ragged kernel.
        model: heads, head_dim, page size, KV dtype, window, soft cap, sinks.
        uneven: rows of each request if they differ; `q_len` and `tail_len` are then the largest.
    """

    name: str
    lens: tuple[int, ...]
    q_len: int
    tail_len: int
    tree: bool = False
    ragged: bool = False
    model: Model = STANDARD
    uneven: tuple[int, ...] = ()

    def paged(self, page: int) -> Case:
        """Return the case with another page size, also in its name if the name has one."""
        name = re.sub(r"-p\d+", f"-p{page}", self.name)
        return replace(self, name=name, model=self.model.paged(page))

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Number of query rows of each request."""
        return self.uneven or (self.q_len,) * len(self.lens)

    @property
    def tail_lens(self) -> tuple[int, ...]:
        """Number of new tokens (draft tree or chain) of each request."""
        return self.uneven or (self.tail_len,) * len(self.lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call must read once."""
        seen = sum(map(self.model.seen, self.lens)) + sum(self.tail_lens)
        return seen * self.model.token_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of K and V in the cache, also of tokens outside a window."""
        return (sum(self.lens) + sum(self.tail_lens)) * self.model.token_bytes


def ragged_lens(count: int, longest: int) -> tuple[int, ...]:
    """Return fixed pseudo-random lengths, 1 to `longest`."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(1, longest + 1, (count,), generator=generator).tolist())


CASES = (
    Case("decode-64x8192", (8192,) * 64, 1, 1),
    Case("decode-8x32768", (32768,) * 8, 1, 1),
    Case("decode-1x32768", (32768,), 1, 1),
    Case("decode-64xragged", ragged_lens(64, 8192), 1, 1),
    Case("draft8-64x8192", (8192,) * 64, 8, 16, tree=True),
    Case("draft8-8x32768", (32768,) * 8, 8, 16, tree=True),
    Case("draft8-1x32768", (32768,), 8, 16, tree=True),
    Case("verify16-64x8192", (8192,) * 64, 16, 16, tree=True),
    Case("verify16-8x32768", (32768,) * 8, 16, 16, tree=True),
    Case("verify64-1x32768", (32768,), 64, 64, tree=True),
    Case("verify64-16x8192", (8192,) * 16, 64, 64, tree=True),
    Case("extend-8x4096", (0,) * 8, 4096, 4096, ragged=True),
)


@dataclass
class Inputs:
    """Tensors of one case on the device.

    Attributes:
        q: queries, bfloat16 ``[rows, heads, dim]``.
        caches: KV sets that calls rotate through; they share one page table.
        prefix_lens: int32 ``[R]``.
        page_table: int32 ``[R, pages]``.
        q_indptr: int32 ``[R + 1]``.
        mask, depth: packed mask and depths of a tree, as in `draftmark.runtime.Tree`.
    """

    case: Case
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    prefix_lens: torch.Tensor
    page_table: torch.Tensor
    q_indptr: torch.Tensor
    mask: torch.Tensor | None
    depth: torch.Tensor | None
    seen: torch.Tensor | None
    """Unpacked mask, bool ``[R, q_len, tail_len]``, for peers that need it."""
    sinks: torch.Tensor | None = None
    """float32 ``[query heads]``, in natural units."""

    @property
    def tails(self) -> torch.Tensor:
        """Number of new tokens (draft tree or chain) of each request, int32 ``[R]``."""
        return torch.tensor(self.case.tail_lens, dtype=torch.int32, device=self.q.device)


def build(case: Case, device: str = "cuda", sets: int | None = None, most_pages: int | None = None) -> Inputs:
    """Draw the inputs of a case. Pages are scattered over the pool; unused slots are NaN, as in a dirty pool.

    Args:
        sets: number of K and V sets; by default enough to be together larger than L2.
        most_pages: largest number of pages in the pool. With fewer than the case needs, pages repeat and outputs are
            not those of the case.
    """
    requests, model = len(case.lens), case.model
    pages_per_req = [-(-(n + tail) // model.page) for n, tail in zip(case.lens, case.tail_lens, strict=True)]
    pool = 1 + min(sum(pages_per_req), most_pages or sum(pages_per_req))
    page_table = torch.zeros(requests, max(pages_per_req), dtype=torch.int32)
    ids = torch.randperm(sum(pages_per_req), dtype=torch.int32) % (pool - 1) + 1
    first = 0
    for r, n in enumerate(pages_per_req):
        page_table[r, :n] = ids[first : first + n]
        first += n
    page_table = page_table.to(device)
    prefix_lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    sets = sets or max(1, min(4, -(-4 * L2_BYTES // case.kv_bytes)))
    caches = [_cache(pool, page_table, pages_per_req, case, device) for _ in range(sets)]
    q = torch.randn(sum(case.q_lens), model.heads, model.dim, device=device).to(torch.bfloat16)
    q_indptr = torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32, device=device)
    mask = depth = seen = None
    if case.tree:
        seen, depth = _trees(case, device)
        mask = pack_bits(seen.flatten(0, 1), -(-case.tail_len // 32))
    # Values that bf16 can represent, because peers read sinks as bf16.
    sinks = torch.randn(model.heads, device=device).to(torch.bfloat16).float() if model.sinks else None
    return Inputs(case, q, caches, prefix_lens, page_table, q_indptr, mask, depth, seen, sinks)


def _cache(
    pool: int, page_table: torch.Tensor, pages_per_req: list[int], case: Case, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    pair, model = [], case.model
    for _ in range(2):
        cache = torch.randn(pool, model.page, model.kv_heads, model.dim, device=device, dtype=torch.bfloat16)
        cache[0] = 0
        for r, n in enumerate(pages_per_req):
            used = (case.lens[r] + case.tail_lens[r]) - (n - 1) * model.page
            cache[page_table[r, n - 1].long(), used:] = float("nan")
        pair.append(cache.to(getattr(torch, model.kv_dtype)))
    return _packed(pair, model)


def _packed(pair: list[torch.Tensor], model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V. If the model's layout packs them into shared pages, return views of one tensor."""
    if not model.packed:
        return pair[0], pair[1]
    side = 2 if model.packed == "tokens" else 3
    k, v = torch.cat(pair, side).chunk(2, side)
    return k, v


def _trees(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a random tree for each request: every slot except the first has a random earlier parent."""
    requests, tail, q_len = len(case.lens), case.tail_len, case.q_len
    parents = [torch.full((requests,), -1), *(torch.randint(0, slot, (requests,)) for slot in range(1, tail))]
    seen = ancestors(torch.stack(parents, 1))
    return seen[:, tail - q_len :].contiguous().to(device), depths(seen).int().to(device)


def reference(inputs: Inputs, cache: tuple[torch.Tensor, torch.Tensor], tail: str = "exact") -> torch.Tensor:
    """Compute attention in float64, request by request.

    `tail` selects the problem: "exact" (the case itself), "causal" (a chain instead of the tree) or "none" (only the
    prefix). With the last two, a peer without tree masks can be checked.
    """
    case, out = inputs.case, torch.empty(inputs.q.shape, dtype=torch.float64, device=inputs.q.device)
    model = case.model
    group = model.heads // model.kv_heads
    for r, n in enumerate(case.lens):
        keys = n + case.tail_lens[r]
        pages = inputs.page_table[r, : -(-keys // model.page)].long()
        k, v = (_rows(tensor, pages)[:keys].double().transpose(0, 1) for tensor in cache)
        first = sum(case.q_lens[:r])
        rows = slice(first, first + case.q_lens[r])
        q = inputs.q[rows].double().transpose(0, 1)
        hidden = torch.zeros(case.q_lens[r], keys, dtype=torch.bool, device=q.device)
        hidden[:, n:] = ~_tail(inputs, r, tail)
        if model.window:
            at = _positions(inputs, r, tail)
            hidden |= at[-case.q_lens[r] :, None] - at[None] > model.window_left
        for h in range(model.kv_heads):
            heads = slice(h * group, (h + 1) * group)
            scores = q[heads] @ k[h].T * model.scale
            if model.cap:
                scores = model.cap * (scores / model.cap).tanh()
            weights = _weights(scores.masked_fill_(hidden, float("-inf")), inputs.sinks, heads)
            out[rows, heads] = (weights @ v[h]).transpose(0, 1)
    return out


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None, heads: slice) -> torch.Tensor:
    """Return the softmax weights of the keys, ``[heads, rows, keys]``. A sink adds to the denominator only."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks[heads].double()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def _positions(inputs: Inputs, request: int, tail: str) -> torch.Tensor:
    """Return the positions of a request's keys. A tree's slot has the prefix length plus its depth."""
    n, slots = inputs.case.lens[request], inputs.case.tail_lens[request]
    own = torch.arange(slots, device=inputs.q.device)
    if inputs.depth is not None and tail == "exact":
        own = inputs.depth[request].long()
    return torch.cat([torch.arange(n, device=inputs.q.device), n + own])


def _rows(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the K or V rows of some pages. torch cannot index e4m3 tensors, so this function indexes bytes."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)
    return cache[pages].flatten(0, 1)


def _tail(inputs: Inputs, request: int, tail: str) -> torch.Tensor:
    rows, slots = inputs.case.q_lens[request], inputs.case.tail_lens[request]
    if tail == "none":
        return torch.zeros(rows, slots, dtype=torch.bool, device=inputs.q.device)
    if inputs.seen is not None and tail == "exact":
        return inputs.seen[request]
    own = torch.arange(slots - rows, slots, device=inputs.q.device)
    return torch.arange(slots, device=inputs.q.device) <= own[:, None]


def clear_unused(inputs: Inputs) -> None:
    """Write zeros to unused cache slots. They hold NaN, and only draftmark's plugins promise to ignore them."""
    for pair in inputs.caches:
        for cache in pair:
            cache.copy_(cleared(cache))


def cleared(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache with zeros instead of NaN."""
    if cache.element_size() > 1:
        return cache.nan_to_num(0.0)
    bits = cache.view(torch.uint8)
    return bits.where((bits & 127) != 127, 0).view(cache.dtype)  # e4m3 encodes NaN as seven one bits


def microseconds(calls: list) -> float:
    """Return the median time of one call, measured as in `draftmark bench`. The calls differ in their KV set."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    return replayed_us(calls)
