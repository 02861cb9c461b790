"""The state benchmark: its cases, the libraries that it imports, and draftmark's outputs on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.state import stubs, warming
from benchmarks.state.cases import LAYERS, Case, cases
from benchmarks.state.inputs import draw, expected
from benchmarks.state.ours import ours

MODES = {"decode": (1, 1), "chain": (4, 4), "tree": (6, 6), "extend": (5, 70)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_draftmark_is_right_in_every_mode(layer, mode):
    """Outputs and committed slots of small shapes equal the float64 loop within the rounding of bfloat16."""
    whole = LAYERS[layer]
    shape = replace(
        whole.shape, num_heads=2, num_key_heads=2 // min(2, whole.shape.heads_per_key), key_dim=16, value_dim=16
    )
    case = Case(mode, replace(whole, shape=shape), mode, MODES[mode])
    layers = [draw(case, seed) for seed in range(2)]
    runner = ours(case, layers)
    runner.reset()
    runner.call()
    assert runner.states is not None
    assert expected(case, layers[0]).error(case, runner.out(), runner.states()) < 1e-2


def test_paths_descend_the_trees():
    """Each accepted row's parent is the accepted row before it."""
    for case in cases():
        if case.nodes:
            parents = case.parents
            assert all(parent < node for node, parent in enumerate(parents))
            assert [parents[node] for node in case.path] == [-1, *case.path[:-1]], case.name


def test_small_cases_compile_what_is_measured(monkeypatch):
    """The processes that compile run the same layers and modes as the measured cases."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self) -> None: ...

    monkeypatch.setattr(warming.subprocess, "Popen", Process)
    names = {"decode-64", "chain-64x8", "tree-64x64", "extend-1x8192"}
    warming.warm([one for one in cases() if one.name in names and one.layer.name == "kda"], 64, ["fla"])
    assert len(started) == 1 + warming.PARTS and all("kda" in command and "fla" in command for command in started)
    assert started[-1][-3:] == ["decode-16", "chain-16x8", "tree-16x64"]
    assert {name for command in started[:-1] for name in command} >= set(warming.PROMPTS)


def test_a_missing_folder_names_its_remedy(monkeypatch):
    """Without the folder of other libraries, a peer is absent and the message says how to make the folder."""
    monkeypatch.delenv(stubs.PEERS, raising=False)
    stubs._root.cache_clear()
    with pytest.raises(stubs.Absent, match=r"benchmarks\.state\.carry"):
        stubs.kernels("fla.ops.kda")
