"""Build the wheel draftmark-cuda-triton-cubin: kernels of common GPUs and models, compiled without a GPU.

    python -m plugins.cuda_triton.tools.cubins --out dist [--arch 90,100] [--model llama-8b] [--keep FOLDER]

The wheel has kernels of the installed Triton. `--keep` compiles into a folder that later runs extend, for example under
another Triton, so that one wheel serves several versions. `--list` only counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftmark_cuda_triton.compiled.pool import compile_all
from draftmark_cuda_triton.compiled.source import LINE_INFO, KernelSource
from draftmark_cuda_triton.compiled.store import Store
from draftmark_cuda_triton.kernel_list import kernels_of
from tools.release.bill import bill, installed
from tools.release.distributions import distributions, read
from tools.release.publisher import PLACEHOLDER, urls
from tools.release.sums import write_sums
from tools.release.wheel import release_copy

from .shipped import GPUS, HEADS, LATENT, geometries

PROJECT = Path(__file__).resolve().parents[1] / "cubin"
KERNELS = Path("src/draftmark_cuda_triton_cubin/kernels")


def main(arguments: list[str] | None = None) -> int:
    """Compile the kernels and build the wheel; return 1 if a kernel did not compile."""
    parser = argparse.ArgumentParser(prog="cubins", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel")
    parser.add_argument("--arch", default=",".join(map(str, GPUS)), help="architectures, separated by commas")
    parser.add_argument("--model", default="", help="part of a name in `shipped.HEADS` or LATENT; default: every model")
    parser.add_argument("--keep", type=Path, help="folder of compiled kernels; default: a temporary folder")
    parser.add_argument("--processes", type=int, help="compiling processes; default: one for each CPU")
    parser.add_argument(
        "--repository", default=PLACEHOLDER, help="https URL of the repository, in the wheel's metadata"
    )
    parser.add_argument("--list", action="store_true", help="count the kernels, and build nothing")
    given = parser.parse_args(arguments)
    archs, models = (
        [int(one) for one in given.arch.split(",")],
        [name for name in (*HEADS, *LATENT) if given.model in name],
    )
    urls(given.repository)  # a wrong URL fails here, not after the compilation
    sources = kernel_sources(archs, models)
    for arch in archs:
        print(f"sm_{arch}: {sum(one.arch == arch for one in sources)} kernels", flush=True)
    if given.list:
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "kernels"
        failed = compile_into(folder, sources, given.processes)
        wheel = build_wheel(folder, given.out, Path(scratch), given.repository)
    write_bill(given.out)
    write_sums(given.out)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, {failed} kernels failed")
    return int(failed > 0)


def kernel_sources(archs: list[int], models: list[str]) -> list[KernelSource]:
    """Return every kernel of the shipped geometries, without duplicates."""
    specs = dict.fromkeys(spec for one in geometries(archs, models) for spec in kernels_of(one))
    made = (KernelSource.of(spec.source(), spec.target, dict(spec.options)) for spec in specs)
    return list({one.key: one for one in made}.values())


def compile_into(folder: Path, sources: list[KernelSource], processes: int | None) -> int:
    """Compile the kernels that a folder lacks, without line information, and return the number that failed."""
    os.environ[LINE_INFO] = "1"
    store, start = Store(folder), time.perf_counter()
    missing = [one for one in sources if store.find(one) is None]
    results = compile_all(missing, store, _show, processes)
    for one in results:
        if one.error:
            print(f"{one.name}: {one.error}", file=sys.stderr)
    seconds = sum(one.seconds for one in results)
    print(f"{len(results)} kernels in {time.perf_counter() - start:.0f} s, {seconds:.0f} s of compilation")
    return sum(bool(one.error) for one in results)


def build_wheel(folder: Path, out: Path, scratch: Path, repository: str = PLACEHOLDER) -> Path:
    """Build the wheel with the kernels of `folder`, from a copy of the project, and return its path."""
    copy = release_copy(read(PROJECT / "pyproject.toml"), scratch / "project", repository)
    shutil.copytree(folder, copy / KERNELS, ignore=shutil.ignore_patterns(".*", "host"))
    command = ("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    subprocess.run([sys.executable, *command, "--wheel-dir", str(scratch / "wheel"), str(copy)], check=True)
    [built] = (scratch / "wheel").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(built, out))


def write_bill(out: Path) -> None:
    """Write the wheel's SBOM into `out`, with the versions of this environment."""
    one = read(PROJECT / "pyproject.toml")
    text = bill(one, [*distributions(), one], installed(Path(sys.prefix)))
    (out / f"{one.name}.cdx.json").write_text(text, encoding="utf-8")


def _show(done: int, count: int, kernel: str) -> None:
    print(f"{done} of {count} kernels compiled: {kernel}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
