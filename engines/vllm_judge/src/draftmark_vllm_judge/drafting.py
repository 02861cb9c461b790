"""Judge items (test cases) for vLLM only: layers and KV groups that share one metadata build, and draft steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from draftmark import Mode
from draftmark_contract.cases.forwards import uniform
from draftmark_contract.check import ContractViolation, Refused
from draftmark_contract.judge.driver import EngineCapabilities
from draftmark_contract.judge.harness import EngineHarness
from draftmark_contract.judge.questions.building import SMALL, fitted, of_each_mode, on_layer
from draftmark_contract.judge.step import Step, step_of
from draftmark_contract.runner.item import Item

from .config import LAYER, SECOND
from .driver import VllmDriver

LAYERS, FRESH, REPLAY = (
    "purity.metadata_serves_every_layer",
    "history.equals_a_fresh_state",
    "graphs.replay_equals_eager",
)
GROUPS = "update_block_table for a second KV group leaves the first group's metadata unchanged"
DRAFTS = "build_for_drafting serves draft steps after a verify step, and the next verify step is still right"
REFRESH = "update_draft_decode_metadata updates captured metadata to the lengths on the device"
STEPS = 3
"""Draft steps of a round."""


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return the judge items (test cases) that only vLLM has."""
    found = []
    for name, shape in {"small": SMALL, "window": replace(SMALL, window_left=19)}.items():
        geometry = fitted(caps, shape)
        for forward in of_each_mode(geometry, (40, 0, 133)):
            step, pages = step_of(forward), forward.num_pages
            case = f"{name}-{forward.name}"
            found.append(on_layer(caps, LAYERS, f"{case}-layers", geometry, pages, partial(_two_layers, step=step)))
            body = partial(_second_group, step=step)
            found.append(on_layer(caps, LAYERS, f"{case}-groups", geometry, pages, body, GROUPS))
        verify = uniform("verify", geometry, Mode.VERIFY, (40, 17, 133), 3, tree="chain")
        pages = verify.num_pages + 3
        body = partial(_rounds, step=step_of(verify))
        found.append(on_layer(caps, FRESH, f"{name}-drafting", geometry, pages, body, DRAFTS))
        body = partial(_refreshed, step=step_of(verify))
        found.append(on_layer(caps, REPLAY, f"{name}-draft-refresh", geometry, pages, body, REFRESH))
    return found


def _driver(harness: EngineHarness) -> VllmDriver:
    return cast(VllmDriver, harness.driver)


def _two_layers(harness: EngineHarness, step: Step) -> None:
    """Check that two layers with one metadata build and equal caches have equal outputs."""
    driver = _driver(harness)
    loaded, slots = harness.load(step), harness.slots
    driver.layers.caches[SECOND].write(slots, *driver.read(slots))
    outs: list[torch.Tensor] = []

    def run(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ordered = driver.ordered(step)
        metadata, slots = driver.prepare(ordered.step)
        for name in (SECOND, LAYER):
            outs.append(ordered.back(driver.layers.run(metadata, slots, *ordered.rows(q, k, v), name=name)))
        return outs[-1]

    harness.assert_forward(step, loaded, run=run)
    if not torch.equal(outs[0], outs[1]):
        raise ContractViolation("two layers share a build, caches and rows, but their outputs differ", batch=step)


def _second_group(harness: EngineHarness, step: Step) -> None:
    driver = _driver(harness)
    builder = driver.layers.builder
    if not getattr(builder, "supports_update_block_table", False):
        raise Refused("update_block_table: the builder declares no support")

    def run(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ordered = driver.ordered(step)
        metadata, slots = driver.prepare(ordered.step)
        table = driver.buffers.table[: len(step.forward.requests)]
        with driver.layers.current():
            builder.update_block_table(metadata, torch.ones_like(table), torch.full_like(slots, -1))
        return ordered.back(driver.layers.run(metadata, slots, *ordered.rows(q, k, v)))

    harness.assert_forward(step, harness.load(step), run=run)


def _rounds(harness: EngineHarness, step: Step) -> None:
    """Check the outputs of a verify step, of the draft steps after it, and of the next verify step."""
    harness.assert_forward(step, harness.load(step))
    for number in range(STEPS):
        draft, run = _decode(step, number), partial(_draft, _driver(harness), number)
        harness.assert_forward(draft, harness.load(draft, seed=number), run=run)
    harness.assert_forward(step, harness.load(step, seed=9))


def _draft(driver: VllmDriver, number: int, step: Step, *rows: torch.Tensor) -> torch.Tensor:
    driver.buffers.fill(step, len(step.forward.requests))
    common = driver.common(step, len(step.forward.requests), step.forward.live_rows)
    with driver.layers.current():
        metadata = driver.layers.builder.build_for_drafting(common_attn_metadata=common, draft_index=number)
    return driver.layers.run(metadata, driver.buffers.slots[: step.num_rows], *rows)


def _refreshed(harness: EngineHarness, step: Step) -> None:
    driver = _driver(harness)
    builder = driver.layers.builder
    if not getattr(builder, "supports_draft_decode_metadata_update", False):
        raise Refused("update_draft_decode_metadata: the builder declares no support")
    count = len(step.forward.requests)
    captured = driver.capture(1, count)

    def run(step: Step, *rows: torch.Tensor) -> Any:
        driver.buffers.fill(step, count)
        with driver.layers.current():
            builder.update_draft_decode_metadata(captured.metadata)
        return driver.layers.run(captured.metadata, driver.buffers.slots[:count], *rows)

    for number in range(STEPS):
        draft = _decode(step, number)
        harness.assert_forward(draft, harness.load(draft, seed=number), run=run)


def _decode(step: Step, number: int) -> Step:
    """Return draft step `number` after a verify step: one row per request, after the tokens of earlier draft steps."""
    lens = [one.prefix + number for one in step.forward.requests]
    return step_of(uniform(f"draft{number}", step.geometry, Mode.DECODE, lens, len(lens)))
