"""Fields of a Hugging Face configuration: an object of transformers, or config.json as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmark.errors import GeometryError
from draftmark.geometry.checks import INT32_MAX


def field_of(config: object, name: str) -> Any:
    """Return a field, or None if the configuration has none of that name."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception as error:  # transformers raises its own type for a field that differs between layers
        limit = f"reading it raised {type(error).__name__}"
        remedy = "pass the configuration of one layer, config.per_layer_config[i]"
        raise GeometryError(f"config.{name}", type(config).__name__, limit, remedy) from error


def integer_of(config: object, name: str, least: int) -> int:
    """Return an integer field.

    Raises:
        GeometryError: the field is absent, or no integer of `least` or more.
    """
    value = field_of(config, name)
    if type(value) is not int or not least <= value <= INT32_MAX:
        limit = f"it must be an integer of {least} or more"
        raise GeometryError(f"config.{name}", value, limit, "use the config.json of the weights")
    return value
