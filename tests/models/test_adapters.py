"""Low-rank factors as PEFT keeps them: by transformers' modules, (R, I) and (O, R)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.step.lora import plan_lora
from redco_flow.models.hub.adapters import FactoredKernel, adapter_config, adapter_tensors

RANK, ALPHA = 2, 6.0


def adapted(case, targets, **kinds):
    """Factors of which none is zero, the kernels with theirs, and the merged parameters."""
    ids = np.arange(6)[None] + 3
    lora = plan_lora(
        case.params,
        lambda params, ids: case.module.apply(case.config, params, ids),
        ids,
        rank=RANK,
        alpha=ALPHA,
        targets=targets,
        **kinds,
    )
    state, rng = jax.jit(lora.start)(case.params, jax.random.key(0)), np.random.default_rng(1)
    state["lora"] = jax.tree.map(
        lambda x: x + rng.standard_normal(x.shape).astype(np.float32), state["lora"]
    )
    layouts = dict(zip(paths(case.params), layouts_of(case), strict=True))
    shapes = {join(path): leaf.shape for path, leaf in named_leaves(case.params)}
    kernels = [
        FactoredKernel(
            one.path, layouts[one.path], shapes[one.path], one.stack, one.inputs, one.outputs
        )
        for one in lora.targets
    ]
    return state["lora"], kernels, jax.jit(lora.merge)(state)


def paths(params):
    return [join(path) for path, _ in named_leaves(params)]


def layouts_of(case):
    return jax.tree.structure(case.params).flatten_up_to(case.module.tensor_layouts(case.config))


def tensors(case, params):
    leaves = jax.tree.leaves(params)
    return {
        name: tensor
        for layout, leaf in zip(layouts_of(case), leaves, strict=True)
        for name, tensor in layout.split(np.asarray(leaf))
    }


def names(case):
    return list(tensors(case, case.params))


def factors_of(factors, kernels):
    """Each kernel with A, B and magnitudes."""
    return [
        (kernel, *(np.asarray(factors[kernel.path][name]) for name in sorted(factors[kernel.path])))
        for kernel in kernels
    ]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["gpt2", "deepseek_v3"], indirect=True)
def test_what_each_module_adds_is_what_merging_adds_to_its_tensor(decoder):
    targets = r"attention/(q|kv|qkv|out|(q|kv)_(down|up))$|mlp/w|project|shared_experts/w"
    factors, kernels, merged = adapted(decoder, targets)

    found = adapter_tensors(factors_of(factors, kernels))

    before, after = tensors(decoder, decoder.params), tensors(decoder, merged)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    modules = {name.removesuffix(".weight") for name in changed}
    assert {
        key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in found
    } == modules
    for module in modules:
        a, b = (found[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        change = ALPHA / RANK * b @ a
        # Conv1D of GPT-2 keeps (inputs, outputs).
        change = change.T if decoder.config.model_type == "gpt2" else change
        expected = after[f"{module}.weight"] - before[f"{module}.weight"]
        np.testing.assert_allclose(change, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
def test_magnitudes_of_each_module_are_those_of_its_merged_tensor(decoder):
    """DoRA as PEFT merges it: each output's weights, with the product, as long as its magnitude."""
    targets = r"attention/(q|kv|qkv|out)$|mlp/w"
    factors, kernels, merged = adapted(decoder, targets, dora=True, rank_stabilized=True)

    found = adapter_tensors(factors_of(factors, kernels))

    before, after = tensors(decoder, decoder.params), tensors(decoder, merged)
    modules = [key for key in found if key.endswith("lora_magnitude_vector")]
    assert len(modules) == len(found) / 3
    for key in modules:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
        a, b = (found[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        is_conv = decoder.config.model_type == "gpt2"
        weight, expected = (
            all_tensors[f"{module}.weight"].T if is_conv else all_tensors[f"{module}.weight"]
            for all_tensors in (before, after)
        )
        turned = weight + ALPHA / np.sqrt(RANK) * b @ a
        lengths = np.linalg.norm(turned, axis=1, keepdims=True)
        np.testing.assert_allclose(found[key][:, None] / lengths * turned, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("decoder", "targets", "expected"),
    [
        ("gpt2", "attention/(qkv|out)$", ["attn.c_proj", "c_attn"]),
        ("gpt2", "mlp/w", ["c_fc", "mlp.c_proj"]),
        ("llama3", "attention/(q|kv)$", ["k_proj", "q_proj", "v_proj"]),
    ],
    indirect=["decoder"],
)
def test_modules_are_named_as_shortly_as_tells_them_from_others(decoder, targets, expected):
    _, kernels, _ = adapted(decoder, targets)

    config = adapter_config(
        kernels,
        names(decoder),
        rank=RANK,
        alpha=ALPHA,
        architectures=decoder.config.architectures(),
        base="org/base",
        revision=None,
    )

    assert config["target_modules"] == expected
    assert config["fan_in_fan_out"] == (decoder.config.model_type == "gpt2")
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", "org/base")


@pytest.mark.parametrize("decoder", ["mixtral"], indirect=True)
def test_kernels_of_experts_have_no_adapter(decoder):
    _, kernels, _ = adapted(decoder, "layers")

    refused = {kernel.path.rpartition("/")[2]: kernel.problem for kernel in kernels}

    assert {name for name, problem in refused.items() if problem} == {"router", "wi", "wo"}
    assert "no linear modules of transformers" in refused["wi"]
    assert refused["out"] is None


@pytest.mark.parametrize("decoder", ["llama3"], indirect=True)
def test_factors_are_written_in_float32_whatever_they_were(decoder):
    factors, kernels, _ = adapted(decoder, "attention/out$")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), factors)

    found = adapter_tensors(factors_of(narrow, kernels))

    assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float32)}


def test_modules_trained_in_full_are_saved_and_a_head_of_several_layers_is_one():
    """PEFT copies the module that it finds by the name: of RoBERTa the whole classifier."""
    heads = ("classifier.dense", "classifier.out_proj", "bert.pooler.dense", "score")
    full = [f"{name}.{kind}" for name in heads for kind in ("weight", "bias")]

    config = adapter_config(
        [], [], rank=2, alpha=4.0, architectures=(), base=None, revision=None, full=full
    )

    assert config["modules_to_save"] == ["bert.pooler.dense", "classifier", "score"]
