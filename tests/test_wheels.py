"""Tests of each distribution's wheel in an environment with only the packages that its metadata requires."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Wheels
from tests.conftest import run as started

Environment = Callable[..., Path]
PLUGINS = sorted(path.parent.name for path in (Path(__file__).parent.parent / "plugins").glob("*/pyproject.toml"))
SIZES = pytest.mark.parametrize(
    "cases", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["one case each", "all cases"]
)
"""Cases of each check of the sizing tier; 0 for all."""
JUDGING = ("draftmark", "draftmark-contract[proof]")


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of a new environment without this environment's variables."""
    words = ["env", "-i", "OMP_NUM_THREADS=1", f"HOME={Path.home()}", *map(str, command)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


def missing(commands: Path, *modules: str) -> bool:
    """Return True if none of these modules can be imported in an environment."""
    return all(run(commands / "python", "-c", f"import {module}").returncode for module in modules)


def judged(commands: Path, name: str, cases: int) -> str:
    """Run the sizing tier of a backend, assert that it passes, and return its output."""
    done = run(commands / "draftmark", "contract", name, "--tier", "sizing", "--sample", cases, "--allow-part")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_core_needs_neither_torch_nor_pytest(environment: Environment) -> None:
    """Without torch, backends are listed and sized; a command of another wheel names that wheel."""
    commands = environment("draftmark")
    assert missing(commands, "torch", "numpy", "pytest", "draftmark_contract", "draftmark_speculative")
    listed, sized = run(commands / "draftmark", "list"), run(commands / "draftmark", "size", "reference")
    assert "reference" in listed.stdout and not listed.returncode, listed.stderr
    assert "slot_mapping" in sized.stdout and not sized.returncode, sized.stderr
    examined = run(commands / "draftmark", "doctor")
    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert "reference absent: torch is not installed; pip install 'draftmark[torch]'" in examined.stdout
    judging, decoding = "'draftmark-contract[torch]'", "'draftmark-speculative[hf]'"
    wheels = {"contract": judging, "bench": judging, "generate": decoding, "prove": "draftmark-proof"}
    wheels |= {"new-backend": "draftmark-contract"}
    for command, wheel in wheels.items():
        absent = run(commands / "draftmark", command, "reference")
        assert absent.returncode == 2 and f"pip install {wheel}" in absent.stderr, absent.stderr


@pytest.mark.long
@SIZES
def test_contract_judges_without_torch(environment: Environment, cases: int) -> None:
    """The reference backend passes the sizing tier with proofs in an environment without torch."""
    commands = environment(*JUDGING)
    assert missing(commands, "torch", "draftmark_speculative")
    printed = judged(commands, "reference", cases)
    assert cases or "sizing of reference conforms to draftmark contract" in printed


@pytest.mark.long
@SIZES
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "cuda_triton" else [pytest.mark.slow]) for one in PLUGINS]
)
def test_each_plugin_is_judged_without_its_runtime(environment: Environment, name: str, cases: int) -> None:
    """With only the core and the contract, a plugin's wheel is listed and sized, and passes the sizing tier.

    With all cases cuda_triton is installed too, because its kernels run some modes of other plugins.
    """
    wheels = dict.fromkeys((f"draftmark-{name.replace('_', '-')}", *([] if cases else ["draftmark-cuda-triton"])))
    commands = environment(*JUDGING, bare=tuple(wheels))
    assert missing(commands, "torch", "triton")
    assert name in run(commands / "draftmark", "list").stdout
    sized = run(commands / "draftmark", "size", name, "--page-size", 128)  # all plugins support pages of 128
    assert sized.returncode == 0, sized.stderr
    judged(commands, name, cases)


