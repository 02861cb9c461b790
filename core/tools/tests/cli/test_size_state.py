"""The command `draftmark size --state`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark_tools.cli.state_schemes import SCHEMES

Run = Callable[..., Any]


def test_slots_and_schemes_of_a_known_model(draftmark: Run) -> None:
    """The report has the bytes of a slot, a row and a request, and each scheme's bytes held and moved."""
    done = draftmark("size", "--state", "qwen3-next", "--num-draft-tokens", 64)
    assert done.code == 0
    assert "36 of 48 layers have recurrent state" in done.out
    assert "a slot and layer: state 2.0 MiB, window 48.0 KiB" in done.out
    assert "a request: 73.7 MiB" in done.out
    rows = {line.split()[0]: line.split()[1:6] for line in done.out.splitlines() if line}
    assert rows["snapshots-tree"] == ["yes", "299.4", "GiB", "585.0", "GiB"]
    assert rows["replay"] == ["yes", "4.0", "GiB", "16.9", "GiB"]
    assert all(scheme.name in rows for scheme in SCHEMES)


def test_json_of_a_rank(draftmark: Run) -> None:
    """`--ranks`, `--scheme` and the dtypes reach the report; bytes are integers."""
    argv = ("--ranks", 4, "--scheme", "replay,ring", "--state-dtype", "bf16", "--json")
    found = draftmark("size", "--state", "nemotron-h", *argv).json
    assert found["model"] == {"model_type": "nemotron_h", "layers": found["model"]["layers"], "num_layers": 52}
    assert found["bytes"]["state_bytes"] == 128 // 4 * 64 * 128 * 2
    assert found["bytes"]["num_layers"] == len(found["model"]["layers"]) == 24
    assert [one["name"] for one in found["schemes"]] == ["replay", "ring"]
    assert found["state"]["conv_blocks"] == {"x": 2048, "B": 256, "C": 256}
    assert found["buffers"] == []


def test_state_buffers_of_a_backend(draftmark: Run) -> None:
    """With a backend the report has its state buffers; their bytes are replay's without the padded request."""
    found = draftmark("size", "reference", "--state", "kimi-linear", "--json").json
    replay = next(one for one in found["schemes"] if one["name"] == "replay")
    assert sum(one["bytes"] for one in found["buffers"]) * 65 == replay["held"] * 64


def test_help_has_no_objects(draftmark: Run) -> None:
    """The help names all schemes as the default, without the objects that describe them."""
    text = " ".join(draftmark("size", "--help").out.split())
    assert "rollback schemes to compare (default: snapshots," in text and "Scheme(" not in text


def test_a_configuration_file(draftmark: Run, tmp_path: Path) -> None:
    """A model's config.json is read."""
    config = {"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert draftmark("size", "--state", str(path), "--json").json["bytes"]["slot_bytes"] == 64 * 2 * 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--state", "absent"), "--state is 'absent'"),
        (("--state", "qwen3-next", "--ranks", "3"), "ranks is 3"),
        (("--state", "qwen3-next", "--ranks", "32"), "32 heads and 16 key heads; use one of 1, 2, 4, 8, 16\n"),
        (("reference", "--ranks", "2"), "--ranks is given, but only --state reads it"),
        (("reference", "--scheme", "ring"), "--scheme is given, but only --state reads it"),
        (("--state", "qwen3-next", "--scheme", "all"), "'all' is no scheme"),
        (("--state", "qwen3-next", "--accepted", "9"), "--accepted is 9"),
        (("--state", "qwen3-next", "--state-dtype", "int8"), "state_dtype is 'int8'"),
        ((), "required: NAME"),
    ],
)
def test_wrong_arguments_are_named(draftmark: Run, argv, words) -> None:
    """Each wrong argument ends with one line and exit code 2."""
    done = draftmark("size", *argv)
    assert done.code == 2 and words in done.err


@pytest.mark.parametrize("text", ["[]", "{", "\x80"])
def test_a_file_without_a_configuration_is_named(draftmark: Run, tmp_path: Path, text) -> None:
    """A file that is no JSON object ends with one line and exit code 2."""
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    done = draftmark("size", "--state", str(path))
    assert done.code == 2 and "--state" in done.err
