"""Draw one recorded round of EAGLE speculation: docs/speculation-round.svg.

    python -m benchmarks.plots.draft_round                             # the tiny model of the tests
    python -m benchmarks.plots.draft_round --head PATH --prompt "..."  # the bundled small model with a trained head

The engine decodes one request eagerly, and the recorder keeps the beams, tree, mask, targets and path of each round.
The drawn round is the one with the highest `interest`: accepted drafts, moved KV, beams that changed parents.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative import Eagle, Engine, EngineConfig
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder
from draftmark_speculative.models import CausalLM, load_model

from .svg import page, text

WIDTH, CELL = 980, 15
KEPT, BEAM, LOST = "#2da44e", "#4c8eda", "#8a8f98"


@dataclass
class Round:
    """Record of one round of one request.

    Attributes:
        length: committed tokens before the round.
        text: the committed tokens and the root.
        extended: tokens that draft extend took over at the end of the previous round, and its number of rows.
        beams: (token, parent slot) of each of the k slots, for each draft step.
        tried: number of candidate nodes.
        scores: cumulative log-probability of each node of the tree, root first.
        tokens: token of each node.
        parents: parent of each node.
        words: mask word of each node.
        depth: depth of each node.
        targets: the target's token after each node.
        path: nodes of the accepted path; the first `count` entries are valid.
        count: number of accepted nodes, the root included.
    """

    length: int = 0
    text: list[int] = field(default_factory=list)
    extended: tuple[list[int], int] = ([], 0)
    beams: list[list[tuple[int, int]]] = field(default_factory=list)
    tried: int = 0
    scores: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    count: int = 0

    @property
    def interest(self) -> int:
        """Score of a round: higher for accepted drafts, moved KV and beams that changed parents."""
        moved = sum(slot != i for i, slot in enumerate(self.path[: self.count]))
        k = len(self.beams[0]) if self.beams else 1
        changed = sum(parent >= 0 and parent % k != b for step in self.beams for b, (_, parent) in enumerate(step))
        return 10 * min(self.count, 4) + 8 * bool(moved) + 5 * bool(changed) + 5 * bool(self.extended[0][1:])


def record(engine: Engine, prompt: list[int], count: int) -> list[Round]:
    """Decode one request and return the record of each round."""
    rounds: list[Round] = []
    now = Round()
    place, best = DraftTreeBuilder.place, DraftTreeBuilder.best
    ops = engine._layers.tree_ops
    verify, draft_extend = ops.verify_tree, engine._drafting.draft_extend

    def placed(self: DraftTreeBuilder) -> torch.Tensor:
        slots = place(self)
        now.beams.append(list(zip(self.tokens[0].tolist(), slots[0, -self.topk :].tolist(), strict=True)))
        return slots

    def chosen(self: DraftTreeBuilder, nodes: int) -> Any:
        scores = torch.cat([found[0] for found in self._found], 1)[0]
        now.tried = len(scores)
        now.scores = [0.0, *scores.sort(descending=True, stable=True).values[:nodes].tolist()]
        return best(self, nodes)

    def walked(drafts: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor) -> Any:
        verdict = verify(drafts, parents, targets)
        batch = engine._state.batch
        now.length = int(batch.prefix_lens[0])
        now.tokens, now.parents, now.targets = drafts[0].tolist(), parents[0].tolist(), targets[0].tolist()
        nodes = len(now.tokens)
        now.words = (batch.mask[:nodes, 0].long() & 0xFFFFFFFF).tolist()
        now.depth = batch.depth[:nodes].tolist()
        now.path, now.count = verdict.accept_index[0].tolist(), int(verdict.accept_lens[0])
        return verdict

    def taken(padded: int, live: int, host: Any) -> None:
        nonlocal now
        rounds.append(now)
        kept = engine._drafting.accepted.tokens[0, : now.count].tolist()
        now = Round(extended=(kept, len(now.tokens)))
        draft_extend(padded, live, host)

    DraftTreeBuilder.place, DraftTreeBuilder.best = placed, chosen  # type: ignore[method-assign]
    ops.verify_tree, engine._drafting.draft_extend = walked, taken
    try:
        one = engine.submit(prompt, count)
        while engine.busy:
            engine.step()
    finally:
        DraftTreeBuilder.place, DraftTreeBuilder.best = place, best  # type: ignore[method-assign]
    whole = prompt + list(engine.output(one))
    for done in rounds:
        done.text = whole[: done.length + 1]
    return rounds


def draw(one: Round, name: Callable[[int], str], settings: str) -> str:
    """Return the whole picture, panel under panel."""
    parts: list[str] = []
    y = 56.0
    for title, panel in (
        ("1  Draft extend: the head reads the tokens that the last round accepted", extend_panel),
        ("2  Draft steps: k beams a step, and each beam sees the slots of its ancestors", steps_panel),
        ("3  Tree and mask: the best D - 1 of all tried tokens", tree_panel),
        ("4  Verify and accept: one target token a row; acceptance follows them from the root", verify_panel),
        ("5  Compaction: the accepted path's KV becomes contiguous, and the length advances", compact_panel),
    ):
        parts.append(text(16, y, title, "ink title"))
        drawn, height = panel(one, name, y + 24)
        parts += drawn
        y += height + 56
    head = text(16, 24, f"One round of one request, as it ran: {settings}", "dim")
    return page(WIDTH, y, "One round: draft extend, draft steps, tree and mask, verify, compaction", [head, *parts])


def extend_panel(one: Round, name: Callable[[int], str], y: float) -> tuple[list[str], float]:
    """Return the panel of draft extend: one row for each tree node; rows after the accepted ones are unused."""
    kept, rows = one.extended
    first = one.length - len(kept)
    parts = []
    for row in range(rows):
        live = row < len(kept)
        x = 20 + row * (WIDTH - 40) / max(rows, 8)
        width = (WIDTH - 40) / max(rows, 8) - 6
        parts.append(_box(x, y, width, 38, KEPT if row == len(kept) - 1 else BEAM if live else None))
        parts.append(text(x + 6, y + 12, f"feature {first + row}" if live else "unused", "dim small"))
        parts.append(text(x + 6, y + 27, f"+ {name(kept[row])}" if live else "", "ink small"))
    note = (
        f"{len(kept)} of {rows} rows are used, causal, KV at [{first}, {first + rows}). Each row reads the target's "
        "feature of position p and token p + 1. The green row predicts the root's children."
    )
    return [*parts, text(20, y + 54, note, "dim small")], 62


def steps_panel(one: Round, name: Callable[[int], str], y: float) -> tuple[list[str], float]:
    """Return the panel of draft steps: each beam with slot and token, and an edge to its parent."""
    k = len(one.beams[0]) if one.beams else 0
    columns = len(one.beams) + 1
    step_x = (WIDTH - 120) / max(columns, 2)
    at: dict[int, tuple[float, float]] = {-1: (60, y + 14 + (k - 1) * 17)}
    edges, nodes = [], [_node(*at[-1], name(one.text[-1]), "root", KEPT)]
    for step, beams in enumerate(one.beams):
        for b, (token, parent) in enumerate(beams):
            place = 60 + (step + 1) * step_x, y + 14 + b * 34
            at[k * step + b] = place
            changed = parent >= 0 and parent % k != b
            edges.append(_edge(at[parent], place, "#d9646b" if changed else None))
            nodes.append(_node(*place, name(token), f"slot {one.length}+{k * step + b}", BEAM))
    note = (
        f"Step i runs k = {k} rows over k·(i+1) tail slots at [{one.length}, {one.length + k * len(one.beams)}). Red: "
        f"a beam continues a different branch. Tokens tried: k + (S-1)·k² = {one.tried}."
    )
    height = max(k, 1) * 34 + 18
    return [*edges, *nodes, text(20, y + height - 4, note, "dim small")], height


def tree_panel(one: Round, name: Callable[[int], str], y: float) -> tuple[list[str], float]:
    """Return the panel of the tree: nodes with parent, depth and probability, and the mask bits."""
    parts = []
    count = len(one.tokens)
    left = 560
    kept = set(one.path[: one.count])
    for label, x in (("node", 24), ("token", 70), ("parent", 200), ("position", 260), ("probability", 340)):
        parts.append(text(x, y, label, "dim small"))
    parts.append(text(left, y, "mask word, and its bits: which slots the row sees", "dim small"))
    for node in range(count):
        line = y + 16 + node * CELL
        used = one.tokens[node] >= 0
        mark = "ink small" if used else "dim small"
        if node in kept:
            parts.append(f'<circle cx="14" cy="{line}" r="3.5" fill="{KEPT}"/>')
        shown = f"{math.exp(one.scores[node]):.3f}" if used and node < len(one.scores) else ""
        parent = "" if node == 0 else str(one.parents[node])
        position = f"{one.length}+{one.depth[node]}"
        token = name(one.tokens[node]) if used else "unused"
        for value, x in ((str(node), 24), (token, 70), (parent, 200), (position, 260), (shown, 340)):
            parts.append(text(x, line, value, mark))
        parts.append(text(left - 84, line, f"0x{one.words[node]:08x}", "dim code"))
        for slot in range(count):
            sees = one.words[node] >> slot & 1
            fill = f'fill="{KEPT if node in kept else BEAM}"' if sees else 'class="cell"'
            box = f'x="{left + slot * CELL}" y="{line - 7}" width="{CELL - 2}" height="{CELL - 2}"'
            parts.append(f"<rect {box} {fill}/>")
    return parts, 20 + count * CELL


def verify_panel(one: Round, name: Callable[[int], str], y: float) -> tuple[list[str], float]:
    """Return the panel of verification: the target's token at each accepted node, until no child has it."""
    parts, x = [], 20.0
    step = min(210.0, (WIDTH - 40) / max(one.count, 1))
    for i, node in enumerate(one.path[: one.count]):
        target = one.targets[node]
        parts.append(_box(x, y, step - 14, 38, KEPT))
        parts.append(text(x + 6, y + 12, f"node {node}: {name(one.tokens[node])}", "ink small"))
        last = " (no such child)" if i == one.count - 1 else ""
        parts.append(text(x + 6, y + 27, f"target: {name(target)}{last}", "dim small"))
        x += step
    note = f"One forward over {len(one.tokens)} rows gives {one.count} tokens. Each is the target's own choice."
    return [*parts, text(20, y + 54, note, "dim small")], 62


