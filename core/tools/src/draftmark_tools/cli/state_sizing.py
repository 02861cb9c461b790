"""Report of `draftmark size --state`: bytes of a model's state slots, and of the schemes that take rows back."""

from __future__ import annotations

from dataclasses import asdict

from draftmark.geometry import StateGeometry

from ..models import StateFacts
from .rendering import Column, human_bytes, show, show_table
from .state_schemes import Scheme, committed_bytes, state_traffic

COLUMNS = (
    Column("scheme", style="bold"),
    Column("trees"),
    Column("held", right=True),
    Column("moved", right=True),
    Column("held: formula", wrap=True, style="dim"),
    Column("moved: formula", wrap=True, style="dim"),
    Column("used by", wrap=True, style="dim"),
)


def show_state(facts: StateFacts, geometry: StateGeometry, schemes: tuple[Scheme, ...], accepted: int) -> None:
    """Print the slots of a model, and each scheme's bytes, as tables."""
    g, s, requests = geometry, geometry.state, geometry.limits.max_num_reqs
    show(f"{facts.model_type}: {g.num_layers} of {facts.num_layers} layers have recurrent state", "bold")
    state = f"state {s.num_heads} × {s.value_dim} × {s.key_dim} {s.state_dtype} over {s.num_key_heads} key heads"
    show(f"{state}, window {s.conv_channels} × {g.window} {s.conv_dtype}, recurrence {s.recurrence}, gate {s.gate}")
    show(f"a slot and layer: state {human_bytes(g.state_bytes)}, window {human_bytes(g.conv_bytes)}")
    show(f"a row and layer: record {human_bytes(g.record_bytes)}, channels {human_bytes(g.channel_bytes)}")
    slot = human_bytes(g.num_layers * g.slot_bytes)
    show(f"a request: {slot} in all its layers; {requests} requests: {human_bytes(committed_bytes(g))}")
    show()
    nodes = g.draft.num_draft_tokens
    show(
        f"rollback, in addition to the slots: R = {requests} requests, D = {nodes} rows each, {accepted} accepted",
        "bold",
    )
    rows = [
        (
            one.name,
            "yes" if one.trees else "no",
            human_bytes(one.held(g)),
            human_bytes(one.moved(g, accepted)),
            one.held_formula,
            one.moved_formula,
            one.users,
        )
        for one in schemes
    ]
    show_table(COLUMNS, rows)
    show(f"S, all states read once: {human_bytes(state_traffic(g))}; plain decoding moves 2 S")


def state_json(
    facts: StateFacts, geometry: StateGeometry, schemes: tuple[Scheme, ...], accepted: int
) -> dict[str, object]:
    """Return the report as one JSON object."""
    names = ("state_bytes", "conv_bytes", "slot_bytes", "record_bytes", "channel_bytes", "num_layers")
    return {
        "model": {"model_type": facts.model_type, "layers": facts.layers, "num_layers": facts.num_layers},
        "state": asdict(geometry.state) | {"conv_blocks": dict(facts.conv_blocks)},
        "bytes": {name: getattr(geometry, name) for name in names} | {"committed": committed_bytes(geometry)},
        "schemes": [
            {"name": one.name, "trees": one.trees, "held": one.held(geometry), "moved": one.moved(geometry, accepted)}
            for one in schemes
        ],
    }
