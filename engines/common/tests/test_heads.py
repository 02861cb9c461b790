"""Tests of the errors that the converters of draft heads raise for folders that they cannot use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftmark_engines.errors import EngineError
from draftmark_engines.heads import read_configs, write_from_command_line


def _copy(head: Path, target: Path, out: Path) -> None:
    out.write_text(json.dumps(read_configs(head, target)))


def _folders(folder: Path, head: str, target: str) -> list[str]:
    for name, file, text in (("head", "head.json", head), ("target", "config.json", target)):
        (folder / name).mkdir()
        if text:
            (folder / name / file).write_text(text)
    return [str(folder / name) for name in ("head", "target", "out")]


@pytest.mark.parametrize(
    ("head", "target", "cause"),
    [
        ("", "{}", "head.json does not exist; name a head's folder, then its target's"),
        ("{}", "", "config.json does not exist; name a head's folder, then its target's"),
        ("{", "{}", "head.json is not JSON"),
    ],
)
def test_unusable_folder_is_one_sentence(
    head: str,
    target: str,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For a folder that it cannot read, the program prints one sentence without a traceback, and exits with code 1."""
    monkeypatch.setattr(sys, "argv", ["convert", *_folders(tmp_path, head, target)])
    with pytest.raises(SystemExit) as ended:
        write_from_command_line(__doc__, _copy)
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert printed.startswith("convert: ") and cause in printed and printed.count("\n") == 1


def test_unwritable_output_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the output cannot be written, the error contains the operating system's message."""
    folders = _folders(tmp_path, "{}", "{}")
    Path(folders[2]).mkdir()
    monkeypatch.setattr(sys, "argv", ["convert", *folders])
    with pytest.raises(SystemExit) as ended:
        write_from_command_line(__doc__, _copy)
    assert (ended.value.code, "Is a directory" in capsys.readouterr().err) == (1, True)


def test_folders_that_fit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter gets the three folders of the command line, and reads head.json and config.json."""
    folders = _folders(tmp_path, '{"a": 1}', '{"b": 2}')
    monkeypatch.setattr(sys, "argv", ["convert", *folders])
    write_from_command_line(__doc__, _copy)
    assert json.loads(Path(folders[2]).read_text()) == [{"a": 1}, {"b": 2}]
    with pytest.raises(EngineError, match="does not exist"):
        read_configs(tmp_path / "nowhere", tmp_path / "target")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ModuleNotFoundError("No module named 'safetensors'", name="safetensors"), "pip install safetensors"),
        (KeyError("hidden_size"), "head.json or config.json has no 'hidden_size'"),
        (RuntimeError("header too\nlarge"), "a file cannot be read (RuntimeError: header too large)"),
    ],
    ids=["package", "key", "damage"],
)
def test_other_errors_are_one_sentence(
    error: Exception,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If a package or field is absent, or a file is damaged, the program prints one sentence without a traceback."""

    def write(*_: Path) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["convert", *_folders(tmp_path, "{}", "{}")])
    with pytest.raises(SystemExit) as ended:
        write_from_command_line(__doc__, write)
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert printed.startswith("convert: ") and cause in printed and printed.count("\n") == 1