def compact_panel(one: Round, name: Callable[[int], str], y: float) -> tuple[list[str], float]:
    """Return the panel of KV compaction: slots before and after."""
    parts = []
    size = min(46.0, (WIDTH - 120) / len(one.tokens))
    kept = one.path[: one.count]
    parts += [text(20, y + 8, "before", "dim small"), text(20, y + 66, "after", "dim small")]
    for slot in range(len(one.tokens)):
        x = 80 + slot * size
        parts.append(_box(x, y - 2, size - 4, 20, KEPT if slot in kept else LOST if one.tokens[slot] >= 0 else None))
        parts.append(text(x + 4, y + 8, str(slot), "ink small"))
    for i, slot in enumerate(kept):
        x, source = 80 + i * size, 80 + slot * size + (size - 4) / 2
        parts.append(_box(x, y + 56, size - 4, 20, KEPT))
        parts.append(text(x + 4, y + 66, str(slot), "ink small"))
        parts.append(_edge((source, y + 18), (x + (size - 4) / 2, y + 56), KEPT))
    note = (
        f"The committed length grows from {one.length} to {one.length + one.count}. The next root is "
        f"{name(one.targets[kept[-1]])}; its KV is not stored yet. "
        "The head reads the accepted tokens in the next draft extend."
    )
    return [*parts, text(20, y + 92, note, "dim small")], 100


