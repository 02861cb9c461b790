"""Older names of the items of an engine's layer; see `runner.item`."""

from __future__ import annotations

from ..check import Refused, Unjudged
from ..runner.item import Item as Item
from ..runner.item import item_of as item_of

NotServed, NotAsked = Refused, Unjudged
