"""Questions (checks) of the judge that run on SGLang's backends in a running scheduler.

Each function raises `ContractViolation` for a wrong result, and `Refused` if the backend rejects the input.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftmark import Mode
from draftmark_contract.check import ContractViolation, Refused
from draftmark_contract.judge.devices import device_of

from .device_facts import full_masks
from .driver import Driver, ForwardResult, Graph
from .guards import GuardWords
from .served import serve_to_the_end
from .setups import Scene, context_end_scene, eager_scenes, replayed
from .truth import check_rows, check_stores

BUGS = {Mode.VERIFY: "sglang#39287", Mode.DECODE: "sglang#32087", Mode.DRAFT: "sglang#32087"}
"""Public threads about sliding windows of a mode in SGLang's Triton backend."""


def rows(driver: Driver, name: str) -> None:
    """Check that every row of a forward equals attention in float64."""
    scene = _scene(driver, name)
    for ran in _run_eager(driver, scene):
        check_rows(ran, _bug(scene))


def stores(driver: Driver, name: str) -> None:
    """Check that a forward stores each row in the given slot and changes no other byte of the pool."""
    for ran in _run_eager(driver, _scene(driver, name)):
        check_stores(ran)


def unknown_lengths(driver: Driver, name: str) -> None:
    """Check the output of a forward for which the host has no request lengths."""
    scene = replace(_scene(driver, name), lengths_on_host=False)
    backend = driver.backend(scene.mode, scene.window)
    if getattr(backend, "needs_cpu_seq_lens", True):
        raise Refused("its needs_cpu_seq_lens is True: the host must have the lengths")
    for ran in driver.run_eager(scene, backend):
        check_rows(ran, "sglang#26738")


def history(driver: Driver) -> None:
    """Check that forwards of all modes on one backend object give right output, while batches grow and shrink."""
    backend = driver.backend(Mode.DECODE)
    scenes = [one for one in eager_scenes(driver.setup, driver.target) if one.window < 0 and not one.soft_cap]
    served = [one for one in scenes if one.mode is not Mode.DRAFT]
    for scene in (*served, *reversed(served)):
        if driver.runner(scene.mode) is driver.runner(Mode.DECODE):
            for ran in driver.run_eager(scene, backend):
                check_rows(ran)


def same_bits(driver: Driver, name: str) -> None:
    """Check that two runs of one forward give the same bits."""
    scene = _scene(driver, name)
    first, second = (driver.run_eager(scene, driver.backend(scene.mode, scene.window)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        if not torch.equal(one.out, other.out):
            raise ContractViolation("the same forward gives other bits the second time", batch=name)


def captured(driver: Driver, mode: str, window: int) -> None:
    """Check that a capture run, which has padding requests only, gives finite output."""
    for ran in _graph(driver, mode, window).capture():
        if not bool(ran.out.isfinite().all()):
            raise ContractViolation("the captured run is not finite", batch=f"capture of {mode}", bug="sglang#26521")


def replays(driver: Driver, mode: str, window: int) -> None:
    """Check the output of replays of one captured graph, with batches that grow, shrink and change."""
    graph = _graph(driver, mode, window)
    graph.capture()
    for scene in replayed(driver.setup, Mode(mode), window):
        for ran in graph.replay(scene):
            check_rows(ran, _bug(scene))


def padding(driver: Driver, mode: str) -> None:
    """Check that a replay stores the rows of padding requests in page 0 only."""
    graph = _graph(driver, mode, -1)
    graph.capture()
    for scene in replayed(driver.setup, Mode(mode))[:2]:
        for ran in graph.replay(scene):
            check_stores(ran)


def context_end(driver: Driver, mode: str, below: int, in_graph: bool) -> None:
    """Check that output is right and nothing is written outside of tensors when requests almost fill the context."""
    scene, words = context_end_scene(driver.setup, Mode(mode), below), GuardWords(driver.device)
    _use_full_masks(driver)
    with words:
        if in_graph:
            graph = _graph(driver, mode, -1)
            graph.capture()
            ran = graph.replay(scene)
        else:
            ran = driver.run_eager(scene, driver.backend(scene.mode))
    words.check(f"{mode}, {len(scene.prefixes)} requests of {scene.prefixes[0]} tokens, context {_context(driver)}")
    for one in ran:
        check_rows(one)


def served(driver: Driver) -> None:
    """Serve one request in the running scheduler up to the context's end."""
    serve_to_the_end(driver.scheduler, driver.setup)


def _use_full_masks(driver: Driver) -> None:
    if device_of(driver.device).host:
        full_masks()


def _bug(scene: Scene) -> str:
    return BUGS.get(scene.mode, "") if scene.window >= 0 else ""


def _context(driver: Driver) -> int:
    length: int = driver.runner(Mode.DECODE).model_config.context_len
    return length


def _scene(driver: Driver, name: str) -> Scene:
    return next(one for one in eager_scenes(driver.setup, driver.target) if one.name == name)


def _run_eager(driver: Driver, scene: Scene) -> list[ForwardResult]:
    _use_full_masks(driver)
    return driver.run_eager(scene, driver.backend(scene.mode, scene.window))


def _graph(driver: Driver, mode: str, window: int) -> Graph:
    _use_full_masks(driver)
    try:
        return Graph(driver, Mode(mode), window)
    except NotImplementedError as error:
        raise Refused(f"it has no CUDA graphs: init_cuda_graph_state raises NotImplementedError {error}") from error
    except AttributeError as error:
        if "init_cuda_graph_state" not in str(error):
            raise
        raise Refused("it has no CUDA graphs: there is no init_cuda_graph_state") from error
