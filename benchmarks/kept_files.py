"""Modules of `redco_flow.models` kept for their speed, each against the plain JAX it replaces.

    python benchmarks/kept_files.py --file projections|grouped_product|decoding_layers
        [--models t5 gpt2] [--rounds 7] [--repeats 1]

Compiles one program twice, as it is and with the plain way in the module's place, and runs both in
turns, so that a busy machine slows both. The programs are what users wait for: a training step, or
64 new tokens by greedy search and by four beams. Prints one JSON line per program: median and
quartiles over rounds of the plain way's time over ours, by the clock and by CPU time, and the
temporary memory of ours and of the plain way in MiB.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from functools import partial
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_models import CONFIGS, VOCAB, collate, make_examples

from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models import projections
from redco_flow.models.feed_forward import experts
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate
from redco_flow.models.transformer import decoder_model, encoder_decoder_model

MIXTRAL = CONFIGS["llama"] | {
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 704, "num_key_value_heads": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
NEW_TOKENS = 64


def multiply_plainly(num_contracted, dtype, x, kernel):
    """The product with the backward pass that differentiation gives."""
    return jnp.tensordot(x, kernel, num_contracted, preferred_element_type=dtype)


def multiply_groups_plainly(x, kernels, ends):
    """`jax.lax.ragged_dot`."""
    flat = kernels.reshape(*kernels.shape[:2], -1)
    rows = jax.lax.ragged_dot(x, flat, jnp.diff(ends, prepend=0))
    return rows.reshape(len(x), *kernels.shape[2:])


STACKED = ("unstack_where_faster", lambda layers: layers)
# module: the models measured, and what the plain way puts in whose place
PLAIN = {
    "projections": (["t5", "gpt2", "llama"], [(projections, "_product", multiply_plainly)]),
    "grouped_product": (["mixtral"], [(experts, "grouped_product", multiply_groups_plainly)]),
    "decoding_layers": (
        ["t5", "gpt2", "llama"],
        [(decoder_model, *STACKED), (encoder_decoder_model, *STACKED)],
    ),
}


def training_step(name: str):
    """One optimizer step, and its arguments."""
    module, values = find_model(name), CONFIGS.get(name, MIXTRAL)
    config = module.Config.from_hugging_face({"model_type": name, **values})
    params = module.init_params(config, jax.random.key(0))
    kind = "llama" if name == "mixtral" else name
    batch = collate(kind, make_examples(kind, 1))
    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        def mean_loss(params):
            given = [batch["input_ids"]]
            if name == "t5":
                given += [jnp.ones_like(batch["input_ids"]), batch["decoder_input_ids"]]
            logits = module.apply(config, params, *given)
            totals, weights = cross_entropy(logits, batch["labels"])
            return totals.sum() / weights.sum()

        loss, gradients = jax.value_and_grad(mean_loss)(state[0])
        updates, opt_state = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    return step, ((params, optimizer.init(params)), batch)


def generation(name: str, num_beams: int):
    """A search for new tokens, and its arguments."""
    module = find_model(name)
    values = CONFIGS[name] | ({"n_positions": 256} if name == "gpt2" else {})
    values |= {"max_position_embeddings": 256} if name == "llama" else {}
    config = module.Config.from_hugging_face({"model_type": name, **values})
    params = module.init_params(config, jax.random.key(0))
    ids = np.random.default_rng(0).integers(3, VOCAB, (16, 64), dtype=np.int32)
    search = partial(generate, module, config, max_new_tokens=NEW_TOKENS, num_beams=num_beams)
    return search, (params, ids, np.ones_like(ids))


def programs(file: str, models: list[str]):
    for name in models:
        if file == "decoding_layers":
            for search, num_beams in (("greedy", 1), ("4 beams", 4)):
                yield f"{name} {search}", generation(name, num_beams)
        else:
            yield f"{name} step", training_step(name)


def seconds(program, arguments, repeats: int) -> tuple[float, float]:
    """By the clock, and of all cores together."""
    start = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(function, arguments, plain, options) -> dict[str, object]:
    compiled = []
    for patches in ([], plain):
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            # Another function each time, or what was traced first would be found again.
            traced = jax.jit(lambda *arguments: function(*arguments))
            compiled.append(traced.lower(*arguments).compile())
    for program in compiled:
        seconds(program, arguments, 1)
    turns = []
    for _ in range(options.rounds):
        ours, theirs = (seconds(program, arguments, options.repeats) for program in compiled)
        turns.append([b / a for a, b in zip(ours, theirs, strict=True)])
    found: dict[str, object] = {}
    for kind, ratios in zip(("clock", "cpu"), zip(*turns, strict=True), strict=True):
        low, middle, high = (round(each, 3) for each in statistics.quantiles(ratios, n=4))
        found |= {kind: middle, f"{kind}_quartiles": [low, high]}
    memory = [round(each.memory_analysis().temp_size_in_bytes / 2**20, 1) for each in compiled]
    return found | {"ms": round(1e3 * ours[0] / options.repeats), "mib_ours_plain": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", choices=sorted(PLAIN), required=True)
    parser.add_argument("--models", nargs="+", choices=["t5", "gpt2", "llama", "mixtral"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1, help="runs of a program in a turn")
    options = parser.parse_args()
    models, plain = PLAIN[options.file]
    for name, (function, arguments) in programs(options.file, options.models or models):
        found = measure(function, arguments, plain, options)
        print(json.dumps({"file": options.file, "program": name, **found}), flush=True)


if __name__ == "__main__":
    main()
