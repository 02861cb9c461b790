"""What plain Python makes of a round of draft trees, held against what `TreeOps` wrote."""

from __future__ import annotations

import torch

from draftmark.batch import ForwardBatch, Tree
from draftmark.geometry import Geometry, Mode
from draftmark.tree import VerifyResult

from ..cases.trees import beams
from ..check import ContractViolation
from ..oracle.history import Request, chain
from ..oracle.verify_tree import verdict
from .tree_tensors import DIRT, Round, TreeTensors


def tails(geometry: Geometry) -> list[tuple[Mode, int, bool]]:
    """(mode, step, whether it is a tree) of every uniform forward."""
    chains = (Mode.DECODE, Mode.DRAFT_EXTEND)
    found: list[tuple[Mode, int, bool]] = [(mode, 0, False) for mode in chains if mode in geometry.modes]
    if Mode.VERIFY in geometry.modes:
        found.append((Mode.VERIFY, 0, geometry.draft.topk > 1))
    if Mode.DRAFT in geometry.modes:
        found += [(Mode.DRAFT, step, geometry.draft.topk > 1) for step in range(geometry.draft.num_steps - 1)]
    return found


def with_tails(one: Round, geometry: Geometry, mode: Mode, step: int, tree: bool, seed: int) -> list[Request]:
    """The round's requests with the tails of another mode."""
    extent = geometry.extent(mode, step)
    found = []
    for r, request in enumerate(one.requests):
        parents = request.parents if mode is Mode.VERIFY and tree else chain(extent.tail_len)
        if mode is Mode.DRAFT and tree:
            parents = beams(geometry.draft.topk, step, seed + r)
        found.append(Request(request.prefix, request.pages, parents, extent.q_len, request.live))
    return found


def tail_holds(tensors: TreeTensors, batch: ForwardBatch, requests: list[Request], what: str) -> None:
    """Mask, depth and positions are those of the parents; what lies behind them is as dirty as it was."""
    wall, words = tensors.geometry.limits.max_context_len - 1, tensors.buffers.mask.shape[1]
    rows = [(one, one.own_slot(row)) for one in requests for row in range(one.rows)]
    wanted = {"positions": [min(one.prefix + one.depth(slot), wall) for one, slot in rows]}
    found = {"positions": tensors.buffers.positions}
    if isinstance(batch.tail, Tree):
        bits = [sum(1 << seen for seen in one.lineage(slot)) for one, slot in rows]
        wanted["mask"] = [_signed(line >> 32 * word) for line in bits for word in range(words)]
        wanted["depth"] = [one.depth(slot) for one in requests for slot in range(one.tail)]
        found |= {"mask": tensors.buffers.mask.view(-1), "depth": tensors.buffers.depth}
    for name, values in wanted.items():
        got = found[name].tolist()
        if got[: len(values)] != values:
            at = next(i for i, (a, b) in enumerate(zip(got, values, strict=False)) if a != b)
            shown = "".join(f"\n    {one}" for one in requests)
            raise ContractViolation(
                f"{what}: {name} is wrong at element {at}", batch=shown, got=got[at], expected=values[at],
                formula="draftmark.tree.write_tail",
            )  # fmt: skip
        if any(value != DIRT for value in got[len(values) :]):
            raise ContractViolation(
                f"{what}: {name} was written behind the batch", got="a write", expected=f"{len(values)} elements"
            )


def verdict_holds(one: Round, got: VerifyResult, what: str) -> None:
    """Tokens, counts and path of every request, the padded one too."""
    rows = zip(one.drafts, one.requests, one.targets, strict=True)
    wanted = list(zip(*(verdict(d, r.parents, t) for d, r, t in rows), strict=True))
    for name, tensor, values in zip(("tokens", "counts", "path"), got, wanted, strict=True):
        if tensor.dtype is not torch.int64 or tensor.tolist() != list(values):
            raise ContractViolation(
                f"{what}: the verdict's {name} are wrong", batch=one, got=f"{tensor.dtype} {tensor.tolist()}",
                expected=f"torch.int64 {list(values)}", formula="draftmark.tree.verify_tree",
            )  # fmt: skip


def moved(tensors: TreeTensors, one: Round, paths: list[list[int]]) -> list[torch.Tensor]:
    """K and V of `owned` as they must be once each path is contiguous; ``[layers, slots, …]``."""
    size, after = tensors.geometry.attention.page_size, []

    def slot(request: Request, node: int) -> int:
        position = request.prefix + node
        return (request.pages[position // size] - tensors.first_page) * size + position % size

    for pages in tensors.owned:
        old = pages.flatten(1, 2)
        new = old.clone()
        for request, path in zip(one.requests, paths, strict=True):
            for place, node in enumerate(path if request.live else []):
                new[:, slot(request, place)] = old[:, slot(request, node)]
        after.append(new)
    return after


def pool_holds(tensors: TreeTensors, wanted: list[torch.Tensor], one: Round, what: str) -> None:
    """Every byte of every page that a request may own."""
    for name, pages, want in zip("kv", tensors.owned, wanted, strict=True):
        differ = (pages.flatten(1, 2) != want).flatten(2).any(2)
        if bool(differ.any()):
            layer, slot = (int(i) for i in differ.nonzero()[0])
            at = slot + tensors.first_page * tensors.geometry.attention.page_size
            raise ContractViolation(
                f"{what}: {name} of layer {layer} is wrong at slot {at}", batch=one,
                got=f"{int(differ.sum())} slots with other bytes", formula="draftmark.tree.TreeOps.compact",
                expected="the KV of the i-th kept node at position L + i, and every other byte as it was",
            )  # fmt: skip


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word
