"""Output of `draftmark generate`: the table, the totals, the check, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftmark import __version__
from draftmark_tools.cli.rendering import Column, shorten, show, show_table

from .. import EngineConfig
from ..agreement import SLACK, Agreement
from ..models import CausalLM
from .checking import PLAIN, TRANSFORMERS, Baseline
from .decoding import Decoded
from .prompts import Prompt

SCHEMA = 1
NOT_COMPARED = (
    f"{TRANSFORMERS} is not compared at temperature > 0, because its random numbers differ. {PLAIN.capitalize()} with "
    "the same seed is compared: its randomness is a function of (seed, request, position)"
)
COLUMNS = (
    Column("#", right=True, style="dim"),
    Column("prompt", style="bold", wrap=True),
    Column("prompt tokens", right=True),
    Column("tokens", right=True),
    Column("tokens/round", right=True),
    Column("finish"),
)
NAME_WIDTH = 40


@dataclass
class Report:
    """Holds the inputs of one `draftmark generate` command, and its results as they arrive."""

    model: CausalLM
    config: EngineConfig
    prompts: Sequence[Prompt]
    token_ids: Sequence[Sequence[int]]
    decoded: Decoded = field(init=False)
    baselines: Sequence[Baseline] = ()
    agreement: Agreement = field(default_factory=Agreement)

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, or as numbers if there is no tokenizer."""
        if self.model.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True))


def show_summary(report: Report) -> None:
    """Print the table of prompts and the totals, below the texts."""
    _show_table(report)
    show()
    show(totals(report))


def show_check(report: Report) -> None:
    """Print the baselines' speeds and the result of the check, if there was one."""
    if not report.baselines:
        return
    for line in speeds(report):
        show(line)
    show()
    for line, right in check_lines(report):
        show(line, "green" if right else "red")
    if not report.config.sampling.greedy:
        show(NOT_COMPARED)


def describe(model: CausalLM, config: EngineConfig) -> str:
    """Return the settings in one line."""
    dtype = str(model.dtype).removeprefix("torch.")
    how = ("graph" if config.graph else "eager") + (" · overlap" if config.overlap else "")
    return (
        f"{model.name} · {dtype} · {config.backend} on {model.device} · {config.speculation} · "
        f"page size {config.page_size} · context {config.max_context_len} · {how}"
    )


def totals(report: Report) -> str:
    """Return speed and mean accepted length in one line."""
    s, decoded = report.decoded.statistics, report.decoded
    plain = f", {s.plain} of them plain" if 0 < s.plain < s.rounds else ""
    ended = "interrupted after " if decoded.interrupted else ""
    return (
        f"{ended}{s.tokens} tokens in {decoded.seconds:.1f} s: {decoded.tokens_per_second:.1f} tokens/s · "
        f"mean accepted length {s.mean_accepted:.2f} · rounds {s.rounds}{plain} · prefills {s.extends}"
    )


def speeds(report: Report) -> list[str]:
    """Return one line for each baseline's speed."""
    lines = []
    for baseline in report.baselines:
        speed = f"{baseline.tokens_per_second:.1f} tokens/s"
        if baseline.name == PLAIN:
            ratio = report.decoded.tokens_per_second / baseline.tokens_per_second
            lines.append(f"{PLAIN}, the same prompts together: {speed} (the run above is {ratio:.2f} times as fast)")
        else:
            lines.append(f"{baseline.name}, one prompt at a time: {speed}")
    return lines


def check_lines(report: Report) -> list[tuple[str, bool]]:
    """Return (line, True if right) for each prompt, for near-ties and for logits."""
    found = report.agreement
    lines = [(f"check {i + 1}: {_verdict(report, i)}", i not in found.wrong_texts) for i in range(len(report.prompts))]
    if found.gaps:
        near = (
            f"near-ties: {found.near_ties} of {len(found.gaps)} first differences; a float32 model's logits of both "
            f"tokens lie less than {found.bound:.3g} below the best (twice the error of transformers' own)"
        )
        lines.append((near, not found.wrong_texts))
    if found.wrong_logits is not None:
        lines.append((f"logits: {found.wrong_logits}", False))
    elif found.rounding is not None and found.backend is not None:
        mine, theirs = found.backend.rms, found.rounding.rms
        right = (
            f"logits: {mine:.3g} from a float32 model's (root mean square); transformers' own differ by {theirs:.3g}, "
            f"and {SLACK:g} times that is the limit"
        )
        lines.append((right, True))
    return lines


