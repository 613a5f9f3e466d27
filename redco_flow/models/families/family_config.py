"""The base of every family's config: reads, checks, changes and writes itself.

A family declares its fields under the names that Hugging Face's `config.json` has; their
annotations say what values they take.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from redco_flow.models.attention.rope import LENGTHS, MAX_INT, read_scaling, with_rope_fields
from redco_flow.models.config import ATTENTION_KERNELS, DTYPES
from redco_flow.models.layer_config import REMAT_POLICIES, Activations, AttentionConfig

if TYPE_CHECKING:
    from redco_flow.models.hub.tensors import TensorFiles

# How it is computed, not what it is: no config.json has these.
_COMPUTED = ("dtype", "remat", "activations", "attention", "num_mlp_chunks")
_NAMES_A_TOKEN = re.compile(".*_token_id")
_MINIMUM, _ABOVE = "minimum", "above"


def from_zero(default: int) -> Any:
    """Return a field for a whole number that may be 0; others are at least 1."""
    return dataclasses.field(default=default, metadata={_MINIMUM: 0})


def above_zero(default: float | None) -> Any:
    """Return a field for a number that must be above 0; others may be 0."""
    return dataclasses.field(default=default, metadata={_ABOVE: 0})


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A model's shape and constants under its family's own names.

    `dtype` (what products are computed in; parameters stay float32), `remat` and `activations`
    (what the backward pass computes again), `num_mlp_chunks` (of a device's tokens) and `attention`
    (the kernel) are how it is computed.
    Fields that are None and that `derived` gives take the value it gives.
    """

    model_type: ClassVar[str]
    # What transformers calls the class, and, where its name does not follow, the one with labels.
    architecture: ClassVar[str]
    classifier_architecture: ClassVar[str | None] = None
    # Keys of config.json that change what is computed in a way that is not offered here, and
    # the one value that each may have.
    fixed: ClassVar[Mapping[str, Any]] = {}
    # Other names under which config.json may have a field.
    other_names: ClassVar[Mapping[str, str]] = {}
    # Parts of tensors' names and what they are in the names of transformers' modules, where those
    # have changed and published files have not; one after the other.
    module_renamings: ClassVar[Mapping[str, str]] = {}
    # Fields that are configs of other families.
    parts: ClassVar[Mapping[str, type[ModelConfig]]] = {}
    # Patterns of tensors that published files may have and that are not read.
    ignored_tensors: ClassVar[tuple[str, ...]] = ()

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    activations: Activations = dataclasses.field(default_factory=Activations)
    num_mlp_chunks: int = 1

    @final
    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text; none of a model without tokens."""
        eos = getattr(self, "eos_token_id", None)
        return () if eos is None else eos if isinstance(eos, tuple) else (eos,)

    @property
    @abstractmethod
    def core(self) -> Any:
        """The same model in the words that all families of its kind share."""

    @final
    @property
    def how_computed(self) -> dict[str, Any]:
        """Return the arguments of `StackConfig` that say how the layers are computed."""
        return {
            "dtype": self.dtype,
            "remat": self.remat,
            "attention_kernel": self.attention,
            "activations": self.activations,
            "num_mlp_chunks": self.num_mlp_chunks,
        }

    def derived(self) -> dict[str, Any]:
        """Return the values of fields that follow others unless they are given."""
        return {}

    @final
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            if name in self.parts and isinstance(value, Mapping):
                object.__setattr__(self, name, self.parts[name].from_hugging_face(value))
            if name == "rope_scaling":
                object.__setattr__(self, name, read_scaling(value, vars(self)))
        self._read_activations()
        problems = [p for field in dataclasses.fields(self) if (p := self._problem(field))]
        if not problems:
            self._derive()
            problems = self._token_problems()
        for problem in problems:
            raise ValueError(f"{self.model_type} config: {problem}")
        # Building it once shows what only makes sense together.
        _ = self.core

    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class of the whole model."""
        return (self.architecture,)

    @abstractmethod
    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""

    def of_tensors(self, files: TensorFiles) -> Self:
        """Return this config, changed where a checkpoint's tensors differ from `config.json`."""
        del files
        return self

    @classmethod
    @final
    def from_hugging_face(cls, values: Mapping[str, Any], **computed: Any) -> Self:
        """Read a `config.json`'s content; keys that do not shape the model are left alone.

        Args:
            values: the parsed file.
            computed: fields that no `config.json` has: `dtype`, `remat`, `activations`,
                `num_mlp_chunks` and `attention`.

        Raises:
            ValueError: another family, a value that it cannot have, or one not offered here.
        """
        found = values.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(
                f"config.json has model_type {found!r}; this model reads {cls.model_type!r}."
            )
        for key, only in cls.fixed.items():
            if values.get(key, only) not in (only, None):
                raise ValueError(
                    f"config.json has {key} {values[key]!r}; {cls.model_type} models are "
                    f"computed here with {only!r} only."
                )
        named = {cls.other_names.get(key, key): value for key, value in values.items()}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if "rope_scaling" in fields:
            lengths = {name: fields[name].default for name in LENGTHS if name in fields}
            is_by_layer_type = "rope_local_base_freq" in fields
            named = with_rope_fields(named, lengths, is_by_layer_type=is_by_layer_type)
        values = cls.standardised(named)
        kept: dict[str, Any] = {}
        for field in fields.values():
            value = values.get(field.name)
            is_given = field.name in values and field.name not in _COMPUTED
            if is_given and (value is not None or "None" in str(field.type)):
                kept[field.name] = value
        eos = kept.get("eos_token_id")
        if isinstance(eos, list | tuple) and len(eos) == 1:
            kept["eos_token_id"] = eos[0]
        if kept.get("pad_token_id") == -1:  # how some published models say that they have none
            kept["pad_token_id"] = None
        return cls(**kept, **computed)

    @classmethod
    def standardised(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Bring a `config.json`'s content to this family's fields; most have them as they are."""
        return values

    @final
    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with `values` in place; fields that follow others follow the new ones.

        Args:
            values: by field, and of a part's config by its fields; `dropout_rate` is all of a
                model's rates of dropout.

        Raises:
            ValueError: a key that is no field (the message names the nearest), or a bad value.
        """
        known = [field.name for field in dataclasses.fields(self)]
        values = dict(values)
        if "dropout_rate" in values and "dropout_rate" not in known:
            rate = values.pop("dropout_rate")
            values = {name: rate for name in known if "drop" in name} | values
            for name in self.parts:
                values[name] = {"dropout_rate": rate, **dict(values.get(name, {}))}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"{self.model_type} config has no key {key!r}{hint} "
                    f"Known keys: {', '.join(known)}."
                )
        for name in self.parts.keys() & values.keys():
            if isinstance(values[name], Mapping):
                values[name] = getattr(self, name).updated(values[name])
        followers = {
            name: None for name, value in self.derived().items() if getattr(self, name) == value
        }
        return dataclasses.replace(self, **{**followers, **values})

    @final
    def to_hugging_face(self) -> dict[str, Any]:
        """Return the `config.json` that transformers reads as this same model."""
        values = dataclasses.asdict(self)
        for key in _COMPUTED:
            del values[key]
        if values.get("rope_scaling"):
            values["rope_scaling"] = getattr(self, "rope_scaling").to_json()  # noqa: B009
        values |= {name: getattr(self, name).to_hugging_face() for name in self.parts}
        return {
            "architectures": list(self.architectures()),
            "model_type": self.model_type,
            **self.fixed,
            **values,
        }

    def _read_activations(self) -> None:
        try:
            found = Activations.from_json(self.activations)
        except ValueError as error:
            raise ValueError(f"{self.model_type} config: {error}") from None
        object.__setattr__(self, "activations", found)
        if self.remat == "none" and found.choices:
            raise ValueError(
                f"{self.model_type} config: activations says what becomes of "
                f"{', '.join(found.choices)}, and remat none keeps all results: choose remat "
                "minimal or full beneath it."
            )
        if self.remat == "auto" and found.choices:
            raise ValueError(
                f"{self.model_type} config: activations says what becomes of "
                f"{', '.join(found.choices)}, which remat auto decides: leave it out, or choose "
                "remat minimal or full."
            )

    def _derive(self) -> None:
        for name, value in self.derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _problem(self, field: dataclasses.Field[Any]) -> str | None:
        """Say what is wrong with a value, by the annotation of its field."""
        name, value, kind = field.name, getattr(self, field.name), str(field.type)
        if name in self.fixed and value != self.fixed[name]:
            return (
                f"{name} is {value!r}; {self.model_type} models are computed here with "
                f"{self.fixed[name]!r} only."
            )
        if _NAMES_A_TOKEN.fullmatch(name) or (value is None and "None" in kind):
            return None
        if name == "dtype" and value not in DTYPES:
            return f"dtype is {value!r}; it must be one of {', '.join(DTYPES)}."
        if name == "remat" and value not in REMAT_POLICIES:
            return f"remat is {value!r}; it must be one of {', '.join(REMAT_POLICIES)}."
        if name == "attention" and value not in ATTENTION_KERNELS:
            return f"attention is {value!r}; it must be one of {', '.join(ATTENTION_KERNELS)}."
        if name in self.parts and not isinstance(value, self.parts[name]):
            return f"{name} is {value!r}; it must be a mapping, the {name}'s configuration."
        if kind.startswith("str") and not isinstance(value, str):
            return f"{name} is {value!r}; it must be text."
        if kind.startswith("int"):
            return _int_problem(name, value, field.metadata.get(_MINIMUM, 1))
        if kind.startswith("bool") and type(value) is not bool:
            return f"{name} is {value!r}; it must be true or false."
        if kind.startswith("float"):
            return _float_problem(name, value, is_above_zero=_ABOVE in field.metadata)
        if kind.startswith("tuple"):
            of, what = (str, "texts") if "str" in kind else (int, "whole numbers")
            if not isinstance(value, tuple) or not all(type(one) is of for one in value):
                return f"{name} is {value!r}; it must be a list of {what}."
        return None

    def _token_problems(self) -> list[str]:
        problems = []
        vocab_size = getattr(self, "vocab_size", 0)  # what has no tokens has no such field
        for field in dataclasses.fields(self):
            name = field.name
            given = getattr(self, name) if _NAMES_A_TOKEN.fullmatch(name) else None
            is_list = isinstance(given, tuple) and "tuple" in str(field.type)
            for token in list(given or ()) if is_list else [given]:
                if token is not None and (type(token) is not int or not token >= 0):
                    problems.append(f"{name} is {token!r}; it must be a token id or none.")
                elif token is not None and token >= vocab_size:
                    problems.append(f"{name} is {token!r}; it must be in [0, {vocab_size}).")
        return problems


