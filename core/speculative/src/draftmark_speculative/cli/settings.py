"""Engine configuration from command-line arguments. Wrong arguments are reported before a model is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftmark import (
    AttentionShape,
    DraftmarkError,
    DraftShape,
    Geometry,
    Limits,
    LoadedBackend,
    RequestError,
    ceil_div,
    load,
)
from draftmark.geometry.checks import INT32_MAX
from draftmark.registry import BACKEND_VARIABLE
from draftmark_tools.cli.errors import ArgumentError
from draftmark_tools.cli.geometry_arguments import check_draft_tokens
from draftmark_tools.cli.rendering import stdout_for_results

from .prompts import Prompt

if TYPE_CHECKING:
    from .. import EngineConfig, Speculation
    from ..models import CausalLM

DEFAULT_BACKEND = "reference"
MOST_REQUESTS = 8
"""Default limit on prompts that decode together, without --max-num-reqs."""


SHAPES = {"eagle": DraftShape(4, 4, 16), "mtp": DraftShape(1, 3, 4), "ngram": DraftShape(2, 1, 8)}
"""Default draft shape of each source of drafts."""
OWNERS = {"head": ("eagle",), "num_steps": ("eagle", "mtp"), "topk": tuple(SHAPES), "num_draft_tokens": tuple(SHAPES)}
"""Sources of drafts that read an argument."""


def check_numbers(args: argparse.Namespace, num_prompts: int) -> None:
    """Reject numbers that are out of range for every model, by the geometry's own rules. Needs no torch.

    Raises:
        GeometryError, RequestError: the first value out of range.
        ArgumentError: --model is empty, or an argument has no effect with this drafting method.
    """
    Geometry.create(
        AttentionShape(1, 1, 1, args.page_size, args.dtype, args.dtype),
        Limits(_max_num_reqs(args, num_prompts), 1 if args.max_context_len is None else args.max_context_len),
        _draft_shape(args),
    )
    if args.model is not None and not args.model.strip():
        raise ArgumentError("--model is empty; name a folder or a .gguf file, or leave it out for the bundled model")
    if not 1 <= args.max_new_tokens <= INT32_MAX:
        limit = "be >= 1; ask for at least one token" if args.max_new_tokens < 1 else "fit int32; lower it"
        raise RequestError(f"max_new_tokens is {args.max_new_tokens}, but it must {limit}")
    if args.num_draft_tokens is not None and args.max_context_len is not None:
        check_draft_tokens(args.num_draft_tokens, args.max_context_len)
    for ids in args.prompt_ids:
        _check_ids(ids, args.max_context_len)


def _check_ids(ids: Sequence[int], max_context_len: int | None) -> None:
    wrong = next((one for one in ids if not 0 <= one <= INT32_MAX), None)
    if wrong is not None:
        raise RequestError(f"--prompt-ids has token {wrong}, but token ids are >= 0 and fit int32; use the tokenizer's")
    if max_context_len is not None and len(ids) >= max_context_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but --max-context-len is {max_context_len} and one must be free for "
            "the answer; shorten the prompt or raise it"
        )


def _draft_shape(args: argparse.Namespace) -> DraftShape:
    """Return the draft shape of the arguments; an absent argument gets the drafting method's default.

    Raises:
        ArgumentError: an argument has no effect with this drafting method.
    """
    drafts = _drafts(args)
    if args.drafts is not None and args.speculate != "adaptive":
        raise ArgumentError(
            f"--drafts is given with --speculate {args.speculate}; it belongs to --speculate adaptive, so write "
            f"--speculate {args.drafts} for drafts of fixed size"
        )
    for name, owners in OWNERS.items():
        if getattr(args, name) is not None and drafts not in owners:
            option = f"--{name.replace('_', '-')}"
            way = f"--speculate {args.speculate}" + (f" --drafts {args.drafts}" if args.drafts else "")
            named = " or ".join(f"{one} (--speculate {one} or --drafts {one})" for one in owners)
            belongs = "drafts; leave it out" if owners == OWNERS["topk"] else named
            raise ArgumentError(f"{option} is given with {way}; it belongs to {belongs}")
    default = SHAPES.get(drafts, SHAPES["ngram"])
    given = args.topk, args.num_steps, args.num_draft_tokens
    fields = (default.topk, default.num_steps, default.num_draft_tokens)
    return DraftShape(*(mine if value is None else value for value, mine in zip(given, fields, strict=True)))


def _drafts(args: argparse.Namespace) -> str:
    """Return the source of drafts: "none", or a key of `SHAPES`."""
    named: str = args.speculate
    return (args.drafts or "eagle") if named == "adaptive" else named


def import_torch_side() -> None:
    """Import torch and transformers.

    Raises:
        DraftmarkError: either is missing or broken; the message has the pip command.
    """
    try:
        import draftmark_speculative.engine  # noqa: F401
    except Exception as error:  # a broken installation of torch can raise any exception
        cause = " ".join(str(error).split())
        raise DraftmarkError(
            f"importing torch and transformers failed ({type(error).__name__}: {cause}); "
            "run `pip install 'draftmark-speculative[hf]'`"
        ) from error


def backend_on(args: argparse.Namespace) -> LoadedBackend:
    """Load the named backend and check its runtime and device.

    Raises:
        BackendLoadError: the backend cannot be loaded, or its runtime or the device is absent.
        ArgumentError: --device is not a torch device.
    """
    import torch

    with stdout_for_results():
        backend = load(args.backend or os.environ.get(BACKEND_VARIABLE) or DEFAULT_BACKEND)
    if args.device.partition(":")[0] == backend.info.device:
        backend.require_runtime(args.device)  # imports the runtime, which may register the device type with torch
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise ArgumentError(f"--device {args.device} is not a torch device; pass cpu, cuda or cuda:1") from None
    backend.require_runtime(device)
    return backend


def encode(model: CausalLM, prompts: Sequence[Prompt], raw: bool) -> list[list[int]]:
    """Return the token ids of each prompt, through the model's chat template unless `raw`.

    Raises:
        RequestError: the model has no tokenizer for text, or the text is not valid Unicode.
    """
    return [list(p.token_ids) if p.token_ids is not None else _encode(model, p.text, raw) for p in prompts]


def _encode(model: CausalLM, text: str, raw: bool) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise RequestError(f"{model.name} has no tokenizer, so text cannot be encoded; pass --prompt-ids N,N,…")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"the prompt {text!r} is not valid Unicode text; pass it in UTF-8") from None
    if raw or not tokenizer.chat_template:
        return [int(token) for token in tokenizer(text).input_ids]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return [int(token) for token in tokenizer(chat, add_special_tokens=False).input_ids]


def config_without_model(args: argparse.Namespace, num_prompts: int) -> EngineConfig:
    """Return the configuration that the arguments define, before a model is loaded.

    Raises:
        BackendLoadError, ArgumentError: see `backend_on`.
        RequestError: sampling is out of range, or other settings contradict overlap.
        ModelError: --head is not a draft head.
    """
    from .. import EngineConfig, HostKind, Sampling
    from ..eagle import HeadConfig

    host_lengths = args.host_lengths or ("upper_bound" if args.overlap else "exact")
    config = EngineConfig(
        speculate=_speculation(args),
        page_size=args.page_size,
        max_num_reqs=_max_num_reqs(args, num_prompts),
        graph=args.graph,
        host_lengths=HostKind(host_lengths),
        overlap=args.overlap,
        sampling=Sampling(args.temperature, args.top_p, args.seed),
    )
    config.check_overlap()
    if args.head is not None:
        HeadConfig.load(Path(args.head))
    return replace(config, backend=backend_on(args).name)


def with_model(
    args: argparse.Namespace, config: EngineConfig, model: CausalLM, prompts: Sequence[Sequence[int]]
) -> EngineConfig:
    """Return the configuration with a context that fits the prompts.

    Raises:
        RequestError: a prompt or a context is longer than the model's.
    """
    return replace(config, max_context_len=_context_len(args, model, max(map(len, prompts))))


def _speculation(args: argparse.Namespace) -> Speculation | None:
    from .. import Adaptive, Eagle, Mtp, Ngram

    if args.speculate == "none":
        return None
    shape, drafts = _draft_shape(args), _drafts(args)
    fixed: Speculation = Ngram(shape.topk, shape.num_draft_tokens)
    if drafts == "eagle":
        fixed = Eagle(args.head, shape.topk, shape.num_steps, shape.num_draft_tokens)
    elif drafts == "mtp":
        fixed = Mtp(None, shape.topk, shape.num_steps, shape.num_draft_tokens)
    return Adaptive(fixed) if args.speculate == "adaptive" else fixed


def _max_num_reqs(args: argparse.Namespace, num_prompts: int) -> int:
    given: int | None = args.max_num_reqs
    return min(MOST_REQUESTS, num_prompts) if given is None else given


def _context_len(args: argparse.Namespace, model: CausalLM, longest: int) -> int:
    """Return the context length for the longest prompt and its output, within --max-context-len and the model."""
    given: int | None = args.max_context_len
    if longest >= model.max_context_len:
        raise RequestError(
            f"the prompt has {longest} tokens, but {model.name} was made for {model.max_context_len} positions and one "
            "must be free for the answer; shorten it"
        )
    if given is None:
        needed = ceil_div(longest + args.max_new_tokens, args.page_size) * args.page_size
        return min(int(needed), model.max_context_len)
    if given > model.max_context_len:
        raise RequestError(
            f"max_context_len is {given}, but {model.name} was made for {model.max_context_len} positions; lower it"
        )
    return given
