"""What a run says: the texts, a table, the check, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftmark.cli.rendering import Column, shorten, show, show_table
from draftmark.version import __version__

from .. import Eagle, EngineConfig
from ..agreement import SLACK, Agreement
from ..models import CausalLM
from .checking import PLAIN, TRANSFORMERS, Baseline
from .decoding import Decoded
from .prompts import Prompt

SCHEMA = 1
NOT_COMPARED = (
    f"{TRANSFORMERS} is not compared at temperature > 0: its random stream is another one. {PLAIN.capitalize()} with "
    "the same seed is, because randomness here is a function of (seed, request, position)"
)
COLUMNS = (
    Column("#", right=True, style="dim"),
    Column("prompt", style="bold"),
    Column("prompt tokens", right=True),
    Column("tokens", right=True),
    Column("tokens/round", right=True),
    Column("finish"),
)
NAME_WIDTH = 40


@dataclass(frozen=True)
class Run:
    """One finished command."""

    model: CausalLM
    config: EngineConfig
    prompts: Sequence[Prompt]
    token_ids: Sequence[Sequence[int]]
    decoded: Decoded
    baselines: Sequence[Baseline]
    agreement: Agreement

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, or as numbers where there is no tokenizer."""
        if self.model.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True))


def show_run(run: Run) -> None:
    """Texts, summary table, totals and check, as text."""
    for number, (prompt, output) in enumerate(zip(run.prompts, run.decoded.outputs, strict=True), start=1):
        show(f"── {number} · {shorten(prompt.name, 90)}", "bold cyan")
        show(run.text(output.tokens).strip("\n"))
        show()
    _show_table(run)
    show()
    for line in totals(run):
        show(line)
    if run.baselines:
        show()
        for line, right in check_lines(run):
            show(line, "green" if right else "red")
        if not run.config.sampling.greedy:
            show(NOT_COMPARED)


def describe(model: CausalLM, config: EngineConfig) -> str:
    """The settings, in one line."""
    dtype = str(model.dtype).removeprefix("torch.")
    how = ("graph" if config.graph else "eager") + (" · overlap" if config.overlap else "")
    return (
        f"{model.name} · {dtype} · {config.backend} on {model.device} · {_drafts(config)} · "
        f"page size {config.page_size} · context {config.max_context_len} · {how}"
    )


def _drafts(config: EngineConfig) -> str:
    how = config.speculate
    if how is None:
        return "no drafts"
    if isinstance(how, Eagle):
        return f"EAGLE drafts (topk {how.topk}, {how.num_steps} steps, {how.num_draft_tokens} tokens)"
    return f"n-gram drafts (topk {how.topk}, {how.num_draft_tokens} tokens)"


def totals(run: Run) -> list[str]:
    """Speed and accepted length, and the baselines' speed."""
    s, decoded = run.decoded.statistics, run.decoded
    lines = [
        f"{s.tokens} tokens in {decoded.seconds:.1f} s: {decoded.tokens_per_second:.1f} tokens/s · "
        f"mean accepted length {s.mean_accepted:.2f} · rounds {s.rounds} · prefills {s.extends}"
    ]
    for baseline in run.baselines:
        speed = f"{baseline.tokens_per_second:.1f} tokens/s"
        if baseline.name == PLAIN:
            ratio = decoded.tokens_per_second / baseline.tokens_per_second
            lines.append(f"{PLAIN}, the same prompts together: {speed} (the run above is {ratio:.2f} times as fast)")
        else:
            lines.append(f"{baseline.name}, one prompt at a time: {speed}")
    return lines


def check_lines(run: Run) -> list[tuple[str, bool]]:
    """One line per prompt, what counted as a near-tie, and how far logits lie from float32's; whether each is right."""
    found = run.agreement
    lines = [(f"check {i + 1}: {_told(run, i)}", i not in found.wrong_texts) for i in range(len(run.prompts))]
    if found.gaps:
        near = (
            f"near-ties: {found.near_ties} of {len(found.gaps)} first differences, where a float32 model's logits of "
            f"both tokens lie less than {found.bound:.3g} below the best, twice the error of transformers' own"
        )
        lines.append((near, not found.wrong_texts))
    if found.wrong_logits is not None:
        lines.append((f"logits: {found.wrong_logits}", False))
    elif found.rounding is not None and found.backend is not None:
        mine, theirs = found.backend.rms, found.rounding.rms
        right = (
            f"logits: {mine:.3g} from a float32 model's (root mean square), transformers' own {theirs:.3g}; "
            f"{SLACK:g} times that is the limit"
        )
        lines.append((right, True))
    return lines


