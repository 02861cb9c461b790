"""Tests of the items (checks that are reported one by one) of `draftmark judge` for SGLang's backends."""

from __future__ import annotations

import importlib.util
import pickle

import pytest
import torch

from draftmark.errors import DraftmarkError
from draftmark_contract.judge.rules import rules
from draftmark_sglang_judge import questions
from draftmark_sglang_judge.driver import unpatched
from draftmark_sglang_judge.engine import ENGINE, LEFT_OUT, Backend
from draftmark_sglang_judge.items import _questions
from draftmark_sglang_judge.scheduler_process import _serve
from draftmark_sglang_judge.setups import SETUPS, heads_on

ON = [(info.name, device) for info in ENGINE.targets() for device in info.devices]


@pytest.mark.parametrize(("target", "device"), ON, ids="-".join)
def test_items_use_rules_of_the_contract(target: str, device: str) -> None:
    """For each backend and device, item ids are unique, and each item's rule exists in the contract."""
    items = Backend(target, device).items()
    ids = [item.id for item in items]
    assert items and len(ids) == len(set(ids))
    assert {item.rule for item in items} <= set(rules())


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
@pytest.mark.parametrize("target", ["fa3_mla", "flashmla"])
def test_targets_without_their_device_are_refused(target: str) -> None:
    """Without a GPU, a target with kernels for one is refused with a sentence that names it."""
    with pytest.raises(DraftmarkError, match=rf"torch sees no cuda device here; run sglang:{target} on .* a Hopper"):
        ENGINE.open(target, "cuda")


@pytest.mark.parametrize(("target", "device"), [("triton_mla", "cpu"), ("fa3_mla", "cuda"), ("flashmla", "cuda")])
def test_mla_targets_judge_trees_over_pages(target: str, device: str) -> None:
    """The scenes of MLA layers have draft trees at page sizes 1 and 64, and neither windows nor soft caps.

    On a GPU `fa3_mla` thus answers whether the token slots of a tree reach a cache that is viewed in pages.
    """
    ids = {item.id for item in Backend(target, device).items()}
    trees = {f"numerics.match_float64[{one}-verify-random]" for one in ("page1-tree", "page64-tree")}
    assert trees <= ids and not any("window" in one or "-cap]" in one for one in ids)
    assert heads_on(device, target).value_dim in (256, 512)


def test_questions_exist() -> None:
    """Each item that runs in a scheduler names an existing function of the module `questions`."""
    names = {name for setup in SETUPS.values() for _, _, name, _, _ in _questions(setup, "triton")}
    assert names and all(callable(getattr(questions, name)) for name in names)


def test_gpu_runs_compiled_kernels() -> None:
    """On a GPU, the judge sets no CPU environment variables, and its head shape is one that compiled kernels accept."""
    assert set(ENGINE.environment("fa3", "cuda:0")) == {"OMP_NUM_THREADS", "SGLANG_PLUGINS"}
    assert heads_on("cuda:0", "fa3").dtype == "bfloat16" and heads_on("cpu", "triton").dtype == "float32"


def test_spawned_process_arguments_can_be_pickled() -> None:
    """The arguments of the judge's processes can be pickled, because processes for a GPU are spawned."""
    assert pickle.loads(pickle.dumps((_serve, unpatched))) == (_serve, unpatched)


def test_reasons_name_modules_of_rules() -> None:
    """Each key of `LEFT_OUT`, the reasons for rules that are not judged, is the module name of a contract rule."""
    assert set(LEFT_OUT) <= {name.partition(".")[0] for name in rules()}


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_targets_are_listed_without_sglang() -> None:
    """Without SGLang, the engine lists its targets and has no version."""
    assert ENGINE.version() is None and len(ENGINE.targets()) == 14
