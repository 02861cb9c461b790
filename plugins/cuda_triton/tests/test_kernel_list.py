"""`kernel_list`: the list of a geometry's compiled kernels is complete and equals what Triton compiles."""

from __future__ import annotations

import json

import pytest
from triton import knobs

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.launch import launcher

ENGINE_MODES = (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY)
CHAIN = DraftShape(1, 4, 5)


def geometry_of(modes=ENGINE_MODES, draft=CHAIN, max_reqs=48, **shape) -> Geometry:
    """Return a geometry of Llama-8B's attention on an H200; `shape` replaces fields of the attention shape."""
    fields = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16} | shape
    device = DeviceProfile("cuda", 90, 132)
    return Geometry.create(AttentionShape(**fields), Limits(max_reqs, 8192, 4096), draft, device, modes)


def plain(value):
    """Return a value as JSON holds it."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize(
    "geometry",
    [
        geometry_of(),
        geometry_of(kv_dtype="float8_e4m3fn"),
        geometry_of(tuple(Mode), DraftShape(4, 3, 16, 8), page_size=1, sinks=True),
        geometry_of(q_dtype="float32", kv_dtype="float32"),
    ],
    ids=["bfloat16", "e4m3", "every mode", "float32"],
)
def test_listed_kernel_is_what_triton_compiles(fake_gpu, monkeypatch, geometry):
    """For each call, the listed types, constants, alignments and options are those that Triton would compile."""
    compiled = []

    def note(*_, compile, **__):
        compiled.append((compile, json.loads(compile["specialization_data"])["options"]))
        return True  # Triton then compiles nothing

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    count = 0

    def compare(call):
        nonlocal count
        spec, (kernel, args, constants) = kernel_list.spec_of(call, 90), call
        kernel[(1,)](*args, **constants)
        found, options = compiled[-1]
        assert found["signature"] == dict(spec.signature) and found["constants"] == dict(spec.constexprs)
        assert {path: tuple(map(tuple, one)) for path, one in found["configs"][0].items()} == dict(spec.attrs)
        assert plain(dict(spec.options)) == options and options["enable_fp_fusion"]
        count += 1

    with launcher.collect_calls(compare):
        kernel_list.launch_all(geometry, kernel_list.CacheForm(), trees=True)
    assert count == len(compiled) > 20


@pytest.mark.parametrize("name", ["write_kv_rows", "combine_splits"])
def test_listed_kernel_compiles_without_a_driver(monkeypatch, tmp_path, name):
    """A listed kernel compiles to machine code on a computer without a GPU."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    spec = next(one for one in kernel_list.kernels_of(geometry_of(), 90) if one.kernel.__name__ == name)
    assert spec.compile().asm["cubin"].startswith(b"\x7fELF")
