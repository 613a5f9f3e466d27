"""LLaMA-3-8B's training step ÷ MaxText's and Tunix's, compiled for TPUs that are not there.

    python benchmarks/peers.py [--target v5p] [--fsdp 8] [--model 1] [--layers 32] [--rows 16]
                               [--length 2048] [--peers maxtext] [--python PATH]
                               [--environments DIRECTORY]
    python benchmarks/peers.py --peers tunix --layers 4

Each side is compiled by the same libtpu 0.0.42.1 for a slice of eight chips, with the options that
MaxText's benchmarks set for dense models: bfloat16 products, float32 parameters and AdamW, full
rematerialisation, splash attention, its own configuration else (MaxText 0.2.5's for TPUs). Tunix
0.1.7 has one dtype for all, and loads parameters in bfloat16: so are its state and gradients; it
forms the scores, donates the optimizer's state alone, and does not scan over layers, of which few
are compiled. A peer has an environment of its own, which the script makes with uv from an
interpreter of Python 3.12, and is left out, with the reason, where one is not there.
Counted by `hlo_cost.py` for one device and one step: FLOPs outside of kernels, runs of kernels,
HBM bytes, wire bytes, peak memory; and the roofline time max(FLOPs, HBM) + wire, from the chip's
data sheet. Prints one JSON line per side, and ratios (ours ÷ peer) in one line last.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import compile_targets

TOPOLOGIES = {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4", "v6e": "v6e:2x4"}
MAXTEXT_TOPOLOGIES = {"v5p": "v5p-16", "v5e": "v5e-8", "v6e": "v6e-8"}
# Peak bfloat16 FLOP/s, HBM bytes/s, and bytes/s that a chip sends, of the chips' data sheets
# (https://cloud.google.com/tpu/docs/v5p, v5e and v6e).
CHIPS = {
    "v5p": (459e12, 2765e9, 600e9),
    "v5e": (197e12, 819e9, 200e9),
    "v6e": (918e12, 1638e9, 400e9),
}
COUNTED = ("flops", "hbm_bytes", "wire_bytes", "peak_bytes", "roofline_s", "compile_s")
LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}  # fmt: skip
PACKAGES = {
    "maxtext": [
        "jax==0.10.2", "libtpu==0.0.42.1", "flax", "optax", "orbax-checkpoint", "aqtp", "qwix",
        "tokamax", "omegaconf", "grain", "tensorboardx", "transformers", "pydantic", "etils",
        "drjax", "jinja2", "pathwaysutils", "pillow", "psutil", "sentencepiece", "sympy",
        "tiktoken",
    ],
    "tunix": ["jax==0.10.2", "libtpu==0.0.42.1", "google-tunix==0.1.7"],
}  # fmt: skip
# Its own list asks for whole clusters' tooling.
WITHOUT_DEPENDENCIES = {"maxtext": ["maxtext==0.2.5", "google-tunix==0.1.7"]}


def compile_ours(options: argparse.Namespace) -> Any:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    from redco_flow import Deployer, TrainingPlan
    from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
    from redco_flow.models.find import find_model

    module = find_model("llama")
    values = LLAMA_3_8B | {
        "num_hidden_layers": options.layers, "max_position_embeddings": options.length
    }  # fmt: skip
    config = module.Config.from_hugging_face({"model_type": "llama", **values})
    config = config.updated({"remat": "full", "dtype": "bfloat16"})

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        hidden, head, _ = module.apply_before_head(config, params, batch["input_ids"])

        def score(head: Any, hidden: Any) -> Any:
            return module.score(config, head, hidden)

        return chunked_cross_entropy(score, head, hidden, batch["labels"])

    description = topologies.get_topology_desc(TOPOLOGIES[options.target], platform="tpu")
    deployer = Deployer(options.model, devices=description.devices, num_fsdp_shards=options.fsdp)
    params = module.abstract_params(config)
    shape = jax.ShapeDtypeStruct((options.rows, options.length), jnp.int32)
    batch = {"input_ids": shape, "labels": shape}
    optimizer = optax.adamw(1e-4, b2=0.95, weight_decay=0.1)
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False, optimizer=optimizer)
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optimizer,
        sharding_rules=rules,
        global_batch_size=options.rows,
        max_grad_norm=1.0,
        batch=batch,
    )
    return plan.compile()


def compile_maxtext(options: argparse.Namespace) -> Any:
    """Compile what `maxtext.trainers.pre_train.train_compile` compiles."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    import jax
    from jax.experimental import xla_metadata

    # A newer JAX has it; it names what the step of this model does not use.
    if not hasattr(xla_metadata, "must_fuse_call"):
        xla_metadata.must_fuse_call = None
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train_compile

    from redco_flow.engine.compiler_options import TPU_OPTIONS

    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in TPU_OPTIONS.items())
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    where = Path(pyconfig.__file__).parent / "base.yml"
    config = pyconfig.initialize([
        "train_compile", str(where), "model_name=llama3-8b", "override_model_config=true",
        f"base_num_decoder_layers={options.layers}",
        f"compile_topology={MAXTEXT_TOPOLOGIES[options.target]}", "compile_topology_num_slices=1",
        f"per_device_batch_size={options.rows / 8}", f"max_target_length={options.length}",
        f"ici_fsdp_parallelism={options.fsdp}", f"ici_tensor_parallelism={options.model}",
        "remat_policy=full", "attention=flash",
        "enable_checkpointing=false", "dataset_type=synthetic", "run_name=peer",
        f"compile_xla_flags={flags}", "base_output_directory=", "skip_jax_distributed_system=true",
    ])  # fmt: skip
    compiled: list[Any] = []
    original = train_compile.jit_and_compile

    def keeping(*arguments: Any, **named: Any) -> Any:
        compiled.append(original(*arguments, **named))
        return compiled[0]

    train_compile.jit_and_compile = keeping
    train_compile.pyconfig.initialize = lambda _argv: config
    train_compile.main([])
    return compiled[0]