@dataclass(frozen=True)
class FamilyConfig(ModelConfig):
    """The same of a model of tokens."""

    vocab_size: int = 32000
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    @final
    @property
    def filler_token_id(self) -> int:
        """The token after a text's end: padding, else the end token, else 0."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return next(iter(self.eos_token_ids), 0)


def _int_problem(name: str, value: Any, minimum: int) -> str | None:
    if type(value) is int and minimum <= value <= MAX_INT:
        return None
    if type(value) is int and value > MAX_INT:
        return f"{name} is {value!r}; it must be at most {MAX_INT}."
    what = "a positive whole number" if minimum == 1 else f"a whole number from {minimum} on"
    return f"{name} is {value!r}; it must be {what}."


def _float_problem(name: str, value: Any, *, is_above_zero: bool) -> str | None:
    # JSON's whole numbers may be too large for a float.
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if is_above_zero and not (is_number and value > 0):
        return f"{name} is {value!r}; it must be a number above 0."
    if not (is_number and value >= 0):
        return f"{name} is {value!r}; it must be a number from 0 on."
    if "drop" in name and value >= 1:
        return f"{name} is {value!r}; it must be in [0, 1)."
    return None


def attention_of_heads(
    config: ModelConfig, width_name: str, heads_name: str, **differing: Any
) -> AttentionConfig:
    """Return plain attention, whose heads divide the model's width, but for what differs.

    Args:
        width_name, heads_name: what the family calls the model's width and the number of heads.

    Raises:
        ValueError: the heads do not divide the width.
    """
    num_heads = getattr(config, heads_name)
    head_dim = split_evenly(width_name, getattr(config, width_name), heads_name, num_heads)
    same = {"num_heads": num_heads, "num_kv_heads": num_heads, "scale": head_dim**-0.5}
    return AttentionConfig(head_dim=head_dim, **{**same, **differing})


def split_evenly(width_name: str, width: int, heads_name: str, num_heads: int) -> int:
    """Return the width of each head.

    Raises:
        ValueError: the heads do not divide the width.
    """
    if width % num_heads:
        raise ValueError(f"{heads_name} is {num_heads}; it must divide {width_name}, {width}.")
    return width // num_heads
