"""Each distribution as a user gets it: its wheel, installed beside what its metadata asks for and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Environment = Callable[..., Path]
PLUGINS = sorted(path.parent.name for path in (Path(__file__).parent.parent / "plugins").glob("*/pyproject.toml"))
SIZES = pytest.mark.parametrize(
    "cases", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["one case each", "all cases"]
)
"""Of each check of the sizing tier."""
JUDGING = ("draftmark", "draftmark-contract[proof]")


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command of a new environment: with `env -i`, so that nothing of this one is seen."""
    words = ["env", "-i", "OMP_NUM_THREADS=1", f"HOME={Path.home()}", *map(str, command)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


def missing(commands: Path, *modules: str) -> bool:
    """Whether none of these can be imported there."""
    return all(run(commands / "python", "-c", f"import {module}").returncode for module in modules)


def judged(commands: Path, name: str, cases: int) -> str:
    """What the sizing tier says of a backend, which it passes."""
    done = run(commands / "draftmark", "contract", name, "--tier", "sizing", "--sample", cases)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_core_needs_neither_torch_nor_pytest(environment: Environment) -> None:
    """`draftmark` alone lists and sizes its backend, and says what to install for the commands that it has not."""
    commands = environment("draftmark")
    assert missing(commands, "torch", "numpy", "pytest", "draftmark_contract", "draftmark_speculative")
    listed, sized = run(commands / "draftmark", "list"), run(commands / "draftmark", "size", "reference")
    assert "reference" in listed.stdout and not listed.returncode, listed.stderr
    assert "slot_mapping" in sized.stdout and not sized.returncode, sized.stderr
    examined = run(commands / "draftmark", "doctor")
    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert "reference absent: torch is not installed; pip install 'draftmark[torch]'" in examined.stdout
    judging, decoding = "draftmark-contract[torch]", "draftmark-speculative[hf]"
    for command, wheel in (("contract", judging), ("bench", judging), ("generate", decoding)):
        absent = run(commands / "draftmark", command, "reference")
        assert absent.returncode == 2 and f"pip install '{wheel}'" in absent.stderr, absent.stderr


@SIZES
def test_the_contract_judges_without_torch(environment: Environment, cases: int) -> None:
    """The reference passes the sizing tier, proofs included, where torch is not installed."""
    commands = environment(*JUDGING)
    assert missing(commands, "torch", "draftmark_speculative")
    told = judged(commands, "reference", cases)
    assert cases or "sizing of reference conforms to draftmark contract" in told


@SIZES
@pytest.mark.parametrize("name", PLUGINS)
def test_each_plugin_is_sized_and_judged_without_its_runtime(environment: Environment, name: str, cases: int) -> None:
    """A plugin's wheel beside the core's and the contract's alone: list, size and the sizing tier.

    All cases ask that every claim is served somewhere; some are by a sibling's kernels, which come with the runtime.
    """
    wheels = dict.fromkeys((f"draftmark-{name.replace('_', '-')}", *([] if cases else ["draftmark-cuda-triton"])))
    commands = environment(*JUDGING, bare=tuple(wheels))
    assert missing(commands, "torch", "triton")
    assert name in run(commands / "draftmark", "list").stdout
    sized = run(commands / "draftmark", "size", name, "--page-size", 128)  # of the profile that all serve
    assert sized.returncode == 0, sized.stderr
    judged(commands, name, cases)


def test_the_vllm_adapter_waits_for_vllm(environment: Environment) -> None:
    """Beside an environment without vLLM it imports, lets vLLM's platforms be, and refuses by the version."""
    commands = environment("draftmark-vllm")
    assert missing(commands, "vllm", "pytest", "draftmark_contract")
    code = "from draftmark_vllm import cpu, versions; assert cpu.platform() is None; versions.VLLM.require()"
    done = run(commands / "python", "-c", code)
    assert "EngineError: vLLM is not installed; pip install 'vllm>=0.26,<0.34'" in done.stderr, done.stderr


def test_the_loop_says_what_reads_models(environment: Environment) -> None:
    """`draftmark-speculative` without its extra has torch, and says what to install for `draftmark generate`."""
    commands = environment("draftmark-speculative")
    assert missing(commands, "transformers", "pytest")
    found = run(commands / "python", "-c", "import importlib.util as u; print(u.find_spec('torch') is not None)")
    assert found.stdout == "True\n", found.stderr
    done = run(commands / "draftmark", "generate", "--prompt", "a")
    assert done.returncode and "pip install 'draftmark-speculative[hf]'" in done.stderr, done.stderr


def test_a_head_alone_is_weights(environment: Environment) -> None:
    """Nothing comes with 8 MB of weights that are never imported: no torch, whose build is the user's choice."""
    commands = environment("draftmark-head-smollm2-135m")
    assert missing(commands, "torch", "transformers", "draftmark", "draftmark_speculative")


def test_a_head_brings_the_loop_when_asked_and_is_found_by_its_model(environment: Environment) -> None:
    """With its extra: what that asks for finds it, with all its files, by the name of the model's file."""
    commands = environment("draftmark-head-smollm2-135m[run]")
    code = "from draftmark_speculative.eagle.installed import installed_head\n"
    code += "print(*sorted(p.name for p in installed_head('SmolLM2-135M-Instruct.Q4_1.gguf').glob('*.*')))"
    done = run(commands / "python", "-c", code)
    assert done.stdout.split() == ["__init__.py", "head.json", "head.safetensors", "py.typed", "training.json"], (
        done.stderr
    )
