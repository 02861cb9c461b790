"""Prompts from the command line and from files. Needs no torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmark_tools.cli.errors import ArgumentError

SEPARATOR = "---"
"""Line between two prompts of a text file."""


@dataclass(frozen=True)
class Prompt:
    """Prompt as text or as token ids.

    Attributes:
        name: name in tables: from the .jsonl file, else the first line of the prompt.
    """

    name: str
    text: str = ""
    token_ids: tuple[int, ...] | None = None


def gather(args: argparse.Namespace) -> list[Prompt]:
    """Return every prompt of the command line: --prompt, then --prompts, then --prompt-ids.

    Raises:
        ArgumentError: there is no prompt, a prompt is empty, or the file cannot be used.
    """
    prompts = [_named(text) for text in args.prompt]
    if args.prompts is not None:
        prompts += read_file(Path(args.prompts))
    prompts += [Prompt(_shown_ids(ids), token_ids=ids) for ids in args.prompt_ids]
    if not prompts:
        raise ArgumentError("there is nothing to decode; pass --prompt TEXT, --prompts FILE or --prompt-ids N,N,…")
    for number, prompt in enumerate(prompts, start=1):
        if not (prompt.token_ids or prompt.text.strip()):
            raise ArgumentError(f"prompt {number} of {len(prompts)} is empty; give some text, or leave it out")
    return prompts


def read_file(path: Path) -> list[Prompt]:
    """Read the prompts of a text file, or of a .jsonl file of objects with "prompt" and optionally "name".

    Raises:
        ArgumentError: the file is unreadable, not UTF-8 or empty, or a line has no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig, because some editors write a byte-order mark
    except OSError as error:
        raise ArgumentError(f"the prompt file {path} cannot be read ({error.strerror}); check --prompts") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"the prompt file {path} is not UTF-8 text; convert it") from None
    prompts = _from_jsonl(path, text) if path.suffix == ".jsonl" else _from_text(text)
    if not prompts:
        raise ArgumentError(f"the prompt file {path} holds no prompt; separate prompts by a line of {SEPARATOR}")
    return prompts


def _from_text(text: str) -> list[Prompt]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == SEPARATOR:
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [_named(block) for block in ("\n".join(lines).strip("\n") for lines in blocks) if block.strip()]


def _from_jsonl(path: Path, text: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            entry = _entry(line)
            if entry is None:
                raise ArgumentError(f'{path}:{number} is not an object like {{"prompt": "…"}}; fix that line')
            prompts.append(Prompt(str(entry["name"]), entry["prompt"]) if "name" in entry else _named(entry["prompt"]))
    return prompts


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("prompt"), str) else None


def _named(text: str) -> Prompt:
    first = next((line for line in text.splitlines() if line.strip()), "")
    return Prompt(" ".join(first.split()), text)


def _shown_ids(ids: tuple[int, ...]) -> str:
    return f"ids {', '.join(map(str, ids[:6]))}{', …' if len(ids) > 6 else ''}"
