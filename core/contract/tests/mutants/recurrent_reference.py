"""Mutants E51 … E63 of recurrent state in the reference, by snapshots and by replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark.geometry import Mode
from draftmark.reference import ReferencePlugin
from draftmark.runtime import VerifyResult

from .mutant import Mutant, around

Tensor = torch.Tensor
IN_ONE_DESIGN = "one design is enough"


def _after(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a patch that changes the result or the arguments of the state after accepted rows."""
    return lambda backend: around(backend, "_after", change)


def _reads_recycled(backend: Any) -> None:
    """Read the slot of a request without a prefix in EXTEND."""
    right = backend._state

    def state(cache: Any, batch: Any, some: slice = slice(None)) -> Tensor:
        if batch.mode is not Mode.EXTEND:
            return right(cache, batch, some)
        assert batch.state_slots is not None
        return cache.state[batch.state_slots.long()[some]].to(backend._compute)

    backend._state = state


def _reads_recycled_windows(backend: Any) -> None:
    """Read the window of a request without a prefix."""

    def window(cache: Any, batch: Any, some: slice = slice(None)) -> Tensor:
        found = cache.conv[batch.state_slots.long()[some]].transpose(1, 2)
        return found.to(getattr(torch, backend.geometry.state.dtype))

    backend._window = window


def _window_stays(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    state, _ = original(committed, path, count, layer)
    return state, committed[1].transpose(1, 2)


def _state_stays(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    _, window = original(committed, path, count, layer)
    return committed[0], window


def _in_order(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    order = torch.arange(path.shape[1], device=path.device).expand_as(path)
    return original(committed, order, count, layer)


def _first_layer(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    return original(committed, path, count, 0)


def _one_row_less(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    return original(committed, path, torch.where(count > 1, count - 1, count), layer)


def _rounded(backend: Any) -> None:
    """Round the kept rows or states to bfloat16."""

    def keep(original: Any, *args: Any) -> None:
        original(*args)
        for name in ("states", "decays", "betas"):
            if name in set(backend.arena):
                backend.arena[name].copy_(backend.arena[name].to(torch.bfloat16))

    around(backend, "_keep_rows", keep)


def _without_strength(backend: Any) -> None:
    """Replay rows with a strength of 1."""

    def keep(original: Any, rows: tuple[Tensor | None, ...], layer: int) -> None:
        *others, beta = rows
        original((*others, None if beta is None else torch.ones_like(beta)), layer)

    around(backend, "_keep_rows", keep)


def _moves_before_it_saves(backend: Any) -> None:
    """Move the slots first, and compute the checkpoint from the moved slots."""

    def commit(original: Any, pool: Any, batch: Any, accepted: VerifyResult | None, saves: Any = None) -> None:
        original(pool, batch, accepted, None)
        if saves is not None and accepted is not None:
            kept = [one.clone() for one in (pool.state, pool.conv)]
            original(pool, batch, accepted, saves)
            own = batch.state_slots.long()
            for one, before in zip((pool.state, pool.conv), kept, strict=True):
                one[:, own] = before[:, own]
        elif saves is not None:
            original(pool, batch, accepted, saves)

    around(backend, "commit", commit)


def _verifies_in_place(backend: Any) -> None:
    """Write the slot from the first row of a verify in the last layer."""

    def recur(original: Any, *args: Any) -> None:
        original(*args)
        *_, cache, batch, _ = args
        if batch.mode is Mode.VERIFY and "states" in set(backend.arena):
            slots = batch.state_slots.long()
            cache.state[slots] = backend.arena["states"][cache.layer, : len(slots), 0].to(cache.state.dtype)

    around(backend, "recur", recur)


def _mutant(name: str, what: str, rollback: str, patch: Callable[[Any], None], source: str) -> Mutant:
    base = ReferencePlugin(rollback)  # type: ignore[arg-type]
    return Mutant(
        name, what, source, state_patch=patch, layouts=("reference",), absent=IN_ONE_DESIGN, base=base, of_state=True
    )


MUTANTS = (
    _mutant("E51", "Reads a recycled state in a prompt", "snapshots", _reads_recycled, "vllm#51483"),
    _mutant("E52", "Reads a recycled window", "replay", _reads_recycled_windows, "vllm-metal#488"),
    _mutant("E53", "Commits a snapshot without its window", "snapshots", _after(_window_stays), "mlx-swift-lm#218"),
    _mutant("E54", "Commits a window without its state", "replay", _after(_state_stays), "llama.cpp#20075"),
    _mutant("E55", "Takes snapshots in order", "snapshots", _after(_in_order), "sglang#27463"),
    _mutant("E56", "Replays rows in order", "replay", _after(_in_order), "TRT-LLM#16759"),
    _mutant("E57", "Commits every layer from the first one's rows", "replay", _after(_first_layer), "sglang#33497"),
    _mutant("E58", "Commits one row less", "snapshots", _after(_one_row_less), "vllm#50021"),
    _mutant("E59", "Rounds snapshots to bfloat16", "snapshots", _rounded, "sglang#40419"),
    _mutant("E60", "Rounds replayed gates to bfloat16", "replay", _rounded, "sglang#33630"),
    _mutant("E61", "Replays rows with a strength of 1", "replay", _without_strength, "sglang#28695"),
    _mutant("E62", "Saves after it has moved the slot", "replay", _moves_before_it_saves, "vllm#53479"),
    _mutant("E63", "Writes the slot from a verify", "snapshots", _verifies_in_place, "llama.cpp#26695"),
)
KILLER = {
    **dict.fromkeys(("E51", "E52"), "state.no_prefix_is_zeros"),
    **dict.fromkeys(("E53", "E54", "E55", "E56", "E57", "E58", "E61"), "state.commit_keeps_the_path"),
    **dict.fromkeys(("E59", "E60"), "state_history.does_not_drift"),
    "E62": "state.checkpoint_is_its_length",
    "E63": "state.verify_leaves_the_slot",
}
"""Check that must kill each mutant."""
