"""Mutants with wrong return values of a plugin's hooks: refusals, descriptions, declarations and graph states."""

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
    """Return a `layouts` hook that removes the buffer of one role from every attention pass."""

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
    """Refuse windows only on the first call for a geometry."""
    new = repr(geometry) not in _ASKED
    _ASKED.add(repr(geometry))
    return ["windows are not served by these kernels"] if new and geometry.attention.window_left >= 0 else reasons


def _prints(geometry: Geometry, found: Any) -> Any:
    print("loading kernels")
    return found


def _one_list(geometry: Geometry, found: list[Any]) -> list[Any]:
    return _SHARED.setdefault(repr(geometry), found)  # type: ignore[no-any-return]


def _grows(geometry: Geometry, specs: list[Any]) -> list[Any]:
    return [replace(one, formula=f"{one.formula} (call {next(_CALLS)})") for one in specs]


def _described(**fields: Any) -> dict[str, Any]:
    def change(_: None, info: Any) -> Any:
        return replace(info, **{name: one() if callable(one) else one for name, one in fields.items()})

    return {"describe": change}


def _dodges(geometry: Geometry, found: Requirements) -> Requirements:
    need = HostLengthsNeed.NONE if geometry.limits.overlap else HostLengthsNeed.EXACT
    return replace(found, host_lengths=need)


def _graphs(change: Callable[[Any], None]) -> dict[str, Any]:
    return {"graph_state": lambda g, state: (change(state), state)[1]}


def _eager(state: Any) -> None:
    """Make a replay call the step again and copy its results to the outputs."""
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
    """Return a `graph_state` hook for a state with properties that return wrong values."""

    def change(state: Any) -> None:
        state.__class__ = type("Lies", (type(state),), {k: property(lambda self, v=v: v) for k, v in values.items()})

    return _graphs(change)


def _windowed(geometry: Geometry) -> bool:
    return geometry.attention.window_left >= 0


MUTANTS = (
    Mutant("W30", "Accepts a geometry in supports and raises in buffers", "sglang#15664",
           _raises("buffers", _windowed, RuntimeError("no windows"))),
    Mutant("W30b", "Accepts a geometry in supports and refuses it in buffers", "sglang#15664",
           _raises("buffers", _windowed, BackendRefusal("late", ["windows are not served here"]))),
    Mutant("W31", "Accepts a geometry in supports and raises in layouts", "sglang#15664",
           _raises("layouts", lambda g: g.draft.topk > 9, RuntimeError("topk"))),
    Mutant("W32", "Refuses the mandatory profile when padding exceeds max_num_reqs", "sglang#25124",
           _refuses(lambda g: g.max_reqs > g.limits.max_num_reqs, "captured sizes above max_num_reqs are not served")),
    Mutant("W32b", "Refuses the mandatory profile without captured sizes", "sglang#35932",
           _refuses(lambda g: not g.limits.capture_batch_sizes, "eager runs are not served: name a captured size")),
    Mutant("W33", "Gives a refusal reason of one word",
           "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "no")),
    Mutant("W34", "Gives an empty refusal reason", "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "")),
    Mutant("W35", "Gives a refusal reason that counts the calls", "sglang#31198",
           {"supports": lambda g, found: [f"windows are not served, call {next(_CALLS)}"]
            if _windowed(g) else found}),
    Mutant("W36", "Refuses a geometry on the first call and accepts it on the second",
           "sglang#31198", {"supports": _forgets}),
    Mutant("W37", "Prints in supports", "sglang#32920", {"supports": _prints}),
    Mutant("W38", "Returns one shared list from buffers on every call", "sglang#31198", {"buffers": _one_list}),
    Mutant("W39", "Returns buffers that depend on the number of calls", "sglang#31198", {"buffers": _grows}),
    Mutant("W40", "Declares a mask stride of -1", "sglang#31367", _declares(mask_stride=-1)),
    Mutant("W41", "Declares a mask stride that differs from the mask's stride", "TRT-LLM#13006",
           {"layouts": lambda g, found: {m: replace(s, mask_stride=g.mask_words + 1) for m, s in found.items()}}),
    Mutant("W42", "Declares a wrong mask dtype", "TRT-LLM#13006", _declares(mask_dtype="uint8")),
    Mutant("W43", "Declares a buffer under a wrong role", "vllm#17394", {"layouts": _misnamed}),
    Mutant("W44", "Declares prefix lengths and writes prefix plus tail", "sglang#26512",
           _levels(lengths=LengthConvention.PREFIX)),
    Mutant("W45", "Declares token slots and writes pages", "sglang#24587", _levels(layout=Layout.CSR_TOKENS),
           layouts=("csr",), absent="no CSR; W45b declares an absent level"),
    Mutant("W45b", "Declares that an existing level does not exist", "sglang#24587", _levels(layout=Layout.NONE)),
    Mutant("W46", "Declares no level with the slot mapping", "vllm#17394", _unnamed("slot_mapping")),
    Mutant("W47", "Declares that no mask applies", "sglang#32920", _levels(masked=False)),
    Mutant("W48", "Targets a contract version that does not exist yet", "vllm#57566", _described(contract_minor=99)),
    Mutant("W48b", "Targets a contract version before the first", "vllm#57566", _described(contract_minor=-1)),
    Mutant("W49", "Declares a runtime module with an empty name", "vllm#57566", _described(runtime=("torch", ""))),
    Mutant("W49b", "Describes itself differently on each call",
           "vllm#57566", _described(summary=lambda: str(next(_CALLS)))),
    Mutant("W50", "Declares a buffer without a formula", "vllm#17394",
           {"buffers": lambda g, specs: [replace(one, formula="") for one in specs]}),
    Mutant("W51", "Requires exact lengths only when overlap is off", "sglang#30217", {"requirements": _dodges}),
    Mutant("W52", "Returns None from supports instead of a list", "sglang#32920", {"supports": lambda g, found: None}),
    Mutant("W53", "Declares pad_fill 2", "vllm#38436", _declares(pad_fill=2)),
    Mutant("W54", "Declares an unknown live_extent", "vllm#38436", _declares(live_extent="all")),
    Mutant("W55", "Returns an object that is not a backend from open_backend",
           "sglang#30846", {"open_backend": lambda g, backend: object()}),
    Mutant("W56", "Runs the step eagerly in a replay", "sglang#36658", _graphs(_eager)),
    Mutant("W57", "Returns other output tensors from a replay than from the capture", "vllm#53658", _graphs(_copies)),
    Mutant("W58", "Does nothing when an unknown key is replayed", "sglang#40396", _graphs(_quiet)),
    Mutant("W59", "Replaces a graph when its key is captured again", "TRT-LLM#17110", _graphs(_twice)),
    Mutant("W60", "Declares a graph state without keys", "sglang#40396", _typed(keys=())),
    Mutant("W61", "Declares a graph state of negative size", "sglang#24453", _typed(pool_bytes=-1)),
    Mutant("W62", "Requires unique slots and writes shared null pages", "lmdeploy#4569",
           {"requirements": lambda g, found: replace(found, unique_slots=True)},
           patch=lambda b: _null_slots(b)),
)  # fmt: skip


def _null_slots(backend: Any) -> None:
    """Write padded rows to slot 0 and ignore their page table."""
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
