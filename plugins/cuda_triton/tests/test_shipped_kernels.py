"""The wheel of compiled kernels: what it has, and that a first start with it compiles nothing."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
import zipfile

import pytest
from triton import knobs

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.compiled import folder, loading, prepare
from draftmark_cuda_triton.launch import launcher
from plugins.cuda_triton.tools import cubins, shipped
from tools.release import sums
from tools.release.distributions import Distribution, faults


@pytest.fixture(scope="module")
def small_geometry() -> Geometry:
    """A decode geometry of few kernels."""
    limits, device = Limits(4, 512), DeviceProfile("cuda", 90, 132)
    return Geometry.create(AttentionShape(8, 2, 64, 16), limits, device=device, modes=(Mode.DECODE,))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, small_geometry):
    """Wheel with every kernel of the small geometry, built by the release tool."""
    scratch = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DISABLE_LINE_INFO", "0")
        patch.setattr(cubins, "geometries", lambda archs, models: [small_geometry])
        sources = cubins.kernel_sources([90], [])
        assert cubins.compile_into(scratch / "kernels", sources, 2) == 0
    return cubins.build_wheel(scratch / "kernels", scratch / "dist", scratch)


@pytest.fixture
def empty_environment(tmp_path, monkeypatch):
    """Process with empty caches, and counts that start at zero. Every compilation is a failure."""
    monkeypatch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **_: pytest.fail("compiled in this process"))
    monkeypatch.setattr(prepare, "compile_all", lambda *_: pytest.fail("compiled in other processes"))
    for name, value in vars(loading.Counts()).items():
        monkeypatch.setattr(loading.COUNTS, name, value)
    yield tmp_path
    sys.modules.pop(folder.SHIPPED, None)


@pytest.mark.long
def test_first_start_with_the_wheel_compiles_nothing(fake_gpu, wheel, small_geometry, empty_environment, monkeypatch):
    """In an empty environment, opening finds and loads every kernel of the geometry from the installed wheel."""
    zipfile.ZipFile(wheel).extractall(empty_environment / "site")
    monkeypatch.syspath_prepend(str(empty_environment / "site"))
    monkeypatch.setattr(launcher, "use_store", loading.use_store)
    importlib.invalidate_caches()
    folder._open.cache_clear()
    specs = kernel_list.kernels_of(small_geometry, trees=False)
    prepare._prepare(small_geometry, trees=False)
    assert loading.Counts(loaded=len(specs), prepared=True) == loading.COUNTS and len(specs) > 3
    assert len(launcher.LAUNCHER.compiled) == len(specs)
    found = prepare.store_kernels(specs)
    assert found.compiled == 0 and found.shipped == found.kernels == len(specs)
    assert not list((empty_environment / "cache").rglob("*.cubin")), "shipped kernels were copied"


@pytest.mark.long
def test_wheel_serves_no_other_kernel(wheel, small_geometry, tmp_path, monkeypatch):
    """A kernel of another architecture is not in the wheel."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    other = kernel_list.kernels_of(small_geometry, arch=80, trees=False)
    store = folder.Store(tmp_path / "none", (tmp_path / "site" / folder.SHIPPED / "kernels",))
    sources = [cubins.KernelSource.of(spec.source(), spec.target, dict(spec.options)) for spec in other]
    assert [store.find(one) for one in sources] == [None] * len(sources)


@pytest.mark.long
def test_wheel_has_code_without_line_information(wheel):
    """The wheel has machine code and metadata only, and the code has no paths of source files."""
    with zipfile.ZipFile(wheel) as archive:
        kernels = [name for name in archive.namelist() if "/kernels/" in name]
        assert {name.rpartition(".")[2] for name in kernels} == {"cubin", "json"}
        code = b"".join(archive.read(name) for name in kernels if name.endswith(".cubin"))
    assert code and b"draftmark_cuda_triton/kernels" not in code


def test_wheel_can_be_published():
    """The project of the wheel has what every distribution of a release has."""
    project = tomllib.loads((cubins.PROJECT / "pyproject.toml").read_text())["project"]
    assert faults(Distribution(cubins.PROJECT, project)) == []


def test_wheel_has_the_repository_and_a_bill_of_materials(tmp_path):
    """The variable that fills the URLs of other wheels fills this one's; its SBOM and checksums stand next to it."""
    (tmp_path / "kernels").mkdir()
    built = cubins.build_wheel(tmp_path / "kernels", tmp_path / "dist", tmp_path, "https://example.org/draftmark")
    cubins.write_bill(tmp_path / "dist")
    sums.write_sums(tmp_path / "dist")
    with zipfile.ZipFile(built) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(path).decode()
    assert "Repository, https://example.org/draftmark\n" in text and "repository.invalid" not in text
    names = {line.split()[1] for line in (tmp_path / "dist" / sums.NAME).read_text().splitlines()}
    assert names == {built.name, "draftmark-cuda-triton-cubin.cdx.json"}
    content = json.loads((tmp_path / "dist" / "draftmark-cuda-triton-cubin.cdx.json").read_text())
    assert {"draftmark-cuda-triton", "triton"} <= {one["name"] for one in content["components"]}


def test_shipped_geometries_are_those_of_the_engines():
    """The table covers every architecture and model, engine forms included, and skips e4m3 where a GPU lacks it."""
    found = list(shipped.geometries([80, 90], ["llama-8b, qwen3-8b"]))
    assert {one.device.arch for one in found} == {80, 90}
    assert {one.attention.kv_dtype for one in found if one.device.arch == 80} == {"bfloat16"}
    assert {one.attention.num_kv_heads for one in found} == {8, 4, 2, 1}
    draft = DraftShape(num_draft_tokens=5)
    assert any(one.draft == draft and Mode.RAGGED_VERIFY in one.modes and len(one.forms) == 3 for one in found)


def test_shipped_geometries_have_latent_models():
    """DeepSeek V3 with 8 and 16 ranks and Kimi K2 with 8 have geometries in the adapters' forms, and kernels."""
    found = [one for one in shipped.geometries([80, 90], list(shipped.LATENT)) if one.device.num_sms in (108, 132)]
    assert all(one.attention.latent and one.forms == shipped.LATENT_FORMS for one in found)
    assert {one.attention.num_qo_heads for one in found} == {16, 8}
    # Heads, page sizes and drafts, in two KV dtypes on sm_90 and in one on sm_80.
    assert len(found) == 2 * 2 * 2 * (2 + 1)
    kernels = kernel_list.kernels_of(found[0], trees=False)
    assert len(kernels) == 8 and found[0].modes == (Mode.EXTEND, Mode.DECODE)
