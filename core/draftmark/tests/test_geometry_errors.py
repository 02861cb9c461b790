"""Invalid geometries raise one GeometryError with the field, the value, the limit and the remedy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from draftmark import DraftmarkError, Geometry
from draftmark.errors import GeometryError

NAN, INF = math.nan, math.inf

INVALID = [
    *[("attention." + name, value) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
      for value in (0, -1, True, 1.0, "8", None, 2**31)],
    ("attention.window_left", 2**31),
    ("attention.logits_soft_cap", 10**400),
    *[("attention.sinks", value) for value in (None, 1, "yes")],
    *[("limits.batch_invariant", value) for value in (None, 1, "yes")],
    ("limits.max_num_reqs", 2**31),
    ("limits.capture_batch_sizes", (2**31,)),
    *[("device.arch", value) for value in (-1, "90", 90.0, NAN, None)],
    *[("device.kind", value) for value in ("", None, 3)],
    *[("modes", value) for value in (3, "decode")],
    ("attention.num_qo_heads", 3),
    ("attention.q_dtype", "float64"),
    ("attention.q_dtype", None),
    ("attention.q_dtype", "float8_e4m3fn"),
    ("attention.kv_dtype", "int8"),
    ("attention.kv_dtype", 4),
    *[("attention.softmax_scale", value) for value in (0.0, -1.0, NAN, INF, "0.5")],
    *[("attention.window_left", value) for value in (-2, -100, 1.5, False, None)],
    *[("attention.logits_soft_cap", value) for value in (-1.0, NAN, INF, None)],
    *[("draft." + name, value) for name in ("topk", "num_steps", "num_draft_tokens")
      for value in (0, -3, True, 2.0, 2**31)],
    *[("limits." + name, value) for name in ("max_num_reqs", "max_context_len", "max_extend_tokens")
      for value in (0, -1, True, "many")],
    ("limits.max_context_len", 2**31),
    ("limits.capture_batch_sizes", (4, 0)),
    ("limits.capture_batch_sizes", (True,)),
    ("limits.capture_batch_sizes", 8),
    *[("limits.overlap", value) for value in (2, "yes", None)],
    *[("device.num_sms", value) for value in (0, -1, 1.5)],
    ("modes", ()),
    ("modes", ("decode",)),
    ("modes", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), INVALID, ids=[f"{field}={value!r}" for field, value in INVALID])
def test_an_invalid_field_raises_value_limit_and_remedy(make_geometry, field, value):
    """Each invalid field raises GeometryError with the text `field is value, but limit; remedy`, on one line."""
    with pytest.raises(GeometryError) as caught:
        make_geometry(**{field.split(".")[-1]: value})
    error, text = caught.value, str(caught.value)
    assert error.field == field
    assert text.startswith(f"{field} is ")
    limit, remedy = text.removeprefix(f"{field} is ").split("; ", 1)
    assert " but " in limit and len(remedy) > 8, text
    assert "\n" not in text
    assert isinstance(error, DraftmarkError) and isinstance(error, ValueError)


@pytest.mark.parametrize("value", [3, "a", [1], None])
@pytest.mark.parametrize("part", ["attention", "limits", "draft", "device"])
def test_a_part_of_another_type_is_named(make_geometry, part, value):
    """create() refuses a value of another type for attention, limits, draft or device, and names that argument.

    None is accepted for draft and device, and selects the default.
    """
    geometry = make_geometry()
    parts = {name: getattr(geometry, name) for name in ("attention", "limits", "draft", "device")} | {part: value}
    if value is None and part in ("draft", "device"):
        Geometry.create(**parts)
        return
    with pytest.raises(GeometryError, match=f"^{part} is .* but it must be an instance of ") as caught:
        Geometry.create(**parts)
    assert caught.value.field == part


def test_the_error_contains_the_value(make_geometry):
    """The message and the attribute `value` contain the invalid value."""
    with pytest.raises(GeometryError, match=r"attention\.page_size is -7, but it must be >= 1") as caught:
        make_geometry(page_size=-7)
    assert caught.value.value == -7


def test_indivisible_heads_name_both_counts(make_geometry):
    """The error for 32 query heads over 5 KV heads contains both numbers."""
    with pytest.raises(GeometryError, match=r"num_qo_heads is 32.*num_kv_heads = 5"):
        make_geometry(num_qo_heads=32, num_kv_heads=5)


def test_positions_above_int32_are_refused_with_the_tail(make_geometry):
    """A context that fits int32 only without its tail is refused; a context shorter by 3 · max_tail is accepted."""
    make_geometry(max_context_len=2**31 - 1 - 3 * 8, num_draft_tokens=8)
    with pytest.raises(GeometryError, match="int32"):
        make_geometry(max_context_len=2**31 - 8, num_draft_tokens=8)


@pytest.mark.parametrize("value", [0.0, 30.0, 50])
def test_a_soft_cap_of_zero_or_more_is_accepted(make_geometry, value):
    """A soft cap of 0 (none) or more is accepted, also as an integer."""
    assert make_geometry(logits_soft_cap=value).attention.logits_soft_cap == value


def test_only_the_first_bad_field_is_reported(make_geometry):
    """A geometry with two invalid fields raises one error, for the first field."""
    with pytest.raises(GeometryError) as caught:
        make_geometry(topk=0, page_size=0)
    assert caught.value.field == "attention.page_size"


def test_a_geometry_is_immutable_and_hashable(make_geometry):
    """Geometries with equal fields have equal hashes; a change makes a new object."""
    geometry = make_geometry()
    assert hash(geometry) == hash(make_geometry())
    with pytest.raises(AttributeError):
        geometry.modes = ()
    assert replace(geometry, modes=geometry.modes[:1]) != geometry