def _told(run: Run, index: int) -> str:
    """What the check says of one prompt."""
    differences, output = run.agreement.differences, run.decoded.outputs[index]
    told = [
        _split(run, index, baseline, differences[index, baseline.name])
        for baseline in run.baselines
        if (index, baseline.name) in differences
    ]
    same = " and ".join(baseline.name for baseline in run.baselines if (index, baseline.name) not in differences)
    told += [f"{len(output.tokens)} tokens, equal to {same}"] if same else []
    if index in run.agreement.wrong_choices:
        at, gap = run.agreement.wrong_choices[index]
        told.append(
            f"token {at} ({_token(run, output.tokens, at)}) lies {gap:.3g} below the best of a float32 model, "
            f"but rounding explains {run.agreement.bound:.3g}"
        )
    return "; ".join(told)


def as_json(run: Run) -> dict[str, Any]:
    """Everything as one JSON object."""
    s, decoded = run.decoded.statistics, run.decoded
    return {
        "schema": SCHEMA,
        "draftmark": __version__,
        "model": {"name": run.model.name, "dtype": str(run.model.dtype).removeprefix("torch.")},
        "config": asdict(run.config),
        "outputs": [_output(run, i) for i in range(len(run.prompts))],
        "totals": asdict(s)
        | {
            "mean_accepted_length": s.mean_accepted,
            "seconds": decoded.seconds,
            "tokens_per_second": decoded.tokens_per_second,
        },
        "check": {
            "differing": len(run.agreement.wrong_texts),
            "baselines": [{"name": b.name, "tokens_per_second": b.tokens_per_second} for b in run.baselines],
            "not_compared": None if run.config.sampling.greedy else NOT_COMPARED,
            **_rounding(run.agreement),
        }
        if run.baselines
        else None,
    }


def _rounding(found: Agreement) -> dict[str, Any]:
    """What half precision excuses; two times None in float32."""
    if found.rounding is None:
        return {"near_ties": None, "logit_error": None}
    near = {"bound": found.bound, "excused": found.near_ties} if found.gaps else None
    backend = None if found.backend is None else asdict(found.backend)
    error = {"transformers": asdict(found.rounding), "backend": backend, "slack": SLACK, "wrong": found.wrong_logits}
    return {"near_ties": near, "logit_error": error}


def _output(run: Run, index: int) -> dict[str, Any]:
    output = run.decoded.outputs[index]
    return {
        "name": run.prompts[index].name,
        "prompt_tokens": len(run.token_ids[index]),
        "token_ids": list(output.tokens),
        "text": None if run.model.tokenizer is None else run.text(output.tokens),
        "finish": output.finish.value,
        "tokens_per_round": run.decoded.tokens_a_round[index],
        "first_difference": {b.name: run.agreement.differences.get((index, b.name)) for b in run.baselines},
        "gap_there": {b.name: run.agreement.gaps.get((index, b.name)) for b in run.baselines},
        "wrong_choice": run.agreement.wrong_choices.get(index),
    }


def _show_table(run: Run) -> None:
    rows = [
        (
            number,
            shorten(prompt.name, NAME_WIDTH),
            len(ids),
            len(output.tokens),
            f"{a_round:.2f}",
            output.finish.value,
        )
        for number, (prompt, ids, output, a_round) in enumerate(
            zip(run.prompts, run.token_ids, run.decoded.outputs, run.decoded.tokens_a_round, strict=True), start=1
        )
    ]
    show_table(COLUMNS, rows)


def _split(run: Run, index: int, baseline: Baseline, at: int) -> str:
    ours, theirs = run.decoded.outputs[index].tokens, baseline.outputs[index]
    what = "near-tie with" if run.agreement.excuses(index, baseline.name) else "differs from"
    gap = run.agreement.gaps.get((index, baseline.name))
    how_near = "" if gap is None else f", float32 logit gap {gap:.3g}"
    tokens = f"{_token(run, ours, at)} here, {_token(run, theirs, at)} there"
    return f"{what} {baseline.name} at token {at}: {tokens}{how_near}"


def _token(run: Run, tokens: Sequence[int], at: int) -> str:
    if at >= len(tokens):
        return "the end"
    shown = "" if run.model.tokenizer is None else f" {run.text(tokens[at : at + 1])!r}"
    return f"{tokens[at]}{shown}"
