"""Command `draftmark generate`: decode prompts speculatively and, with --check, compare the text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from draftmark import DraftmarkError
from draftmark_tools.cli.errors import INTERRUPTED, SUCCESS
from draftmark_tools.cli.geometry_arguments import dtype, integers
from draftmark_tools.cli.progress import progress_line
from draftmark_tools.cli.rendering import console, show, show_json

from . import settings
from .prompts import Prompt, gather

if TYPE_CHECKING:
    from .. import EngineConfig
    from .report import Report

SUMMARY = "decode prompts speculatively on a backend, and check the text"
EXAMPLES = """\
examples:
  draftmark generate --prompt "Repeat this: one two three one two" --check
  draftmark generate --prompts prompts.txt --topk 2 --num-draft-tokens 8 --check
  draftmark generate --model ./model --prompt-ids 1,2,3,1,2 --graph --json
  draftmark generate --prompt "Tell me a story." --temperature 0.7 --seed 7
  draftmark generate --prompts prompts.txt --speculate adaptive --overlap

A prompt file is text with a line of --- between prompts, or .jsonl with
{"prompt": "…"} in each line.

--check decodes again without drafts and with transformers' own generate, and
exits 1 if a token differs. In bfloat16 and float16 it compares with a float32
copy of the model. Each token's float32 logit must lie near the best one,
within twice transformers' own rounding error. The backend's logits may have
at most twice the error of transformers' own.

tokens/round counts the tokens that a prompt kept. The mean accepted length is
their mean over all prompts and rounds. Both leave out the prefill's token, and
tokens that a round yielded after the end of a text.

Ctrl-C prints the texts so far and the table, and exits with code 130."""


class CheckFailed(DraftmarkError):
    """Error for texts or logits that differ from their baselines."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    _add_prompts(parser.add_argument_group("model and prompts"))
    _add_decoding(parser.add_argument_group("decoding"))
    _add_engine(parser.add_argument_group("engine"))
    parser.add_argument("--check", action="store_true", help="compare with plain decoding and with transformers")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="PATH", help="a folder or a .gguf file; default: the bundled small model")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    group.add_argument("--prompts", metavar="FILE", help="a file of prompts, see below")
    group.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        type=integers,
        metavar="N,N,…",
        help="a prompt as token ids; may be repeated",
    )
    group.add_argument("--raw", action="store_true", help="pass prompts without the model's chat template")
    group.add_argument("--dtype", type=dtype, default="float32", help="float32, bfloat16 or float16")


def _add_decoding(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens for each prompt")
    group.add_argument(
        "--speculate",
        choices=("none", "ngram", "eagle", "mtp", "adaptive"),
        default="ngram",
        help="how to draft; mtp: the model's own MTP layer; adaptive: drafts of --drafts, in the number that pays",
    )
    group.add_argument("--drafts", choices=("eagle", "mtp", "ngram"), help="adaptive: source of drafts; default: eagle")
    group.add_argument("--head", metavar="PATH", help="eagle: folder of the draft head; default: the installed one")
    group.add_argument("--topk", type=int, metavar="K", help="branches of the draft tree, 1 is a chain; default: "
                       "ngram 2, eagle 4, mtp 1")  # fmt: skip
    group.add_argument("--num-steps", type=int, metavar="S", help="eagle, mtp: levels of the draft tree; default: 4, 3")
    group.add_argument("--num-draft-tokens", type=int, metavar="D", help="rows verified per request; default: "
                       "ngram 8, eagle 16, mtp 4")  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps every token")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", metavar="NAME", help="default: DRAFTMARK_BACKEND, else reference")
    group.add_argument("--device", default="cpu", help="torch device")
    group.add_argument("--page-size", type=int, default=16, metavar="P", help="tokens per KV page")
    group.add_argument("--max-context-len", type=int, metavar="C", help="default: what the longest prompt needs")
    group.add_argument("--max-num-reqs", type=int, metavar="N", help="prompts at a time; default: all, at most 8")
    group.add_argument("--graph", action=argparse.BooleanOptionalAction, default=False, help="capture and replay")
    group.add_argument(
        "--host-lengths",
        choices=("exact", "upper_bound", "unknown"),
        help="sequence lengths that the host gives the backend; default: exact, with --overlap upper_bound",
    )
    group.add_argument(
        "--overlap", action="store_true", help="prepare a round while the device runs the one before; not with ngram"
    )


def run(args: argparse.Namespace) -> int:
    """Decode the prompts, print the result, check it, and return the exit code."""
    prompts = gather(args)
    settings.check_numbers(args, len(prompts))
    with progress_line("importing torch and transformers"):
        settings.import_torch_side()
    config = settings.config_without_model(args, len(prompts))
    with progress_line("loading the model"):
        report = _loaded(args, prompts, config)
    _decode(args, report)
    if report.decoded.interrupted or not _checked(args, report):
        _end(args, report)
        return INTERRUPTED
    _end(args, report)
    if wrong := report.agreement.wrong_texts:
        raise CheckFailed(
            f"{len(wrong)} of {len(prompts)} texts differ from their baseline; "
            "if --dtype is not float32, try float32, which excludes rounding as the reason"
        )
    if report.agreement.wrong_logits is not None:
        raise CheckFailed(report.agreement.wrong_logits)
    return SUCCESS


def _loaded(args: argparse.Namespace, prompts: list[Prompt], config: EngineConfig) -> Report:
    """Load the model, encode its prompts and complete the settings."""
    from ..models import load_model
    from .report import Report

    model = load_model(args.model, dtype=args.dtype, device=args.device)
    token_ids = settings.encode(model, prompts, args.raw)
    return Report(model, settings.with_model(args, config, model, token_ids), prompts, token_ids)


def _decode(args: argparse.Namespace, report: Report) -> None:
    """Decode the prompts; print each text as it grows, except with --json."""
    from .decoding import decode
    from .report import describe, show_summary
    from .stream import TextStream

    if not args.json:
        show(describe(report.model, report.config), "dim")
        show()
    with progress_line("preparing") as line:
        clear = line.hide if console().is_terminal else None
        stream = None if args.json else TextStream([one.name for one in report.prompts], report.text, clear)
        shown = stream.show if stream else None
        job = report.model, report.token_ids, args.max_new_tokens, report.config
        report.decoded = decode(*job, line, "decoding", shown)
    if stream:
        stream.finish()
        show_summary(report)


def _checked(args: argparse.Namespace, report: Report) -> bool:
    """Compare the texts if --check is given; return False if Ctrl-C ended the comparison."""
    from ..compare import compare
    from .checking import baselines

    if not args.check:
        return True
    try:
        with progress_line("checking") as line:
            found = baselines(report.model, report.token_ids, args.max_new_tokens, report.config, line)
            texts, others = [one.tokens for one in report.decoded.outputs], {one.name: one.outputs for one in found}
            report.agreement = compare(report.model, report.token_ids, texts, others, report.config)
            report.baselines = found
    except KeyboardInterrupt:
        return False
    return True


def _end(args: argparse.Namespace, report: Report) -> None:
    from .report import as_json, show_check

    if args.json:
        show_json(as_json(report))
    else:
        show_check(report)
