"""Tests of the check that runs before the import of torch_npu, because the import can end the process."""

import subprocess
import sys
from pathlib import Path

CHECK = "from draftmark_ascend_npu import runtime"


def torch_folder(root: Path, version: str, cuda: bool) -> Path:
    """Make a torch package folder with the files that the check reads."""
    folder = root / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda = {'13.0' if cuda else None!r}\n")
    (folder / "lib" / ("libc10_cuda.so" if cuda else "libc10.so")).touch()
    (folder / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    return folder


def run(program: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds torch and torch_npu below `root` first."""
    (root / "torch_npu").mkdir(exist_ok=True)
    (root / "torch_npu" / "__init__.py").write_text("import os; os.abort()  # as with a CUDA build\n")
    preface = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    return subprocess.run([sys.executable, "-c", preface + program], capture_output=True, text=True)


def test_cuda_build_is_refused_before_the_import(tmp_path):
    """With a CUDA build of torch the import raises with the pip command, and neither package is imported."""
    torch_folder(tmp_path, "2.14.0+cu130", cuda=True)
    done = run(f"try:\n    {CHECK}\nexcept ImportError as error:\n    print(error)", tmp_path)
    assert done.returncode == 0, done.stderr
    command = "pip install --force-reinstall --no-deps torch==2.14.0 --index-url https://download.pytorch.org/whl/cpu"
    assert "torch 2.14.0+cu130 is a CUDA build" in done.stdout and command in done.stdout


def test_without_a_cuda_build_torch_npu_is_imported(tmp_path):
    """With a CPU build of torch, torch_npu is imported. In this test torch_npu is a substitute that aborts."""
    torch_folder(tmp_path, "2.14.0+cpu", cuda=False)
    assert run(CHECK, tmp_path).returncode == -6


def test_loader_reports_the_cuda_build(tmp_path):
    """With a CUDA build of torch, loading the backend raises an error with the cause and the pip command."""
    folder = torch_folder(tmp_path, "2.13.0+cu130", cuda=True)
    (folder / "__init__.py").write_text("def device(kind):\n    raise RuntimeError('no such device')\n")
    opening = "from draftmark.registry import load\ntry:\n    load('ascend_npu').require_runtime('npu')\n"
    done = run(opening + "except Exception as error:\n    print(error)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "vendor runtime absent" in done.stdout and "torch 2.13.0+cu130 is a CUDA build" in done.stdout
