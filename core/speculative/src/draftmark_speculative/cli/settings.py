"""From arguments to an engine configuration, with every wrong argument found before a model is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
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
from draftmark.cli.errors import ArgumentError
from draftmark.registry import BACKEND_VARIABLE

from .prompts import Prompt

if TYPE_CHECKING:
    from .. import EngineConfig, Speculation
    from ..models import CausalLM

DEFAULT_BACKEND = "reference"
MOST_REQUESTS = 8
"""Prompts that decode together unless --max-num-reqs says otherwise."""


EAGLE, NGRAM = DraftShape(4, 4, 16), DraftShape(2, 1, 8)
"""Draft shapes where the arguments name none."""


def check_numbers(args: argparse.Namespace, num_prompts: int) -> None:
    """Refuse numbers that no model could make right, by the geometry's own rules. Needs no torch.

    Raises:
        GeometryError, RequestError: the first value out of range.
    """
    Geometry.create(
        AttentionShape(1, 1, 1, args.page_size, args.dtype, args.dtype),
        Limits(_max_num_reqs(args, num_prompts), 1 if args.max_context_len is None else args.max_context_len),
        _draft_shape(args),
    )
    if args.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {args.max_new_tokens}, but it must be >= 1; ask for at least one token")


def _draft_shape(args: argparse.Namespace) -> DraftShape:
    """The shape that the arguments ask for, each left out taking its default by the way of drafting.

    Raises:
        ArgumentError: an argument that this way of drafting does not read.
    """
    eagle = _drafts(args) == "eagle"
    if args.drafts is not None and args.speculate != "adaptive":
        raise ArgumentError(
            f"--drafts is given with --speculate {args.speculate}; it belongs to --speculate adaptive, so write "
            f"--speculate {args.drafts} for drafts of fixed size"
        )
    for name in ("head", "num_steps"):
        if getattr(args, name) is not None and not eagle:
            option = f"--{name.replace('_', '-')}"
            way = f"--speculate {args.speculate}" + (f" --drafts {args.drafts}" if args.drafts else "")
            raise ArgumentError(f"{option} is given with {way}; it belongs to eagle, alone or as --drafts of adaptive")
    default = EAGLE if eagle else NGRAM
    given = args.topk, args.num_steps, args.num_draft_tokens
    fields = (default.topk, default.num_steps, default.num_draft_tokens)
    return DraftShape(*(mine if value is None else value for value, mine in zip(given, fields, strict=True)))


def _drafts(args: argparse.Namespace) -> str:
    """Whose drafts: "none", "ngram" or "eagle"."""
    named: str = args.speculate
    return (args.drafts or "eagle") if named == "adaptive" else named


def import_torch_side() -> None:
    """Import torch and transformers.

    Raises:
        DraftmarkError: either is missing or broken, with the pip command.
    """
    try:
        import draftmark_speculative.engine  # noqa: F401
    except Exception as error:  # a broken torch may raise anything
        cause = " ".join(str(error).split())
        raise DraftmarkError(
            f"importing torch and transformers failed ({type(error).__name__}: {cause}); "
            "run `pip install 'draftmark-speculative[hf]'`"
        ) from error


def backend_on(args: argparse.Namespace) -> LoadedBackend:
    """Load the named backend, and make sure of its runtime and of the device.

    Raises:
        BackendLoadError: it cannot be loaded, or its runtime or the device is absent.
        ArgumentError: --device is no torch device.
    """
    import torch

    backend = load(args.backend or os.environ.get(BACKEND_VARIABLE) or DEFAULT_BACKEND)
    if args.device.partition(":")[0] == backend.info.device:
        backend.require_runtime(args.device)  # it may be what teaches torch this device type
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise ArgumentError(f"--device {args.device} is no torch device; pass cpu, cuda or cuda:1") from None
    backend.require_runtime(device)
    return backend


def encode(model: CausalLM, prompts: Sequence[Prompt], raw: bool) -> list[list[int]]:
    """Token ids of each prompt, through the model's chat template unless `raw`.

    Raises:
        RequestError: text for a model without a tokenizer, or text that is not Unicode.
    """
    return [list(p.token_ids) if p.token_ids is not None else _encode(model, p.text, raw) for p in prompts]


def _encode(model: CausalLM, text: str, raw: bool) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise RequestError(f"{model.name} came without a tokenizer, so text cannot be encoded; pass --prompt-ids N,N,…")
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


def engine_config(
    args: argparse.Namespace, backend: str, model: CausalLM, prompts: Sequence[Sequence[int]]
) -> EngineConfig:
    """The configuration that the arguments ask for.

    Raises:
        RequestError: a context longer than the model's, sampling out of range, or overlap with what excludes it.
    """
    from .. import EngineConfig, HostKind, Sampling

    host_lengths = args.host_lengths or ("upper_bound" if args.overlap else "exact")
    config = EngineConfig(
        backend=backend,
        speculate=_speculation(args),
        page_size=args.page_size,
        max_num_reqs=_max_num_reqs(args, len(prompts)),
        max_context_len=_context_len(args, model, max(map(len, prompts))),
        graph=args.graph,
        host_lengths=HostKind(host_lengths),
        overlap=args.overlap,
        sampling=Sampling(args.temperature, args.top_p, args.seed),
    )
    config.check_overlap()
    return config


def _speculation(args: argparse.Namespace) -> Speculation | None:
    from .. import Adaptive, Eagle, Ngram

    if args.speculate == "none":
        return None
    shape, drafts = _draft_shape(args), _drafts(args)
    fixed: Speculation = Ngram(shape.topk, shape.num_draft_tokens)
    if drafts == "eagle":
        fixed = Eagle(args.head, shape.topk, shape.num_steps, shape.num_draft_tokens)
    return Adaptive(fixed) if args.speculate == "adaptive" else fixed


def check_sampling(args: argparse.Namespace) -> None:
    """Raise `RequestError` for a temperature or top-p out of range."""
    from .. import Sampling

    Sampling(args.temperature, args.top_p, args.seed)


def _max_num_reqs(args: argparse.Namespace, num_prompts: int) -> int:
    given: int | None = args.max_num_reqs
    return min(MOST_REQUESTS, num_prompts) if given is None else given


def _context_len(args: argparse.Namespace, model: CausalLM, longest: int) -> int:
    """What the longest prompt and its output need, in whole pages, unless the arguments or the model say less."""
    given: int | None = args.max_context_len
    if given is None:
        needed = ceil_div(longest + args.max_new_tokens, args.page_size) * args.page_size
        return min(int(needed), model.max_context_len)
    if given > model.max_context_len:
        raise RequestError(
            f"max_context_len is {given}, but {model.name} was made for {model.max_context_len} positions; lower it"
        )
    return given