def interpreters(version: str) -> list[Path]:
    """Return Pythons of a version that start: on the path, or installed by pyenv or uv."""
    known = [Path(one) for one in [shutil.which(f"python{version}")] if one]
    for folder in (".pyenv/versions", ".local/share/uv/python"):
        known += sorted((Path.home() / folder).glob(f"*{version}.*/bin/python{version}"))
    return [one for one in known if not run(one, "-c", "import ctypes, sqlite3, ssl").returncode]


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_wheels_run_on_other_pythons(wheels: Wheels, tmp_path: Path, version: str) -> None:
    """pip installs the wheels on another Python. There a plugin passes a sample of the sizing tier with proofs."""
    found = interpreters(version)
    if not found:
        pytest.skip(f"no Python {version} here")
    commands = tmp_path / "env" / "bin"
    assert run(found[0], "-m", "venv", tmp_path / "env").returncode == 0
    pip, folder = (commands / "python", "-m", "pip", "--quiet", "install"), wheels["draftmark-core"].parent
    for words in ((*JUDGING, "--find-links", folder), ("--no-deps", wheels["draftmark-cuda-triton"])):
        done = started(*pip, *words)
        assert done.returncode == 0, done.stderr[-3000:]
    assert f"Python {version}." in run(commands / "python", "--version").stdout
    assert "cuda_triton" in run(commands / "draftmark", "list").stdout
    judged(commands, "cuda_triton", 1)


def test_vllm_adapter_without_vllm(environment: Environment) -> None:
    """Without vLLM the adapter can be imported and gives vLLM no platform; only its version check raises."""
    commands = environment("draftmark-vllm")
    assert missing(commands, "vllm", "pytest", "draftmark_contract")
    code = "from draftmark_vllm import cpu, versions; assert cpu.platform() is None; versions.VLLM.require()"
    done = run(commands / "python", "-c", code)
    assert "EngineError: vLLM is not installed; pip install 'vllm>=0.26,<0.34'" in done.stderr, done.stderr


def test_judge_is_a_wheel_apart_from_the_adapter(environment: Environment) -> None:
    """vLLM's judge lists backends without the adapter; a judge that is not installed is named in one sentence."""
    commands = environment("draftmark-vllm-judge")
    assert missing(commands, "vllm", "draftmark_vllm", "draftmark_sglang_judge")
    listed = run(commands / "draftmark", "judge")
    assert "vllm:CPU_ATTN" in listed.stdout and "sglang: its judge is not installed" in listed.stdout, listed.stderr
    absent = run(commands / "draftmark", "judge", "sglang:triton")
    sentence = "sglang:triton needs the judge for sglang, which is not installed: pip install draftmark-sglang-judge"
    assert absent.returncode == 2 and sentence in absent.stderr, absent.stderr


@pytest.mark.long
def test_loop_names_the_extra_that_reads_models(environment: Environment) -> None:
    """`draftmark-speculative` without its extra [hf] has torch, and `draftmark generate` names the missing extra."""
    commands = environment("draftmark-speculative")
    assert missing(commands, "transformers", "pytest")
    found = run(commands / "python", "-c", "import importlib.util as u; print(u.find_spec('torch') is not None)")
    assert found.stdout == "True\n", found.stderr
    done = run(commands / "draftmark", "generate", "--prompt", "a")
    assert done.returncode and "pip install 'draftmark-speculative[hf]'" in done.stderr, done.stderr


def test_head_wheel_needs_no_other_package(environment: Environment) -> None:
    """A draft head's wheel contains weights only, so neither torch nor draftmark is installed with it."""
    commands = environment("draftmark-head-smollm2-135m")
    assert missing(commands, "torch", "transformers", "draftmark", "draftmark_speculative")


@pytest.mark.long
def test_head_with_its_extra_is_found_by_its_model(environment: Environment) -> None:
    """With its extra [run], a draft head is found with all its files by the file name of its target model."""
    commands = environment("draftmark-head-smollm2-135m[run]")
    code = "from draftmark_speculative.eagle.installed import installed_head\n"
    code += "print(*sorted(p.name for p in installed_head('SmolLM2-135M-Instruct.Q4_1.gguf').glob('*.*')))"
    done = run(commands / "python", "-c", code)
    assert done.stdout.split() == ["__init__.py", "head.json", "head.safetensors", "py.typed", "training.json"], (
        done.stderr
    )
