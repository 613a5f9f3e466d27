"""What a T5 is made of: sizes, activation, tied head, special tokens.

Knows the keys of a Hugging Face `config.json` and both ways T5 has been published (v1.0: relu and a
tied, scaled head; v1.1 and Flan: gated gelu and a head of its own). Imports nothing heavy, so that
a login node can check a pipeline's model section.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
DTYPES = ("float32", "bfloat16")
# What transformers means by these two names in T5: the tanh approximation only when gated.
_ACTIVATION_BY_NAME = {"gated-gelu": "gelu_new", "swish": "silu", "gated-swish": "silu"}


@dataclass(frozen=True)
class T5Config:
    """A T5's shape and constants; the names are those of Hugging Face's `config.json`.

    `dtype` (what products are computed in; parameters stay float32) and `remat` (recompute each
    layer in the backward pass) are how it is computed, not what it is.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = 0  # 0: as many as num_layers
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None  # None: scaled exactly when the head is tied
    pad_token_id: int = 0
    eos_token_id: int = 1
    decoder_start_token_id: int = 0
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        if not self.num_decoder_layers:
            object.__setattr__(self, "num_decoder_layers", self.num_layers)
        if self.scale_decoder_outputs is None:
            object.__setattr__(self, "scale_decoder_outputs", self.tie_word_embeddings)
        for problem in self._problems():
            raise ValueError(f"T5 config: {problem}")

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any], **computed: Any) -> T5Config:
        """Read a `config.json`'s content; keys that do not shape a T5 are left alone.

        Args:
            values: the parsed file.
            computed: fields that no `config.json` has, such as `dtype` and `remat`.

        Raises:
            ValueError: not a T5, or a value that no T5 can have.
        """
        model_type = values.get("model_type", "t5")
        if model_type != "t5":
            raise ValueError(f"config.json has model_type {model_type!r}; this model reads 't5'.")
        known = {field.name for field in dataclasses.fields(cls)} - {"dtype", "remat"}
        kept = {key: value for key, value in values.items() if key in known and value is not None}
        eos = kept.get("eos_token_id")
        if isinstance(eos, list | tuple) and len(eos) == 1:
            kept["eos_token_id"] = eos[0]
        return cls(**kept, **computed)

    def updated(self, values: Mapping[str, Any]) -> T5Config:
        """Return a copy with `values` in place; fields that follow others follow the new ones.

        Raises:
            ValueError: a key that is no field (the message names the nearest), or a bad value.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}" if near else ""
                raise ValueError(
                    f"T5 config has no key {key!r}{hint}? Known keys: {', '.join(known)}."
                    if near
                    else f"T5 config has no key {key!r}. Known keys: {', '.join(known)}."
                )
        changed = dict(values)
        if "num_layers" in changed and self.num_decoder_layers == self.num_layers:
            changed.setdefault("num_decoder_layers", 0)
        if "tie_word_embeddings" in changed:
            changed.setdefault("scale_decoder_outputs", None)
        return dataclasses.replace(self, **changed)

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the `config.json` that transformers reads as this same model."""
        values = dataclasses.asdict(self)
        for key in ("dtype", "remat"):
            del values[key]
        if self.scale_decoder_outputs == self.tie_word_embeddings:
            del values["scale_decoder_outputs"]
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            **values,
        }

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer multiplies two projections."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS."""
        name = self.feed_forward_proj
        return _ACTIVATION_BY_NAME.get(name, name.removeprefix("gated-"))

    def _problems(self) -> list[str]:
        problems = [
            f"{name} is {getattr(self, name)!r}; it must be a positive whole number."
            for name in _POSITIVE
            if type(getattr(self, name)) is not int or getattr(self, name) < 1
        ]
        if problems:
            return problems
        for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            token = getattr(self, name)
            if type(token) is not int or not 0 <= token < self.vocab_size:
                problems.append(f"{name} is {token!r}; it must be in [0, {self.vocab_size}).")
        problems += self._problems_of_types()
        if problems:
            return problems
        if not 0 <= self.dropout_rate < 1:
            problems.append(f"dropout_rate is {self.dropout_rate!r}; it must be in [0, 1).")
        if self.activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            problems.append(
                f"feed_forward_proj is {self.feed_forward_proj!r}; it must be one of {allowed}, "
                "alone or after 'gated-'."
            )
        if self.dtype not in DTYPES:
            problems.append(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.relative_attention_num_buckets % 4:
            problems.append("relative_attention_num_buckets must be a multiple of 4.")
        return problems

    def _problems_of_types(self) -> list[str]:
        """What is wrong with a value, by the annotation of its field."""
        wanted: dict[str, tuple[tuple[type, ...], str]] = {
            "float": ((int, float), "a number"),
            "str": ((str,), "text"),
            "bool": ((bool,), "true or false"),
            "bool | None": ((bool, type(None)), "true or false"),
        }
        problems = []
        for field in dataclasses.fields(self):
            types, words = wanted.get(str(field.type), ((object,), ""))
            value = getattr(self, field.name)
            is_other = isinstance(value, bool) and bool not in types and object not in types
            if not isinstance(value, types) or is_other:
                problems.append(f"{field.name} is {value!r}; it must be {words}.")
        return problems


_POSITIVE = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)

Config = T5Config
