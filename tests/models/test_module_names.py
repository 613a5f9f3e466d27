"""Kernels found by the names of transformers' modules, as PEFT's `target_modules` has them."""

import pytest

from redco_flow.models.find import find_config
from redco_flow.models.hub.module_names import (
    FoundTargets,
    find_targets,
    flat_layouts,
)

QKV, WI = "layers/attention/qkv", "layers/mlp/wi"


def found(family, targets):
    config = find_config(family)()
    layouts = flat_layouts(config.tensor_layouts())
    return find_targets(targets, layouts, renamings=config.module_renamings)


@pytest.mark.parametrize(
    ("family", "targets", "pattern", "modules"),
    [
        ("llama", ["q_proj", "v_proj"], None, {QKV: (2, (0, 2))}),
        ("llama", "o_proj", None, {"layers/attention/out": None}),
        ("llama", r"(q|k)_proj", None, {QKV: (2, (0, 1))}),
        ("llama", "gate_proj", None, {WI: (2, (0,))}),
        ("llama", ["up_proj", "gate_proj"], None, {WI: (2, (0, 1))}),
        ("llama", "mlp/wo|attention", "(?:mlp/wo|attention)", {}),
        ("llama", ["mlp/wo", "k_proj"], "(?:mlp/wo)", {QKV: (2, (1,))}),
        ("llama", "all-linear", "all-linear", {}),
        ("mistral", ["q_proj", "v_proj"], None,
         {"layers/attention/q": None, "layers/attention/kv": (2, (1,))}),
        ("gpt2", ["c_attn"], None, {QKV: None}),
        ("gpt2", ["attn.c_proj"], None, {"layers/attention/out": None}),
        ("gpt2", ["c_proj"], None, {"layers/attention/out": None, "layers/mlp/wo": None}),
        ("phi3", ["qkv_proj"], None, {QKV: None}),
        ("bert", ["query", "value"], None, {f"encoder/{QKV}": (2, (0, 2))}),
        ("vit", ["query", "v_proj", "fc1"], None,
         {f"encoder/{QKV}": (2, (0, 2)), "encoder/layers/mlp/wi": None}),
        ("t5", ["SelfAttention.q"], None,
         {f"{side}/{QKV}": (2, (0,)) for side in ("encoder", "decoder")}),
        ("t5", ["EncDecAttention.v"], None, {"decoder/layers/cross_attention/kv": (2, (1,))}),
    ],
)  # fmt: skip
def test_a_name_means_the_modules_that_end_with_it(family, targets, pattern, modules):
    assert found(family, targets) == FoundTargets(pattern, modules)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("qproj", "'qproj' matches no kernel: did you mean q_proj, "),
        (["q_proj", "query"], "'query' matches no kernel: The modules of the layers are down_proj"),
        ("q_proj,v_proj", r"Several targets are a list: \[q_proj, v_proj\]"),
        (r"layers\.0\.self_attn\.q_proj", "matches some layers only; .* such as q_proj"),
        ("norm", "'norm' matches no kernel"),
    ],
)
def test_what_matches_no_kernel_is_an_error_with_the_nearest_names(targets, message):
    with pytest.raises(ValueError, match=message):
        found("llama", targets)


def test_a_regex_that_means_all_of_a_models_layers_is_taken_with_its_shapes():
    layouts = flat_layouts(find_config("llama")().tensor_layouts())
    shapes = {path: (2,) * len(layout.dims) for path, layout in layouts.items()}
    shapes[QKV] = (2, 8, 3, 2, 4)

    one = find_targets(r"layers\.[01]\.self_attn\.q_proj", layouts, shapes)

    assert one.modules == {QKV: (2, (0,))}
