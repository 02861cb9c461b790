"""Mutants of what a plugin says: refusals, descriptions, declarations and graph states that do not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from draftmark import Geometry, HostLengthsNeed, Mode, Requirements
from draftmark.errors import BackendRefusal
from draftmark_contract.layouts import Layout, LengthConvention, MetadataSpec

from .mutant import Mutant

_CALLS = count()
_ASKED: set[str] = set()
_SHARED: dict[str, Any] = {}

Declared = dict[Mode, MetadataSpec]


def _refuses(condition: Callable[[Geometry], Any], *reasons: str) -> dict[str, Any]:
    return {"supports": lambda g, found: [*found, *reasons] if condition(g) else found}


def _raises(hook: str, condition: Callable[[Geometry], Any], error: Exception) -> dict[str, Any]:
    def change(geometry: Geometry, found: Any) -> Any:
        if condition(geometry):
            raise error
        return found

    return {hook: change}


def _declares(**fields: Any) -> dict[str, Any]:
    return {"layouts": lambda g, found: {mode: replace(one, **fields) for mode, one in found.items()}}


def _levels(**fields: Any) -> dict[str, Any]:
    def change(geometry: Geometry, found: Declared) -> Declared:
        return {m: replace(s, levels=tuple(replace(x, **fields) for x in s.levels)) for m, s in found.items()}

    return {"layouts": change}


def _unnamed(role: str) -> dict[str, Any]:
    """No level names the buffer of a role."""

    def change(geometry: Geometry, found: Declared) -> Declared:
        return {
            mode: replace(
                spec,
                levels=tuple(
                    replace(one, buffers={k: v for k, v in one.buffers.items() if k != role}) for one in spec.levels
                ),
            )
            for mode, spec in found.items()
        }

    return {"layouts": change}


def _misnamed(geometry: Geometry, found: Declared) -> Declared:
    return {
        mode: replace(
            s, levels=tuple(replace(x, buffers={**x.buffers, "mask_indptr": "slot_mapping"}) for x in s.levels)
        )
        for mode, s in found.items()
    }


def _forgets(geometry: Geometry, reasons: list[str]) -> list[str]:
    """Refuses windows the first time only."""
    new = repr(geometry) not in _ASKED
    _ASKED.add(repr(geometry))
    return ["windows are not served by these kernels"] if new and geometry.attention.window_left >= 0 else reasons


def _prints(geometry: Geometry, found: Any) -> Any:
    print("loading kernels")
    return found


def _one_list(geometry: Geometry, found: list[Any]) -> list[Any]:
    return _SHARED.setdefault(repr(geometry), found)  # type: ignore[no-any-return]


def _grows(geometry: Geometry, specs: list[Any]) -> list[Any]:
    return [replace(one, formula=f"{one.formula} (asked {next(_CALLS)} times)") for one in specs]


def _says(**fields: Any) -> dict[str, Any]:
    def change(_: None, info: Any) -> Any:
        return replace(info, **{name: one() if callable(one) else one for name, one in fields.items()})

    return {"describe": change}


def _dodges(geometry: Geometry, found: Requirements) -> Requirements:
    need = HostLengthsNeed.NONE if geometry.limits.overlap else HostLengthsNeed.EXACT
    return replace(found, host_lengths=need)


def _graphs(change: Callable[[Any], None]) -> dict[str, Any]:
    return {"graph_state": lambda g, state: (change(state), state)[1]}


def _eager(state: Any) -> None:
    """A replay calls the step again, and copies what it returns."""
    from torch.utils._pytree import tree_map

    steps: dict[Any, Any] = {}
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        steps[key] = (step, original(key, step))
        return steps[key][1]

    def replay(key: Any) -> Any:
        if key not in steps:
            return type(state).replay(state, key)
        step, outputs = steps[key]
        tree_map(lambda old, new: old.copy_(new), outputs, step())
        return outputs

    state.capture, state.replay = capture, replay


def _copies(state: Any) -> None:
    from torch.utils._pytree import tree_map

    original = state.replay
    state.replay = lambda key: tree_map(lambda one: one.clone(), original(key))


def _quiet(state: Any) -> None:
    original = state.replay
    state.replay = lambda key: original(key) if key in state.keys else None


def _twice(state: Any) -> None:
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        state._recordings.pop(key, None)
        return original(key, step)

    state.capture = capture


def _typed(**values: Any) -> dict[str, Any]:
    """A graph state whose properties lie."""

    def change(state: Any) -> None:
        state.__class__ = type("Lies", (type(state),), {k: property(lambda self, v=v: v) for k, v in values.items()})

    return _graphs(change)


def _windowed(geometry: Geometry) -> bool:
    return geometry.attention.window_left >= 0


MUTANTS = (
    Mutant("W30", "supports says yes, buffers raises", "sglang#15664",
           _raises("buffers", _windowed, RuntimeError("no windows"))),
    Mutant("W30b", "supports says yes, buffers refuses", "sglang#15664",
           _raises("buffers", _windowed, BackendRefusal("late", ["windows are not served here"]))),
    Mutant("W31", "supports says yes, layouts raises", "sglang#15664",
           _raises("layouts", lambda g: g.draft.topk > 9, RuntimeError("topk"))),
    Mutant("W32", "mandatory profile refused where padding exceeds the live limit", "sglang#25124",
           _refuses(lambda g: g.max_reqs > g.limits.max_num_reqs, "captured sizes above max_num_reqs are not served")),
    Mutant("W32b", "mandatory profile refused if eager", "sglang#35932",
           _refuses(lambda g: not g.limits.capture_batch_sizes, "eager runs are not served: name a captured size")),
    Mutant("W33", "a reason of one word", "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "no")),
    Mutant("W34", "an empty reason", "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "")),
    Mutant("W35", "a reason that counts the calls", "sglang#31198",
           {"supports": lambda g, found: [f"windows are not served, said {next(_CALLS)} times"]
            if _windowed(g) else found}),
    Mutant("W36", "refuses when asked first, serves when asked again", "sglang#31198", {"supports": _forgets}),
    Mutant("W37", "supports prints", "sglang#32920", {"supports": _prints}),
    Mutant("W38", "buffers returns one list to everybody", "sglang#31198", {"buffers": _one_list}),
    Mutant("W39", "buffers depend on the number of calls", "sglang#31198", {"buffers": _grows}),
    Mutant("W40", "mask stride -1", "sglang#31367", _declares(mask_stride=-1)),
    Mutant("W41", "declares a mask stride that is not the mask's", "TRT-LLM#13006",
           {"layouts": lambda g, found: {m: replace(s, mask_stride=g.mask_words + 1) for m, s in found.items()}}),
    Mutant("W42", "declares another mask dtype", "TRT-LLM#13006", _declares(mask_dtype="uint8")),
    Mutant("W43", "names a buffer under another role", "vllm#17394", {"layouts": _misnamed}),
    Mutant("W44", "declares prefix lengths, writes prefix plus tail", "sglang#26512",
           _levels(lengths=LengthConvention.PREFIX)),
    Mutant("W45", "declares token slots, writes pages", "sglang#24587", _levels(layout=Layout.CSR_TOKENS),
           layouts=("csr",), absent="no CSR; W45b declares an absent level"),
    Mutant("W45b", "declares that a level does not exist", "sglang#24587", _levels(layout=Layout.NONE)),
    Mutant("W46", "a slot mapping that no level names", "vllm#17394", _unnamed("slot_mapping")),
    Mutant("W47", "declares that no mask applies", "sglang#32920", _levels(masked=False)),
    Mutant("W48", "targets a contract of the future", "vllm#57566", _says(contract_minor=99)),
    Mutant("W48b", "targets a contract before the first", "vllm#57566", _says(contract_minor=-1)),
    Mutant("W49", "a runtime without a name", "vllm#57566", _says(runtime=("torch", ""))),
    Mutant("W49b", "describes itself anew each time", "vllm#57566", _says(summary=lambda: str(next(_CALLS)))),
    Mutant("W50", "no formula", "vllm#17394",
           {"buffers": lambda g, specs: [replace(one, formula="") for one in specs]}),
    Mutant("W51", "exact lengths declared without overlap only", "sglang#30217", {"requirements": _dodges}),
    Mutant("W52", "refuses by None", "sglang#32920", {"supports": lambda g, found: None}),
    Mutant("W53", "pad_fill 2", "vllm#38436", _declares(pad_fill=2)),
    Mutant("W54", "live_extent of another word", "vllm#38436", _declares(live_extent="all")),
    Mutant("W55", "open_backend returns no backend", "sglang#30846", {"open_backend": lambda g, backend: object()}),
    Mutant("W56", "a replay runs the step eagerly", "sglang#36658", _graphs(_eager)),
    Mutant("W57", "a replay returns other outputs than the capture", "vllm#53658", _graphs(_copies)),
    Mutant("W58", "replaying an unknown key does nothing", "sglang#40396", _graphs(_quiet)),
    Mutant("W59", "capturing a key again replaces its graph", "TRT-LLM#17110", _graphs(_twice)),
    Mutant("W60", "a graph state that knows no keys", "sglang#40396", _typed(keys=())),
    Mutant("W61", "a graph state of negative size", "sglang#24453", _typed(pool_bytes=-1)),
    Mutant("W62", "unique slots declared, shared null pages written", "lmdeploy#4569",
           {"requirements": lambda g, found: replace(found, unique_slots=True)},
           patch=lambda b: _null_slots(b)),
)  # fmt: skip


def _null_slots(backend: Any) -> None:
    """Padded rows go to slot 0, whatever their page table says."""
    original = backend.write_metadata

    def write(batch: Any) -> None:
        original(batch)
        pad = (
            (batch.prefix_lens == 0)
            & (batch.page_table[:, 0] < 64)
            & (batch.page_table[:, 0] == batch.page_table[:, -1])
        )
        if batch.uniform is not None:
            rows = pad.repeat_interleave(batch.q_lens[0], output_size=batch.num_rows)
            backend.arena["slot_mapping"][: batch.num_rows].masked_fill_(rows, 0)

    backend.write_metadata = write
