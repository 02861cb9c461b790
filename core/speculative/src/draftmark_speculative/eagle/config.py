"""Configuration of a draft head: the content of its head.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftmark import ModelError

from ..arguments import LARGEST, is_count, is_number

FORMAT = "draftmark-eagle-head/1"
"""Value of the key "format" in head.json."""


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head. hidden_size and vocab_size must equal the target's.

    Attributes:
        hidden_size: width of the target's hidden states, of its token embedding and of its output layer.
        vocab_size: size of the target's vocabulary.
        num_attention_heads, num_key_value_heads, head_dim: shape of the head's own attention layer; head_dim is even.
        intermediate_size: width of the head's own SwiGLU layer.
        feature_layers: hidden states of the target that the head reads, ascending, counted as transformers'
            ``output_hidden_states``: 0 is the embedding, i the output of the first i decoder layers, and
            num_hidden_layers the output of the final norm. At least one (EAGLE-3 reads three).
        draft_vocab_size: number of tokens that the head can draft, listed in its `d2t` tensor; None means all.
        rope_theta: base of the head's rotary embedding, which rotates the whole head_dim.
        rms_norm_eps: epsilon of every norm.
        target: name of the model that the head was trained for; used in messages only.
    """

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    feature_layers: tuple[int, ...]
    draft_vocab_size: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    target: str = ""

    def __post_init__(self) -> None:
        self._check_types()
        for name in (
            *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            "intermediate_size",
        ):
            _at_least_one(name, getattr(self, name))
        if self.draft_vocab_size is not None:
            _at_least_one("draft_vocab_size", self.draft_vocab_size)
            if self.draft_vocab_size > self.vocab_size:
                raise ModelError(
                    f"the head's draft_vocab_size is {self.draft_vocab_size}, but the target's vocabulary has "
                    f"{self.vocab_size} tokens; leave it out for all of them"
                )
        if self.head_dim % 2:
            raise ModelError(f"the head's head_dim is {self.head_dim}, but rotary embedding needs it even; round it up")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"the head has {self.num_attention_heads} query heads for {self.num_key_value_heads} KV heads, but one "
                "count must be a multiple of the other; use grouped-query counts"
            )
        layers = self.feature_layers
        counts = bool(layers) and all(is_count(layer) for layer in layers)
        if not counts or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ModelError(
                f"the head's feature_layers are {list(layers)}, but it needs at least one, distinct and ascending from "
                "0; count them as transformers' output_hidden_states does"
            )

    def _check_types(self) -> None:
        """Convert lists (from JSON) to tuples, and reject values of a wrong type before torch uses them."""
        if not isinstance(self.feature_layers, tuple | list):
            raise ModelError(
                f"the head's feature_layers are {self.feature_layers!r}, but they must be a list of layers; write [0]"
            )
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        for name, least in (("rope_theta", "> 0"), ("rms_norm_eps", ">= 0")):
            value = getattr(self, name)
            if not is_number(value) or value < 0 or (value == 0 and name == "rope_theta"):
                raise ModelError(
                    f"the head's {name} is {value!r}, but it must be a finite number {least}; take it from the target"
                )
            object.__setattr__(self, name, float(value))
        if not isinstance(self.target, str):
            raise ModelError(f"the head's target is {self.target!r}, but it must be a model's name; write it as text")

    @property
    def num_features(self) -> int:
        """Number of the target's hidden states that one row reads."""
        return len(self.feature_layers)

    def save(self, folder: Path) -> None:
        """Write head.json into `folder`."""
        content = {"format": FORMAT, **asdict(self)}
        (folder / "head.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> HeadConfig:
        """Read head.json from `folder`.

        Raises:
            ModelError: the file is absent, is not JSON, has another format, or has missing or unknown fields.
        """
        file = folder / "head.json"
        if not file.is_file():
            raise ModelError(f"{folder} is not a draft head: it has no head.json; name a folder from DraftHead.save")
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{file} is not JSON ({error}); save the head again") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ModelError(f"{file} does not have format {FORMAT!r}; save the head with this version of draftmark")
        unknown = sorted(set(content) - {field.name for field in fields(cls)})
        try:
            return cls(**content)
        except TypeError as error:
            why = f"unknown fields {', '.join(unknown)}" if unknown else str(error).partition("() ")[2]
            raise ModelError(f"{file} does not describe a head ({why}); save the head again") from None


def _at_least_one(name: str, value: object) -> None:
    if not is_count(value) or not 1 <= value <= LARGEST:  # type: ignore[operator]
        raise ModelError(
            f"the head's {name} is {value!r}, but it must be an integer of 1 … {LARGEST}; take it from the target"
        )
