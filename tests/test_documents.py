"""Tests of the documents: the tutorial's package is built and tested, and the printed commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftmark_contract.judge.rules import rules
from tools.docs import relative_links

ROOT = Path(__file__).parent.parent
CLI = (sys.executable, "-m", "draftmark_tools.cli")
TUTORIAL = (ROOT / "docs" / "writing-a-backend.md").read_text()
NO_LONG = " ".join(
    re.search(r"^NO_LONG = ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)[1].replace("\\", "").split()
)
"""Expression that leaves out the items which take most of a sample's time."""
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with `path` as its Python path."""
    environment = {**os.environ, "PYTHONPATH": str(path) if path else "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the tutorial's package, which `draftmark new-backend tugboat` writes."""
    folder = tmp_path_factory.mktemp("written")
    done = run(*CLI, "new-backend", "tugboat", "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    return folder / "draftmark-tugboat"


@pytest.fixture(scope="module")
def wheel(written, build, tmp_path_factory):
    """Return the wheel of the tutorial's package."""
    return build(written, tmp_path_factory.mktemp("wheel"))


def test_tutorial_prints_what_new_backend_writes(written):
    """Each file on the page equals the file that the command writes. Only backend.py is linked instead of printed."""
    printed = {name: text for _, name, text in BLOCK.findall(TUTORIAL) if name}
    for name, text in printed.items():
        assert text == (written / name).read_text(), f"{name} is not what new-backend writes"
    sources = {path.relative_to(written).as_posix() for path in written.glob("src/**/*.py")}
    assert sources - {"src/draftmark_tugboat/backend.py"} | {"pyproject.toml"} == set(printed)


def test_every_command_of_the_tutorial_exists(written):
    """Each `draftmark` command on the page and in the package's README exists, with its options."""
    text = TUTORIAL + (written / "README.md").read_text() + (written / ".github/workflows/contract.yml").read_text()
    lines = re.findall(r"^(?: {4}|      - run: )?draftmark (.*)$", text, re.MULTILINE)
    named = {tuple(line.split("#")[0].split()) for line in lines}
    assert {"new-backend", "list", "doctor", "size", "prove", "contract", "generate"} <= {words[0] for words in named}
    for command, *words in named:
        done = run(*CLI, command, "--help")
        assert done.returncode == 0, command
        assert not [word for word in words if word.startswith("--") and word not in done.stdout], (command, words)


def printed(number):
    """Return (packages to install, other lines) of the page's shell block with this number."""
    lines = [text for kind, _, text in BLOCK.findall(TUTORIAL) if kind == "sh"][number].splitlines()
    installed = [word.strip("'") for line in lines if line.startswith("pip") for word in line.split()[2:]]
    return installed, [line for line in lines if not line.startswith("pip")]


@pytest.fixture
def followed(wheel, environment, tmp_path):
    """Return a function that runs the page's commands in an environment with only the packages that it installs."""

    def follow(lines, *installed, **replaced):
        commands = environment(*installed, bare=(wheel,))
        shown = {}
        for line in lines:
            for word, value in replaced.items():
                line = line.replace(word, value)
            words = ("env", "-i", "OMP_NUM_THREADS=1", f"HOME={Path.home()}", f"PATH={commands}:/usr/bin:/bin")
            done = subprocess.run((*words, "bash", "-c", line), cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
            shown[line.split()[1]] = done.stdout
        return shown

    return follow


@pytest.mark.long
def test_first_step_works_as_printed(followed, tmp_path):
    """After the page's first step the package is listed, ready and sized; one case of each rule runs and none fails."""
    installed, (begin, *rest) = printed(0)
    assert begin == "draftmark new-backend tugboat" and installed.pop() == "./draftmark-tugboat[test]"
    installed.remove("-e")
    # The verdict on the page, a slow test, needs the long items too.
    shown = followed(rest, *installed, **{"--sample 1": f"--sample 1 -k '{NO_LONG}'"})
    assert "tugboat" in shown["list"] and "ready" in shown["doctor"] and "slots" in shown["size"]
    record = json.loads((tmp_path / "sample.json").read_text())
    counts, ran = record["counts"], {row["item"] for row in record["results"]}
    assert counts["passed"] and not counts["declared"] + counts["unjudged"] + counts["failed"], counts
    assert {"proof.needed_is_declared[target]", "numerics.match_float64[mandatory-decode]"} <= ran


@pytest.mark.slow
def test_verdict_is_the_one_on_the_page(followed):
    """The tutorial's backend conforms in every case of the sizing and host tiers, proofs included."""
    shown = followed(printed(1)[1], *printed(0)[0][:2])
    assert "tugboat conforms to draftmark contract" in shown["contract"]


@pytest.mark.slow
@pytest.mark.smollm2
def test_real_text_works_as_printed(followed):
    """The page's last step generates the text of plain decoding and of transformers on the bundled model."""
    from draftmark_speculative.models.loading import bundled_model

    installed, lines = printed(3)
    shown = followed(lines, *printed(0)[0][:2], *installed, MODEL_FOLDER=str(bundled_model()))
    assert "equal to plain decoding and transformers' generate" in shown["generate"]


SAME_TEXT = """
import random
from draftmark_speculative import DraftTree, EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.models.tiny import tiny_model

for family in ("llama", "mistral"):
    model = tiny_model(family, vocab_size=16)
    draw = random.Random(0)
    prompts = [[draw.randrange(16) for _ in range(n)] for n in (3, 17, 9)]
    texts = []
    for backend, graph in (("reference", False), ("tugboat", False), ("tugboat", True)):
        config = EngineConfig(
            backend=backend, speculate=Ngram(3, 7, 2, 1), graph=graph, page_size=4, max_context_len=64,
            host_lengths=HostKind.UNKNOWN, guard=True, max_num_reqs=3, max_extend_tokens=20,
        )
        outs, engine = generate(model, prompts, 24, config)
        assert engine.statistics.mean_accepted > 1.1, engine.statistics
        texts.append([out.tokens for out in outs])
    assert all(text == texts[0] for text in texts), texts
print("the same text")
"""


@pytest.mark.long
def test_tutorials_backend_decodes_like_the_reference(wheel, tmp_path):
    """The tutorial's backend generates the reference backend's text with trees and windows, eager and with graphs."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = run(sys.executable, "-c", SAME_TEXT, path=tmp_path)
    assert done.stdout == "the same text\n", done.stderr[-2000:]


def test_judge_page_counts_todays_rules():
    """docs/judge.md counts the rules for vLLM's attention and the other rules; the sum is the number of all rules."""
    counts = re.search(
        r"Of the contract's (\d+) rules, (\d+) apply to vLLM's attention\. The other (\d+)",
        (ROOT / "docs" / "judge.md").read_text(),
    )
    assert counts is not None
    every, reachable, others = map(int, counts.groups())
    assert every == len(rules()) == reachable + others


def test_contract_page_counts_todays_mutants():
    """docs/contract.md gives the totals of the recorded mutant runs and of the generated mutants."""
    text = (ROOT / "docs" / "contract.md").read_text()
    kills = json.loads((ROOT / "core/contract/tests/mutants/kills.json").read_text())
    killed = sum(bool(row["killed_by"]) for row in kills.values())
    assert f"{len({name.split()[0] for name in kills})} known or invented defects" in text
    assert f"{killed} of {len(kills)} are killed" in text
    made = json.loads((ROOT / "tools/mutation/results.json").read_text())["reference"]["headline"]
    found = re.search(r"(\d+ of \d+) killed", made)
    assert found is not None and f"{found[1]} were killed" in text


def test_relative_links_lead_to_files_and_headings():
    """Every relative link of a Markdown file in git leads to an existing file and heading."""
    assert not relative_links.faults(relative_links.pages())


def test_link_check_finds_missing_files_and_headings(tmp_path):
    """A link to a missing file and one to a missing heading are faults; other links are not."""
    page, other = tmp_path / "a.md", tmp_path / "b.md"
    other.write_text('# A heading, with `code`\n\n<a id="here"></a>\n\n## Twice\n\n## Twice\n')
    page.write_text("[1](b.md#a-heading-with-code) [2](b.md#here) [3](b.md#twice-1) [4](https://example.org/x.md)\n")
    assert relative_links.faults([page, other], tmp_path) == []
    page.write_text("[1](c.md) [2](b.md#nowhere)\n\n```md\n[3](d.md)\n```\n")
    assert relative_links.faults([page], tmp_path) == [
        "a.md links to c.md: the repository has no such file",
        "a.md links to b.md#nowhere: the page has no heading #nowhere",
    ]
