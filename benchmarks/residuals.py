"""What the forward pass of a LLaMA keeps for the backward one, for each `remat`, `activations`
and mesh.

    python benchmarks/residuals.py [--compile] [--family llama|bart|t5] [--sequence-length 8192]

Traces the gradient of the loss over eight devices from shapes alone (LLaMA-3-8B's, and BART-large
and T5 1.1 of its size), reads what the forward scans over layers hand to the backward ones, and
counts arrays and GiB per layer and device, those on the host apart, as if every array were split
over all devices. With `--compile` two and four layers are compiled for CPU devices as well:
`temp_gib` is what one layer more takes of a device's temporaries, with arrays as they are really
split, and the gradients' own among them. Prints one JSON line per mesh and choice, and all of them
in one line last.
"""

import argparse
import json
import math
import os
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from redco_flow import Deployer
from redco_flow.engine.sharding.dataflow.trace import scan_sizes
from redco_flow.engine.step.compiled import on_unpadded_params
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model

ROWS, GIB = 8, 2**30
CALLS = ("jit", "pjit", "closed_call", "core_call")
MESHES: dict[str, dict[str, int]] = {
    "data 8": {},
    "fsdp 8": {"num_fsdp_shards": 8},
    "model 8": {"num_model_shards": 8},
    "model 4 x fsdp 2": {"num_model_shards": 4, "num_fsdp_shards": 2},
    "context 8": {"num_context_shards": 8},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "tie_word_embeddings": False, "rope_theta": 500000.0,
    },
    "bart": {
        "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
        "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "t5": {
        "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24,
        "num_heads": 16, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip
CHOICES: dict[str, tuple[str, dict[str, str]]] = {
    "none": ("none", {}),
    "dots": ("dots", {}),
    "minimal": ("minimal", {}),
    "full": ("full", {}),
    "full, nothing split": ("full", {"layer_input": "keep", "attention_out": "recompute"}),
    "full, input alone split": ("full", {"layer_input": "split", "attention_out": "recompute"}),
    "full, attention kept": ("full", {"attention": "keep"}),
    "full, MLP input kept": ("full", {"mlp_input": "keep"}),
    "minimal, mlp_in again": ("minimal", {"mlp_in": "recompute"}),
    "full, offloaded": ("full", {"layer_input": "offload", "attention": "offload"}),
}
LENGTH_KEYS = {"llama": "max_position_embeddings", "bart": "max_position_embeddings"}
LAYER_KEYS = {
    "llama": ("num_hidden_layers",),
    "bart": ("encoder_layers", "decoder_layers"),
    "t5": ("num_layers",),
}


class Kept(NamedTuple):
    """An array that is kept of each layer: its shape without the layers."""

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool


def kept_of_layer(stacked: Any) -> Kept:
    is_on_host = stacked.memory_space == jax.memory.Space.Host
    return Kept(stacked.shape[1:], stacked.dtype, is_on_host)


class Program(NamedTuple):
    """The gradient of a loss on a mesh, as shapes and shardings."""

    gradient: Any
    params: Any
    batch: Any
    shardings: Any


def build(options: argparse.Namespace, mesh: str, choice: str, num_layers: int | None) -> Program:
    family, length = options.family, options.sequence_length
    values = dict(SHAPES[family])
    if family in LENGTH_KEYS:
        values[LENGTH_KEYS[family]] = length
    if num_layers is not None:
        values |= dict.fromkeys(LAYER_KEYS[family], num_layers)
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values})
    remat, activations = CHOICES[choice]
    config = config.updated({"remat": remat, "activations": activations, "dtype": "bfloat16"})
    names = ["input_ids", "labels", *([] if family == "llama" else ["decoder_input_ids"])]

    def loss_fn(params, batch, rngs, is_training):
        given = [batch["input_ids"]]
        if family != "llama":
            given += [jnp.ones_like(batch["input_ids"]), batch["decoder_input_ids"]]
        return cross_entropy(module.apply(config, params, *given), batch["labels"])

    deployer = Deployer(devices=jax.devices()[:8], **MESHES[mesh])
    params = module.abstract_params(config)
    rows = deployer.rows_sharding()
    batch = {name: jax.ShapeDtypeStruct((ROWS, length), jnp.int32, sharding=rows) for name in names}
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    storage = deployer.storage(params, rules.specs(params), rules.fused(params))
    stored_loss = on_unpadded_params(loss_fn, storage)

    def loss(params, batch):
        totals, weights = stored_loss(storage.unpad(params), batch, None, True)
        return jnp.sum(totals) / jnp.sum(weights)

    return Program(
        deployer.on_mesh(jax.grad(loss)), storage.abstract_stored, batch, storage.stored_sharding
    )


def kept_by_scans(jaxpr: Any) -> list[Kept]:
    """Return what forward scans keep of each layer."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and not equation.params["reverse"]:
            ranks = [[v.aval.ndim for v in some] for some in (equation.invars, equation.outvars)]
            _, num_carry = scan_sizes(equation.params["jaxpr"], *ranks)
            made = equation.outvars[num_carry:]
            found += [kept_of_layer(v.aval) for v in made if v.aval.ndim > 1]
            continue
        for name in ("jaxpr", "call_jaxpr"):
            if equation.primitive.name in CALLS and name in equation.params:
                found += kept_by_scans(equation.params[name].jaxpr)
    return found


def trace(program: Program) -> dict[str, Any]:
    traced = jax.make_jaxpr(program.gradient)(program.params, program.batch)
    kept = kept_by_scans(traced.jaxpr)
    on_device = [one for one in kept if not one.is_on_host]
    on_host = [one for one in kept if one.is_on_host]
    return {
        "arrays": len(on_device),
        "gib": gib(on_device),
        "host_arrays": len(on_host),
        "host_gib": gib(on_host),
        "shapes": sorted(f"{one.dtype.name}{list(one.shape)}" for one in on_device),
    }


def gib(kept: list[Kept]) -> float:
    """Return GiB of each of eight devices."""
    return round(sum(math.prod(one.shape) * one.dtype.itemsize for one in kept) / 8 / GIB, 4)


def temporaries(program: Program) -> int:
    jitted = jax.jit(program.gradient, out_shardings=program.shardings)
    compiled = jitted.lower(program.params, program.batch).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def measure(options: argparse.Namespace, mesh: str, choice: str) -> dict[str, Any]:
    found = trace(build(options, mesh, choice, None))
    if not options.shapes:
        del found["shapes"]
    if options.compile:
        few, more = (temporaries(build(options, mesh, choice, count)) for count in (2, 4))
        found["temp_gib"] = round((more - few) / 2 / GIB, 4)
    return {"family": options.family, "mesh": mesh, "remat": choice, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--mesh", choices=sorted(MESHES), help="one only")
    parser.add_argument("--remat", choices=sorted(CHOICES), help="one only")
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--compile", action="store_true", help="ask the compiler, too")
    parser.add_argument("--shapes", action="store_true", help="name the arrays' shapes")
    options = parser.parse_args()
    records = []
    for mesh in [options.mesh] if options.mesh else MESHES:
        for choice in [options.remat] if options.remat else CHOICES:
            records.append(measure(options, mesh, choice))
            print(json.dumps(records[-1]), flush=True)
    print(json.dumps({"sequence_length": options.sequence_length, "kept": records}))


if __name__ == "__main__":
    main()