def _verdict(report: Report, index: int) -> str:
    """Return the result of the check for one prompt."""
    differences, output = report.agreement.differences, report.decoded.outputs[index]
    parts = [
        _split(report, index, baseline, differences[index, baseline.name])
        for baseline in report.baselines
        if (index, baseline.name) in differences
    ]
    same = " and ".join(baseline.name for baseline in report.baselines if (index, baseline.name) not in differences)
    parts += [f"{len(output.tokens)} tokens, equal to {same}"] if same else []
    if index in report.agreement.wrong_choices:
        at, gap = report.agreement.wrong_choices[index]
        parts.append(
            f"token {at} ({_token(report, output.tokens, at)}) lies {gap:.3g} below the best of a float32 model, "
            f"but rounding explains {report.agreement.bound:.3g}"
        )
    return "; ".join(parts)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as one JSON object."""
    s, decoded = report.decoded.statistics, report.decoded
    return {
        "schema": SCHEMA,
        "draftmark": __version__,
        "model": {"name": report.model.name, "dtype": str(report.model.dtype).removeprefix("torch.")},
        "config": asdict(report.config),
        "outputs": [_output(report, i) for i in range(len(report.prompts))],
        "interrupted": decoded.interrupted,
        "totals": asdict(s)
        | {
            "mean_accepted_length": s.mean_accepted,
            "seconds": decoded.seconds,
            "tokens_per_second": decoded.tokens_per_second,
        },
        "check": {
            "differing": len(report.agreement.wrong_texts),
            "baselines": [{"name": b.name, "tokens_per_second": b.tokens_per_second} for b in report.baselines],
            "not_compared": None if report.config.sampling.greedy else NOT_COMPARED,
            **_rounding(report.agreement),
        }
        if report.baselines
        else None,
    }


def _rounding(found: Agreement) -> dict[str, Any]:
    """Return the near-ties and logit errors of half precision; in float32 both are None."""
    if found.rounding is None:
        return {"near_ties": None, "logit_error": None}
    near = {"bound": found.bound, "excused": found.near_ties} if found.gaps else None
    backend = None if found.backend is None else asdict(found.backend)
    error = {"transformers": asdict(found.rounding), "backend": backend, "slack": SLACK, "wrong": found.wrong_logits}
    return {"near_ties": near, "logit_error": error}


def _output(report: Report, index: int) -> dict[str, Any]:
    output = report.decoded.outputs[index]
    return {
        "name": report.prompts[index].name,
        "prompt_tokens": len(report.token_ids[index]),
        "token_ids": list(output.tokens),
        "text": None if report.model.tokenizer is None else report.text(output.tokens),
        "finish": output.finish.value,
        "tokens_per_round": report.decoded.tokens_a_round[index],
        "first_difference": {b.name: report.agreement.differences.get((index, b.name)) for b in report.baselines},
        "gap_there": {b.name: report.agreement.gaps.get((index, b.name)) for b in report.baselines},
        "wrong_choice": report.agreement.wrong_choices.get(index),
    }


def _show_table(report: Report) -> None:
    decoded, rows = report.decoded, []
    for i, (prompt, ids, output) in enumerate(zip(report.prompts, report.token_ids, decoded.outputs, strict=True)):
        a_round, name = f"{decoded.tokens_a_round[i]:.2f}", shorten(prompt.name, NAME_WIDTH)
        rows.append((i + 1, name, len(ids), len(output.tokens), a_round, output.finish.value))
    show_table(COLUMNS, rows)


def _split(report: Report, index: int, baseline: Baseline, at: int) -> str:
    ours, theirs = report.decoded.outputs[index].tokens, baseline.outputs[index]
    what = "near-tie with" if report.agreement.excuses(index, baseline.name) else "differs from"
    gap = report.agreement.gaps.get((index, baseline.name))
    how_near = "" if gap is None else f", float32 logit gap {gap:.3g}"
    tokens = f"{_token(report, ours, at)} here, {_token(report, theirs, at)} there"
    return f"{what} {baseline.name} at token {at}: {tokens}{how_near}"


def _token(report: Report, tokens: Sequence[int], at: int) -> str:
    if at >= len(tokens):
        return "the end"
    shown = "" if report.model.tokenizer is None else f" {report.text(tokens[at : at + 1])!r}"
    return f"{tokens[at]}{shown}"
