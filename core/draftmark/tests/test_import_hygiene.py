"""Cost of `import draftmark`, and functions that work without torch."""

from __future__ import annotations

import pytest

COUNT_IMPORTS = """
import sys
before = set(sys.modules)
import draftmark
print(len(set(sys.modules) - before))
print(sorted({"torch", "pluggy", "numpy", "importlib.metadata", "rich"} & set(sys.modules)))
"""

SIZE_SNIPPET = """
import sys
import draftmark
from draftmark import AttentionShape, DRAFT_MODES, DraftShape, Geometry, Limits
geometry = Geometry.create(AttentionShape(8, 2, 128, 16), Limits(4, 1024), DraftShape(2, 3, 4), modes=DRAFT_MODES)
backend = draftmark.load("reference")
print(*[row.name for row in draftmark.available()])
print([(spec.name, spec.nbytes) for spec in backend.buffers(geometry)])
print(backend.requirements(geometry).host_lengths.value, backend.supports(geometry))
backend.require(geometry)
print("torch" in sys.modules)
"""


@pytest.fixture
def broken_torch(tmp_path):
    """Return a folder with a torch that raises on import, like torch-npu without CANN."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    return tmp_path


def test_import_is_quick_and_imports_no_dependency(run_python):
    """`import draftmark` loads fewer than 80 modules, standard library included, and no torch, pluggy or rich."""
    done = run_python(COUNT_IMPORTS)
    assert done.returncode == 0, done.err
    count, heavy = done.out.splitlines()
    assert (int(count) < 80, heavy) == (True, "[]"), done.out


def test_listing_and_sizing_work_with_a_broken_torch(run_python, broken_torch):
    """available(), load, supports, buffers, requirements and require do not import torch."""
    assert run_python("import torch", broken_torch).returncode != 0
    done = run_python(SIZE_SNIPPET, broken_torch)
    assert done.returncode == 0, done.err
    names, buffers, requirements, torch_seen = done.out.splitlines()
    assert "reference" in names.split()
    assert buffers == "[('kv_lens', 16), ('slot_mapping', 16384)]"
    assert requirements == "none []"
    assert torch_seen == "False"


def test_state_sizes_work_with_a_broken_torch(run_python, broken_torch):
    """`draftmark size --state` with a backend, and the state hooks, do not import torch."""
    snippet = (
        "from draftmark_tools.cli import main\n"
        "argv = ['size', 'reference', '--state', 'qwen3-next', '--json']\n"
        "code = main(argv)\nimport sys\nprint(code, 'torch' in sys.modules)\n"
    )
    done = run_python(snippet, broken_torch)
    assert done.returncode == 0, done.err
    assert done.out.splitlines()[-1] == "0 False"


def test_open_with_a_broken_torch_raises_a_load_error(run_python, broken_torch):
    """open() without a working torch raises a BackendLoadError with the cause, not a bare ImportError."""
    snippet = SIZE_SNIPPET + (
        "from draftmark.errors import BackendLoadError\n"
        "try:\n    backend.open(geometry, 'cpu')\n"
        "except BackendLoadError as error:\n    print(error.failure.value, '|', error)\n"
    )
    done = run_python(snippet, broken_torch)
    assert done.returncode == 0, done.err
    assert "libhccl.so" in done.out.splitlines()[-1]


def test_every_public_name_resolves(run_python):
    """Each name in __all__ exists, lazy ones included, and an unknown name raises AttributeError."""
    snippet = (
        "import draftmark\n"
        "assert not [n for n in draftmark.__all__ if getattr(draftmark, n) is None]\n"
        "try:\n    draftmark.nothing\nexcept AttributeError as error:\n    print(error)\n"
        "import sys; print('torch' in sys.modules)\n"
    )
    done = run_python(snippet)
    assert done.returncode == 0, done.err
    assert done.out.splitlines() == ["module 'draftmark' has no attribute 'nothing'", "False"]
