"""Bad input to `generate`: one sentence on stderr, nothing on stdout, the right exit code, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

IDS = ("--prompt-ids", "1,2,3")

GENERATE = {
    "nothing to decode": ((), 2, "pass --prompt TEXT"),
    "empty ids": (("--prompt-ids", ""), 2, "prompt 1 of 1 is empty"),
    "empty prompt": (("--prompt", ""), 2, "prompt 1 of 1 is empty"),
    "blank prompt": ((*IDS, "--prompt", " \n"), 2, "prompt 1 of 2 is empty"),
    "empty model": ((*IDS, "--model", ""), 2, "--model is empty"),
    "a tree without drafts": ((*IDS, "--speculate", "none", "--topk", 4), 2, "--topk is given with --speculate none"),
    "rows without drafts": (
        (*IDS, "--speculate", "none", "--num-draft-tokens", 4),
        2,
        "--num-draft-tokens is given with --speculate none",
    ),
    "pages beyond memory": ((*IDS, "--page-size", 100000000), 2, "use fewer requests, a shorter context"),
    "topk 0": ((*IDS, "--topk", 0), 2, "draft.topk is 0"),
    "no draft token": ((*IDS, "--num-draft-tokens", 0), 2, "draft.num_draft_tokens is 0"),
    "page size 0": ((*IDS, "--page-size", 0), 2, "attention.page_size is 0"),
    "page size -4": ((*IDS, "--page-size", -4), 2, "attention.page_size is -4"),
    "tokens past int32": ((*IDS, "--max-new-tokens", 1 << 40), 2, "max_new_tokens is 1099511627776"),
    "a draft longer than a request": (
        (*IDS, "--num-draft-tokens", 40, "--max-context-len", 32),
        2,
        "--num-draft-tokens is 40, but a request has at most 32 tokens",
    ),
    "no new token": ((*IDS, "--max-new-tokens", 0), 2, "max_new_tokens is 0"),
    "no context": ((*IDS, "--max-context-len", 0), 2, "limits.max_context_len is 0"),
    "no request": ((*IDS, "--max-num-reqs", 0), 2, "limits.max_num_reqs is 0"),
    "NaN temperature": ((*IDS, "--temperature", "nan"), 2, "temperature is nan"),
    "negative temperature": ((*IDS, "--temperature", -1), 2, "temperature is -1.0"),
    "top-p 0": ((*IDS, "--top-p", 0), 2, "top_p is 0.0"),
    "unknown dtype": ((*IDS, "--dtype", "int4"), 2, "attention.q_dtype is 'int4'"),
    "unknown backend": ((*IDS, "--backend", "atlantis"), 1, "no installed distribution registers it"),
    "unknown device": ((*IDS, "--device", "sails"), 2, "--device sails is not a torch device"),
    "absent device": ((*IDS, "--device", "xpu"), 1, "torch sees no xpu device"),
    "a device that this torch has not": ((*IDS, "--device", "cuda:99"), 1, "cuda"),
    "prompt longer than the context": ((*IDS, "--max-context-len", 3), 2, "the prompt has 3 tokens"),
    "context longer than the model's": ((*IDS, "--max-context-len", 300), 2, "was made for 256 positions"),
    "prompt longer than the model": (("--prompt-ids", ",".join(["7"] * 300)), 2, "the prompt has 300 tokens"),
    "token out of range": (("--prompt-ids", "1,16"), 2, "the prompt has token 16"),
    "negative token": (("--prompt-ids", "-1,3"), 2, "expected one argument"),
    "negative token, with =": (("--prompt-ids=-1,3",), 2, "--prompt-ids has token -1"),
    "text without a tokenizer": (("--prompt", "hello"), 2, "pass --prompt-ids"),
    "missing prompt file": (("--prompts", "no-such-file.txt"), 2, "no-such-file.txt cannot be read"),
    "drafts not known": ((*IDS, "--speculate", "medusa"), 2, "invalid choice: 'medusa'"),
    "no head installed": ((*IDS, "--speculate", "eagle"), 1, "no draft head is installed for model"),
    "a head without eagle": ((*IDS, "--head", "x"), 2, "--head is given with --speculate ngram"),
    "drafts of what is not adaptive": ((*IDS, "--drafts", "eagle"), 2, "--drafts is given with --speculate ngram"),
    "a head without a head's drafts": (
        (*IDS, "--speculate", "adaptive", "--drafts", "ngram", "--head", "x"),
        2,
        "--head is given with --speculate adaptive --drafts ngram",
    ),
    "no such head": ((*IDS, "--speculate", "eagle", "--head", "no-such-head"), 1, "it has no head.json"),
    "overlap with drafts of the host": ((*IDS, "--overlap"), 2, "drafts of Ngram"),
    "overlap with exact lengths": (
        (*IDS, "--speculate", "none", "--overlap", "--host-lengths", "exact"),
        2,
        "with host_lengths exact",
    ),
}


@pytest.mark.parametrize("kind", GENERATE)
def test_bad_argument_is_one_sentence(draftmark: Run, tiny: Path, kind: str) -> None:
    """`generate` reports a bad argument in one sentence before it decodes anything."""
    argv, code, cause = GENERATE[kind]
    done = draftmark("generate", "--model", tiny, *argv)
    # Errors that are found after the model has loaded follow the settings line on stdout, so that line is removed.
    done = type(done)(done.code, "" if "·" in done.out.split("\n")[0] else done.out, done.err)
    done.assert_one_line_error(code, cause)


def test_two_distributions_with_one_name(draftmark: Run, distribution: Callable[..., Path], tiny: Path) -> None:
    """A backend name that two packages register is an error that names both packages."""
    distribution("twin", project="vendor-a")
    distribution("twin", project="vendor-b")
    done = draftmark("generate", "--model", tiny, *IDS, "--backend", "twin")
    done.assert_one_line_error(1, "vendor-a 1.0 and vendor-b 1.0 both register it")


def test_damaged_weights(draftmark: Run, tiny: Path, tmp_path: Path) -> None:
    """Truncated GGUF and safetensors files, a missing file, and a pickle each give an error that names the file."""
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / "cut" / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-100])
    (tmp_path / "model.bin").write_bytes(b"\x80\x04.")
    causes = {
        "cut.gguf": "is not a whole GGUF file",
        "cut": "is not a whole safetensors file",
        "none": "does not exist",
        "model.bin": "is neither a model folder nor a .gguf file",
    }
    for name, cause in causes.items():
        draftmark("generate", *IDS, "--model", tmp_path / name).assert_one_line_error(1, cause)


@pytest.mark.parametrize(
    "argv",
    [
        ("--prompt-ids=-1,3",),
        (*IDS, "--max-context-len", 3),
        (*IDS, "--max-new-tokens", 1 << 40),
        (*IDS, "--num-draft-tokens", 40, "--max-context-len", 32),
        (*IDS, "--top-p", 2),
        (*IDS, "--device", "gpu"),
        (*IDS, "--dtype", "int4"),
    ],
    ids=lambda argv: " ".join(map(str, argv)),
)
def test_bad_argument_is_refused_before_the_model_loads(draftmark: Run, argv: Any) -> None:
    """An argument that no model can serve is refused before the model's files are looked for."""
    done = draftmark("generate", "--model", "no-such-model", *argv)
    assert done.code == 2 and "no-such-model" not in done.err


def test_short_dtype_name_is_accepted(draftmark: Run, tiny: Path) -> None:
    """`--dtype bf16` means bfloat16."""
    found = draftmark("generate", "--model", tiny, *IDS, "--dtype", "bf16", "--max-new-tokens", 2, "--json").json
    assert found["model"]["dtype"] == "bfloat16"