def compile_tunix(options: argparse.Namespace) -> Any:
    """Compile what `tunix.sft.peft_trainer.PeftTrainer` runs for full finetuning."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tunix.models.llama3 import model as llama3
    from tunix.sft import peft_trainer, utils

    from redco_flow.engine.compiler_options import TPU_OPTIONS

    slice_ = topologies.get_topology_desc(TOPOLOGIES[options.target], platform="tpu")
    mesh = Mesh(np.array(slice_.devices).reshape(options.fsdp, -1), ("fsdp", "tp"))

    def constrain(x: Any, axes: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    # Its own does nothing where JAX's devices are CPUs, and only they are there.
    llama3.shard = constrain
    config = dataclasses.replace(
        llama3.ModelConfig.llama3p1_8b(),
        num_layers=options.layers,
        remat_config=llama3.RematConfig.DECODER,
    )

    def make() -> Any:
        model = llama3.Llama3(config, rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
        transform = optax.adamw(1e-4, b2=0.95, weight_decay=0.1)
        return model, nnx.Optimizer(model, transform, wrt=nnx.Param)

    def inputs_of(tokens: Any) -> dict[str, Any]:
        mask = tokens != 0
        return {
            "input_tokens": tokens,
            "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    trainer = types.SimpleNamespace(
        gen_model_input_fn=inputs_of, loss_fn=peft_trainer._default_loss_fn,
        _lora_enabled=False, _has_aux=False,
    )  # fmt: skip
    (model_graph, model_state), (optimizer_graph, optimizer_state) = map(
        nnx.split, nnx.eval_shape(make)
    )

    def step(model_state: Any, optimizer_state: Any, tokens: Any) -> Any:
        model = nnx.merge(model_graph, model_state)
        optimizer = nnx.merge(optimizer_graph, optimizer_state)
        told = peft_trainer.PeftTrainer._train_step(trainer, model, optimizer, tokens)
        return nnx.state(model), nnx.state(optimizer), told

    def on_mesh(state: Any) -> Any:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            nnx.get_named_sharding(state, mesh),
        )

    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    tokens = jax.ShapeDtypeStruct((options.rows, options.length), jnp.int32, sharding=rows)
    jitted = jax.jit(step, donate_argnums=1)
    lowered = jitted.lower(on_mesh(model_state), on_mesh(optimizer_state), tokens)
    return lowered.compile(TPU_OPTIONS)


def cost_of(compiled: Any) -> dict[str, Any]:
    """Return what a step multiplies, moves, sends and takes on one device."""
    import hlo_cost

    from redco_flow.engine.step.traffic import wire_bytes

    text, memory = compiled.as_text(), compiled.memory_analysis()
    program = hlo_cost.Program(text)
    state = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "flops": program.flops(),
        "kernels": program.kernels(),
        "hbm_bytes": program.hbm_bytes(),
        "wire_bytes": wire_bytes(text),
        "peak_bytes": state - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compile one side in this process."""
    started = time.monotonic()
    compile_side = {"ours": compile_ours, "maxtext": compile_maxtext, "tunix": compile_tunix}
    compiled = compile_side[options.side](options)
    seconds = time.monotonic() - started
    if options.keep_hlo:
        Path(options.keep_hlo).write_text(compiled.as_text(), encoding="utf-8")
    cost = cost_of(compiled)
    flops_per_s, hbm_per_s, wire_per_s = CHIPS[options.target]
    on_chip = max(cost["flops"] / flops_per_s, cost["hbm_bytes"] / hbm_per_s)
    roofline = on_chip + cost["wire_bytes"] / wire_per_s
    return {"side": options.side, "compile_s": round(seconds, 1), "roofline_s": roofline, **cost}


