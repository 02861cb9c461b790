"""Prompts from arguments and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmark_speculative.cli.prompts import read_file
from draftmark_tools.cli.errors import ArgumentError


def test_text_file_is_split_at_lines_of_dashes(tmp_path: Path) -> None:
    """A line of --- separates prompts; blank lines around a prompt and empty prompts are dropped."""
    file = tmp_path / "prompts.txt"
    file.write_text("\nFirst line\n\n  --- not a separator\n---\n\n---\nsecond: naïve ⚓\n")
    prompts = read_file(file)
    assert [prompt.text for prompt in prompts] == ["First line\n\n  --- not a separator", "second: naïve ⚓"]
    assert [prompt.name for prompt in prompts] == ["First line", "second: naïve ⚓"]


def test_byte_order_mark_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    """A byte-order mark at the start of a prompt file is not part of the prompt."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfFirst")
    assert read_file(tmp_path / "a.txt")[0].text == "First"


def test_jsonl_file_may_name_its_prompts(tmp_path: Path) -> None:
    """Each line of a .jsonl file is an object with a prompt and optionally a name; other keys are ignored."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"name": "story", "pays": false, "prompt": "Tell\\nme"}\n\n{"prompt": "Why?"}\n')
    assert [(prompt.name, prompt.text) for prompt in read_file(file)] == [("story", "Tell\nme"), ("Why?", "Why?")]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.txt", b"\n---\n", "holds no prompt"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "a.jsonl:2 is not an object"),
        ("a.jsonl", b"prompt\n", "a.jsonl:1 is not an object"),
        ("a.txt", b"\xef\xbb\xbf---\n", "holds no prompt"),
        ("a.jsonl", b'{"prompt": 3}\n', "a.jsonl:1 is not an object"),
    ],
)
def test_unusable_prompt_file_is_named(tmp_path: Path, name: str, content: bytes, cause: str) -> None:
    """An unusable prompt file gives an error that names the file and the line."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=cause):
        read_file(tmp_path / name)


def test_the_examples_can_be_read() -> None:
    """The repository's prompt files load, and the benchmark's prompts have unique names and both values of "pays"."""
    import json

    folder = Path(__file__).parents[4] / "examples" / "prompts"
    assert len(read_file(folder / "demo.txt")) >= 5
    lines = [json.loads(line) for line in (folder / "benchmark.jsonl").read_text().splitlines()]
    assert {line["pays"] for line in lines} == {True, False}
    assert len({line["name"] for line in lines}) == len(lines) == len(read_file(folder / "benchmark.jsonl"))