def _box(x: float, y: float, width: float, height: float, colour: str | None) -> str:
    fill = f'fill="{colour}" fill-opacity="0.22" stroke="{colour}"' if colour else 'class="cell"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" {fill}/>'


def _node(x: float, y: float, label: str, below: str, colour: str) -> str:
    return (
        _box(x - 44, y - 13, 96, 28, colour)
        + text(x - 39, y - 4, label, "ink small")
        + text(x - 39, y + 8, below, "dim small")
    )


def _edge(start: tuple[float, float], end: tuple[float, float], colour: str | None) -> str:
    stroke = f'stroke="{colour}"' if colour else 'class="edge"'
    near = start[0] + 52 if end[0] > start[0] + 60 else start[0]
    far = end[0] - 44 if end[0] > start[0] + 60 else end[0]
    return f'<line x1="{near:.1f}" y1="{start[1]:.1f}" x2="{far:.1f}" y2="{end[1]:.1f}" {stroke} stroke-width="1.3"/>'


def prepare(args: argparse.Namespace) -> tuple[CausalLM, Any, list[int], Callable[[int], str]]:
    """Return the model, its head, the prompt and the function that shows a token."""
    if args.head is None:
        from draftmark_speculative.eagle.tiny import tiny_pair

        model, head = tiny_pair(0.012)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            head.fc.weight.data += 0.012 * torch.randn(head.fc.weight.shape)
        return model, head, [7, 11, 13, 17, 19, 23], lambda token: f"token {token}"
    model = load_model(args.model)
    tokenizer: Any = model.tokenizer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(chat, add_special_tokens=False)["input_ids"]
    return model, args.head, ids, lambda token: "“" + tokenizer.decode([token]).replace("\n", "↵") + "”"


def main() -> None:
    """Decode one request, choose the round with the highest `interest`, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--prompt", default="Why do ships have numbers painted on their hulls?")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--num-draft-tokens", type=int, default=10)
    parser.add_argument("--out", type=Path, default=origin.ROOT / "docs" / "speculation-round.svg")
    args = parser.parse_args()
    model, head, prompt, name = prepare(args)
    eagle = Eagle(head, args.topk, args.num_steps, args.num_draft_tokens)
    engine = Engine(model, EngineConfig(speculate=eagle, max_num_reqs=1, max_context_len=len(prompt) + 72))
    rounds = record(engine, prompt, 64)
    best = max(rounds[1:], key=lambda one: one.interest)
    settings = f"{model.name}, topk {args.topk}, {args.num_steps} steps, {args.num_draft_tokens} draft tokens"
    args.out.write_text(draw(best, name, settings), encoding="utf-8")
    print(f"{args.out.name}: round {rounds.index(best) + 1} of {len(rounds)}, {best.count} tokens accepted")


if __name__ == "__main__":
    main()
