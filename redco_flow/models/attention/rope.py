"""Rotary position embeddings (RoPE) as configurations: base, dims, and scaling beyond pretraining.

Reads each spelling of transformers: `rope_theta` with `rope_scaling`, and `rope_parameters`. A
missing `original_max_position_embeddings` is `max_position_embeddings`, as in transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

ROPE_TYPES = ("linear", "llama3", "yarn", "longrope")
ORIGINAL_LENGTH = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"
LENGTHS = (_LENGTH, ORIGINAL_LENGTH)
MAX_INT = 2**31 - 1
# What each type cannot do without; transformers has no defaults for these either.
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_LISTS = ("short_factor", "long_factor")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN sharpens attention that reaches `factor` times as far."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeScaling:
    """The stretching of rotary frequencies beyond the length of pretraining.

    The names are those of Hugging Face's `rope_scaling`. `linear`: all by `factor`. `llama3`:
    long wavelengths by `factor`, short ones not, those between gradually. `yarn`: the same, with
    bounds in turns, and cosines and sines times `attention_factor`. `longrope`: each by its own
    number, and times `attention_factor`; texts beyond the length of pretraining would take
    `long_factor` and are not computed here.

    Attributes:
        original_max_position_embeddings: the length of pretraining, in tokens; only `linear`
            does without it.
        attention_factor: None: as `factor`, `mscale` and `mscale_all_dim` give it.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `read_scaling` reads, without the keys that are None."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            allowed = ", ".join(ROPE_TYPES)
            raise ValueError(
                f"rope_scaling has rope_type {self.rope_type!r}; it must be one of {allowed}, "
                "or rope_scaling none for unscaled positions."
            )
        for field in dataclasses.fields(self)[1:]:
            self._check_number(field.name, is_optional="None" in str(field.type))
        for name in _REQUIRED[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(
                    f"rope_scaling has rope_type {self.rope_type!r} and no {name}, which it needs."
                )
        self._check_combination()

    def _check_number(self, name: str, *, is_optional: bool) -> None:
        value = getattr(self, name)
        if value is None and is_optional:
            return
        if name == "truncate":
            if type(value) is not bool:
                raise ValueError(f"rope_scaling has truncate {value!r}; it must be true or false.")
            return
        if name in _LISTS and not isinstance(value, tuple):
            raise ValueError(f"rope_scaling has {name} {value!r}; it must be a list of numbers.")
        for number in value if name in _LISTS else (value,):
            if type(number) not in (int, float) or not 0 < number <= MAX_INT:
                raise ValueError(
                    f"rope_scaling has {name} {number!r}; it must be a number above 0 and at most "
                    f"{MAX_INT}."
                )

    def _check_combination(self) -> None:
        """Refuse numbers of which frequencies cannot be computed."""
        if self.rope_type == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            assert low is not None
            assert high is not None
            if low >= high:
                raise ValueError(
                    f"rope_scaling has high_freq_factor {high}; it must be above low_freq_factor, "
                    f"{low}."
                )
        length = self.original_max_position_embeddings
        if self.rope_type != "linear" and (type(length) is not int or length < 2):
            raise ValueError(
                f"rope_scaling has {ORIGINAL_LENGTH} {length!r}; rope_type {self.rope_type!r} "
                "needs the length of pretraining in tokens, at least 2."
            )

    @property
    def original_length(self) -> int:
        """The length of pretraining, in tokens, of a type that has one."""
        assert self.original_max_position_embeddings is not None
        return self.original_max_position_embeddings

    @property
    def max_length(self) -> float:
        """The longest text whose positions are computed here."""
        return self.original_length if self.rope_type == "longrope" else math.inf


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions on the first `num_dims` of each head.

    `is_interleaved`: rotated pairs are neighbours (GPT-J); otherwise halves apart.
    """

    num_dims: int
    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.num_dims < 2 or self.num_dims % 2:
            raise ValueError(
                f"rotary positions are on {self.num_dims} dims of each head; the number must be "
                "even and at least 2."
            )
        if self.scaling is None:
            return
        if self.scaling.rope_type == "yarn" and self.theta == 1:
            raise ValueError("rope_theta is 1, with which rope_type 'yarn' cannot be computed.")
        factors = self.scaling.short_factor
        if factors and len(factors) != self.num_dims // 2:
            raise ValueError(
                f"rope_scaling has {len(factors)} numbers as short_factor; it must be one for each "
                f"of {self.num_dims // 2} pairs of dims that are turned."
            )


def read_scaling(value: Any, lengths: Mapping[str, Any]) -> RopeScaling | None:
    """Read what a config says of the scaling; None where positions are not scaled.

    Args:
        value: a mapping with `rope_type` (or `type`), or a RopeScaling.
        lengths: has `max_position_embeddings`, which is the length of pretraining where none is
            given, and may have an `original_max_position_embeddings`, which then counts before
            that of `value`.

    Raises:
        ValueError: not a mapping, or one with other keys or values.
    """
    if value is None:
        return None
    if isinstance(value, RopeScaling):
        outer = lengths.get(ORIGINAL_LENGTH)
        if outer is None or value.rope_type == "linear":
            return value
        return dataclasses.replace(value, original_max_position_embeddings=outer)
    known = [field.name for field in dataclasses.fields(RopeScaling)]
    has_type = isinstance(value, Mapping) and {"rope_type", "type"} & {*value}
    if not has_type or not {*value} <= {*known, "type"}:
        raise ValueError(
            f"rope_scaling is {value!r}; it must be none or a mapping with rope_type and what that "
            f"type needs. Known keys: {', '.join(known)}."
        )
    read = {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}
    older_name = read.pop("type", "default")
    rope_type = read.setdefault("rope_type", older_name)
    if rope_type == "su" or (rope_type == "yarn" and read.get("short_factor")):
        rope_type = read["rope_type"] = "longrope"  # its names in the first Phi-3 models
    if rope_type == "default":
        return None
    if rope_type in ROPE_TYPES and rope_type != "linear":
        read = _with_lengths(rope_type, read, lengths)
    _check_required(rope_type, read)
    stated: dict[str, Any] = {key: v for key, v in read.items() if v is not None}
    return RopeScaling(**{"factor": 1.0, **stated})


def _with_lengths(
    rope_type: str, read: Mapping[str, Any], lengths: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill in the length of pretraining, and a factor that follows from the lengths."""
    longest = lengths.get(_LENGTH)
    given = (lengths.get(ORIGINAL_LENGTH), read.get(ORIGINAL_LENGTH), longest)
    original = next((length for length in given if length is not None), None)
    filled = {**read, ORIGINAL_LENGTH: original}
    follows = rope_type == "longrope" or (rope_type == "yarn" and "factor" in read)
    if follows and read.get("factor") is None and _is_length(longest) and _is_length(original):
        filled["factor"] = longest / original
    return filled


def _is_length(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MAX_INT


def _check_required(rope_type: Any, read: Mapping[str, Any]) -> None:
    missing = [name for name in _REQUIRED.get(str(rope_type), ()) if read.get(name) is None]
    if missing:
        raise ValueError(
            f"rope_scaling has rope_type {rope_type!r} and no {', '.join(missing)}, which it needs."
        )


def with_rope_fields(
    values: Mapping[str, Any], defaults: Mapping[str, Any], *, is_by_layer_type: bool
) -> dict[str, Any]:
    """Bring the ways in which a config.json writes rotary positions to one.

    Args:
        values: a config.json's content.
        defaults: the family's own values of the lengths that `values` may lack.
        is_by_layer_type: whether layers that look a window back have their own base.

    Returns:
        the same with `rope_theta`, `rope_scaling` (a RopeScaling or None) and
        `rope_local_base_freq`, as far as they are given.

    Raises:
        ValueError: a value that does not have the shape that it must have.
    """
    values = dict(values)
    parameters, scaling = values.pop("rope_parameters", None), values.pop("rope_scaling", None)
    if parameters is None and not scaling:
        return values
    newer, older = _mapping("rope_parameters", parameters), _mapping("rope_scaling", scaling)
    if is_by_layer_type:
        values |= _local_theta(newer)
        stated = {**_mapping("full_attention", newer.get("full_attention")), **older}
    else:
        _check_is_flat(newer)
        stated = older or newer  # where both are given, transformers reads rope_scaling
    for name in ("rope_theta", "partial_rotary_factor"):
        if stated.get(name) is not None:
            values[name] = stated[name]
    known = {"type", *(field.name for field in dataclasses.fields(RopeScaling))}
    read = {"type": "default", **{key: value for key, value in stated.items() if key in known}}
    # transformers reads an outer length of pretraining only where all layers have one scaling.
    outer = LENGTHS[:1] if is_by_layer_type else LENGTHS
    given = {key: values[key] for key in outer if values.get(key) is not None}
    values["rope_scaling"] = read_scaling(read, {**defaults, **given})
    return values


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"config.json has {name} {value!r}; it must be a mapping or null.")
    return dict(value or {})


def _check_is_flat(parameters: Mapping[str, Any]) -> None:
    if named := {*_LAYER_TYPES} & {*parameters}:
        raise ValueError(
            f"config.json has rope_parameters of {', '.join(sorted(named))}; models of this family "
            "have the same rotary positions in all layers: give their parameters alone."
        )


def _local_theta(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base of layers that look a window back, which are not scaled."""
    if parameters and not {*_LAYER_TYPES} & {*parameters}:
        raise ValueError(
            "config.json has rope_parameters for no type of layer; models of this family have "
            f"them by {' and '.join(_LAYER_TYPES)}."
        )
    stated = _mapping("sliding_attention", parameters.get("sliding_attention"))
    if stated.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json has rope_type {stated['rope_type']!r} for layers of "
            "sliding_attention; they are computed here without scaling."
        )
    theta = stated.get("rope_theta")
    return {} if theta is None else {"rope_local_base_freq": theta}