def make_environment(peer: str, python: str, directory: Path) -> Path:
    """Return the interpreter of an environment with the peer in it."""
    interpreter = directory / peer / "bin" / "python"
    if interpreter.exists():
        return interpreter
    uv = shutil.which("uv") or "uv"
    install = [uv, "pip", "install", "--quiet", "--python", str(interpreter)]
    subprocess.run([uv, "venv", "--quiet", "--python", python, str(directory / peer)], check=True)
    subprocess.run([*install, *PACKAGES[peer]], check=True)
    if peer in WITHOUT_DEPENDENCIES:
        subprocess.run([*install, "--no-deps", *WITHOUT_DEPENDENCIES[peer]], check=True)
    return interpreter


def run_side(side: str, interpreter: Path | str) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    command = [str(interpreter), __file__, *sys.argv[1:], "--side", side]
    # A peer's environment has none of ours; what counts is all it takes of it.
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths.rstrip(os.pathsep)},
    )  # fmt: skip
    if done.returncode != 0:
        return {"side": side, "left_out": f"it ended with {done.returncode}; see above"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TOPOLOGIES), default="v5p")
    parser.add_argument("--fsdp", type=int, default=8)
    parser.add_argument("--model", type=int, default=1, help="shards; fsdp x model is 8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16, help="of a global batch")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--peers", nargs="*", choices=sorted(PACKAGES), default=["maxtext"])
    parser.add_argument("--python", default="3.12", help="interpreter of the peers' environments")
    parser.add_argument("--environments", type=Path, help="keep and reuse environments here")
    parser.add_argument("--keep-hlo", help="write the optimised program's text here")
    parser.add_argument("--side", choices=["ours", *sorted(PACKAGES)], help=argparse.SUPPRESS)
    options = parser.parse_args()
    compile_targets.set_environment("tpu", 1)
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    if options.side:
        print(json.dumps(measure(options)))
        return
    ours = run_side("ours", sys.executable)
    print(json.dumps(ours), flush=True)
    ratios = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.environments or Path(temporary)
        for peer in options.peers:
            try:
                theirs = run_side(peer, make_environment(peer, options.python, directory))
            except (OSError, subprocess.CalledProcessError) as error:
                theirs = {"side": peer, "left_out": f"its environment cannot be made: {error}"}
            print(json.dumps(theirs), flush=True)
            if "left_out" not in theirs and "left_out" not in ours:
                ratios[peer] = {name: ours[name] / theirs[name] for name in COUNTED}
    print(json.dumps({"target": options.target, "ours_over": ratios}))


if __name__ == "__main__":
    main()
