"""Tests of the data that describes a failing batch, and of the drawing made from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pages import wrong_cells

from draftmark.geometry import Mode
from draftmark_contract.cases.forwards import ForwardCase, ragged, uniform
from draftmark_contract.cases.geometries import all_shapes
from draftmark_contract.check import ContractViolation, TooSmall, Wrong
from draftmark_contract.failing_batch import MOST_REQUESTS, MOST_SLOTS, drawing
from draftmark_contract.oracle.history import kv_slots
from draftmark_contract.oracle.truth import enumerate_truth
from draftmark_contract.page.batch import figure
from draftmark_contract.runner.item import all_items
from draftmark_contract.sizing.batches import BatchShape, Group

GEOMETRY = next(one.geometry for one in all_shapes() if one.name == "target-page128")
PAGE = GEOMETRY.attention.page_size


def _verify(tree: str = "deep") -> ForwardCase:
    """Return a verify step of two live requests and one padding request."""
    return uniform("verify", GEOMETRY, Mode.VERIFY, (130, 3), 3, tree=tree)


def _drawn(forward: object, wrong: Wrong) -> dict[str, Any]:
    """Return the data of a violation's drawing, and check that JSON can store it."""
    found = drawing(ContractViolation("wrong", batch=forward, wrong=wrong))
    assert found is not None and json.loads(json.dumps(found)) == found
    return found


def test_wrong_outputs_are_marked_at_their_rows() -> None:
    """The drawing counts each request's wrong rows; it shows the first request that has any, and marks its rows."""
    found = _drawn(_verify(), Wrong("output", [(1, 2), (1, 4)]))
    assert [one["wrong"] for one in found["requests"]] == [0, 2, 0]
    assert [one["live"] for one in found["requests"]] == [True, True, False]
    assert found["full"]["number"] == 1
    assert [line["row"] for line in found["full"]["lines"] if line["wrong"]] == [2, 4]
    assert wrong_cells(figure(found)) == ["row 2: wrong output", "row 4: wrong output"]


def test_rows_see_the_keys_of_the_oracle() -> None:
    """Each drawn row lists the tail slots and the number of prefix tokens that the oracle lets the row see."""
    forward = _verify("random")
    truth = enumerate_truth(forward.requests, PAGE, GEOMETRY.attention.window_left)
    request, lines = forward.requests[0], _drawn(forward, Wrong("output", [(0, 1)]))["full"]["lines"]
    slots = kv_slots(request, PAGE)
    for line in lines:
        tail = {slots[request.prefix + at] for at, bit in enumerate(line["keys"]) if bit == "1"}
        assert tail == set(truth.visible[0, line["row"]]) - set(slots[: request.prefix])
        assert line["prefix_keys"] == len(set(truth.visible[0, line["row"]]) & set(slots[: request.prefix]))


def test_missing_and_extra_keys_are_marked_in_the_matrix() -> None:
    """Missing and extra tail slots, missing prefix tokens, and keys of another request each have their own mark."""
    forward = _verify()
    first, second = (kv_slots(one, PAGE) for one in forward.requests[:2])
    wrong = Wrong("keys", [(0, 2)], missing=[first[130], first[7], first[8]], extra=[first[134], second[1], 10**9])
    found = _drawn(forward, wrong)
    assert wrong_cells(figure(found)) == [
        "row 2: 130 of 130 prefix tokens are visible; 2 missing, 0 extra",
        "row 2, slot 0: missing key",
        "row 2, slot 4: extra key",
    ]
    assert found["elsewhere"] == [
        f"KV slot {second[1]}: token 1 of request 1",
        f"KV slot {10**9}: owned by no request",
    ]


def test_a_drawing_stays_small() -> None:
    """For a prefill of 900 rows in 40 requests, the drawing shows only requests and tail slots near the wrong row."""
    forward = ragged("extend", GEOMETRY, [5] * 40, [900] * 40)
    found = _drawn(forward, Wrong("output", [(33, 700)]))
    assert len(found["requests"]) == MOST_REQUESTS and found["hidden"] == 32
    assert 33 in [one["number"] for one in found["requests"]]
    full = found["full"]
    assert len(full["lines"]) == MOST_SLOTS and full["first"] <= 700 < full["first"] + MOST_SLOTS
    assert wrong_cells(figure(found)) == ["row 700: wrong output"]
    assert len(json.dumps(found)) < 4000


def test_a_small_buffer_is_drawn_as_two_bars() -> None:
    """If a buffer is too small, the drawing shows its declared and its needed size as two bars."""
    batch = BatchShape(Mode.EXTEND, 0, (Group(13, 0, 3, 3), Group(0, 0, 0, 0)))
    found = drawing(ContractViolation("small", batch="text", wrong=TooSmall(batch, "slots", 33, 39, "entries")))
    assert found is not None and found["groups"] == [{"count": 13, "prefix": 0, "rows": 3, "tail": 3}]
    assert wrong_cells(figure(found)) == ["too few entries: 6"]
    assert "13 requests with a prefix of 0, 3 rows and 3 tail slots" in figure(found)


def test_an_error_is_drawn_with_the_batch_that_ran() -> None:
    """If an exception has no batch, the drawing shows the current batch without marks; a geometry has no drawing."""
    found = drawing(RuntimeError("a kernel's own words"), _verify())
    assert found is not None and wrong_cells(figure(found)) == []
    assert drawing(RuntimeError("no batch"), GEOMETRY) is None
    assert drawing(ContractViolation("in words", batch="r0: L=3")) is None


@pytest.mark.parametrize("part", range(4))
def test_every_batch_of_the_suite_can_be_drawn(part: int) -> None:
    """The batch of every eighth item can be drawn in at most 4 KB, and its last live row is marked."""
    drawn = 0
    for item in all_items()[part::32]:
        value = item.case.value
        for one in value if isinstance(value, (list, tuple)) else [value]:
            forward = getattr(one, "forward", one)
            if isinstance(forward, ForwardCase) and forward.live_rows:
                found = _drawn(one, Wrong("output", [forward.rows[forward.live_rows - 1]]))
                assert len(json.dumps(found)) < 4000 and len(wrong_cells(figure(found))) == 1, item.id
                drawn += 1
    assert drawn > 20
