"""How the common blocks' parameters are made of torch's linear layers and norms.

Patterns for `TensorLayout`: kernels as (out, in), one tensor per layer, one per q, k, v or gate.
Names are templates in which `{layer}` stands for the layer's number, `{part}` for one of q, k and
v, `{gate}` for one of a gated layer's two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from redco_flow.models.block_config import AttentionConfig, MlpConfig
from redco_flow.models.tensor_layout import TensorLayout

Layouts = dict[str, Any]


def norm_layouts(name: str, *, has_bias: bool) -> Layouts:
    """Return the layouts of a `Norm`, one per layer where the name has `{layer}`."""
    dims = "layer model" if "{layer}" in name else "model"
    layouts = {"scale": TensorLayout(dims, "model", f"{name}.weight")}
    if has_bias:
        layouts["bias"] = TensorLayout(dims, "model", f"{name}.bias")
    return layouts


def attention_layouts(
    config: AttentionConfig, inputs: str, output: str, labels: tuple[str, str, str]
) -> Layouts:
    """Return the layouts of an `Attention` whose q, k and v are linear layers of their own.

    Args:
        inputs: name with `{layer}` and `{part}`, such as `model.layers.{layer}.attn.{part}_proj`.
        output: name with `{layer}`.
        labels: what stands for `{part}` for q, k and v.
    """
    layouts: Layouts = {}
    # One kernel of all three, or q apart from k and v.
    kernels = {"qkv": labels} if config.is_fused else {"q": labels[:1], "kv": labels[1:]}
    for name, parts in kernels.items():
        part = "part " if len(parts) > 1 else ""
        tensor = inputs if part else inputs.replace("{part}", parts[0])
        names: Mapping[str, tuple[str, ...]] = {"part": parts} if part else {}
        layouts[name] = TensorLayout(
            f"layer model {part}heads head_dim", "(heads head_dim) model", f"{tensor}.weight", names
        )
        if config.has_input_bias:
            layouts[f"{name}_bias"] = TensorLayout(
                f"layer {part}heads head_dim", "(heads head_dim)", f"{tensor}.bias", names
            )
    layouts["out"] = TensorLayout(
        "layer heads head_dim model", "model (heads head_dim)", f"{output}.weight"
    )
    if config.has_output_bias:
        layouts["out_bias"] = TensorLayout("layer model", "model", f"{output}.bias")
    return layouts


def mlp_layouts(config: MlpConfig, inner: str, outer: str, labels: tuple[str, ...] = ()) -> Layouts:
    """Return the layouts of an `Mlp` of linear layers.

    Args:
        inner: name with `{layer}`, and `{gate}` where there are two.
        labels: what stands for `{gate}` for the activated one and for the other.
    """
    # Without gates the name is the same for the only one there is.
    names = {"gate": labels} if labels else {}
    unit = "units" if labels else "(gate units)"
    layouts = {
        "wi": TensorLayout("layer model gate units", f"{unit} model", f"{inner}.weight", names),
        "wo": TensorLayout("layer units model", "model units", f"{outer}.weight"),
    }
    if config.has_bias:
        layouts["wi_bias"] = TensorLayout("layer gate units", unit, f"{inner}.bias", names)
        layouts["wo_bias"] = TensorLayout("layer model", "model", f"{outer}.bias")
    return layouts


def with_other_prefix(layouts: Layouts, prefix: str, other: str) -> Layouts:
    """Let every tensor whose name begins with `prefix` be found under `other` instead, too."""
    renamed: Layouts = {}
    for key, layout in layouts.items():
        if not isinstance(layout, TensorLayout):
            renamed[key] = with_other_prefix(layout, prefix, other)
        else:
            names = (layout.name, *layout.aliases)
            others = tuple(
                other + name.removeprefix(prefix) for name in names if name.startswith(prefix)
            )
            renamed[key] = dataclasses.replace(layout, aliases=(*layout.aliases, *others))
    return renamed
