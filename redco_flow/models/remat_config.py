"""The treatment of each activation until the backward pass: keep, recompute, offload or split."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REMAT_POLICIES = ("none", "full", "dots", "minimal", "auto")
ACTIVATION_CHOICES = ("keep", "recompute", "offload", "split")
# What every model shard has in full.
REPLICATED_ACTIVATIONS = ("layer_input", "attention_out", "mlp_input", "mlp_out")


@dataclass(frozen=True)
class Activations:
    """The treatment of a layer's intermediate results until its backward pass, by name.

    Each is `keep`, `recompute`, `offload` (to the host's pinned memory; on CPUs it is kept) or
    `split`: kept in parts of the sequence by the model shards, which gather them in the backward
    pass. None: as `remat` says. What else a layer computes is computed again.

    Attributes:
        layer_input: what the layer reads; never computed again.
        qkv: the products that give queries, keys and values, those of cross-attention too.
        attention: what attention's heads gather, and a ring's softmax statistics.
        attention_out: the product after it.
        mlp_input: what the feed-forward's norm reads; with `is_parallel` it is the layer's.
        mlp_in: the product that gives gate and up, a router's and its experts' too.
        mlp_out: the product after the activation.
        offload_share: of each device's tokens, whose part of what is offloaded goes to the host;
            the rest is kept on the device.
    """

    layer_input: str | None = None
    qkv: str | None = None
    attention: str | None = None
    attention_out: str | None = None
    mlp_input: str | None = None
    mlp_in: str | None = None
    mlp_out: str | None = None
    offload_share: float = 1.0

    @classmethod
    def from_json(cls, value: Any) -> Activations:
        """Read what a config says of them.

        Raises:
            ValueError: no mapping, a name that no result has, or something else to do with it.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        names = f"known names: {', '.join(known)}."
        if not isinstance(value, Mapping):
            raise ValueError(f"activations is {value!r}; it must be a mapping by name; {names}")
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"activations has no name {name!r}; {hint}{names}")
        return cls(**value)

    def __post_init__(self) -> None:
        for name, choice in self.choices.items():
            if choice not in ACTIVATION_CHOICES:
                allowed = ", ".join(ACTIVATION_CHOICES)
                raise ValueError(f"activations has {name} {choice!r}; it must be one of {allowed}.")
            if choice == "split" and name not in REPLICATED_ACTIVATIONS:
                allowed = ", ".join(REPLICATED_ACTIVATIONS)
                raise ValueError(
                    f"activations has {name} 'split'; model shards have their own parts of it "
                    f"anyway. What can be split: {allowed}."
                )
        if self.layer_input == "recompute":
            raise ValueError(
                "activations has layer_input 'recompute'; all else is computed again from it: "
                "keep or offload it."
            )
        self._check_share()

    def _check_share(self) -> None:
        share = self.offload_share
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(
                f"activations has offload_share {share!r}; it must be above 0 and at most 1."
            )
        if share < 1 and "offload" not in self.choices.values():
            raise ValueError(
                f"activations has offload_share {share}, and nothing is offloaded: leave it out, "
                "or say what is, as in {layer_input: offload, offload_share: 0.5}."
            )

    def share_offloaded(self, name: str) -> float:
        """Return the share of a result that is offloaded, where it is; else 1."""
        return self.offload_share if self.choices.get(name) == "offload" else 1.0

    @property
    def choices(self) -> dict[str, str]:
        """Those that are said, by name."""
        said = vars(self).items()
        return {name: kind for name, kind in said if kind is not None and name != "offload_share"}
