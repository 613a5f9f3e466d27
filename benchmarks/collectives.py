"""Bytes that a train step sends between model shards, against the optimum in closed form.

    python benchmarks/collectives.py --model llama [--num-model-shards 4] [--all] [--target tpu]
        [--remat full]

Compiles the whole train step (loss, gradients, clipping, AdamW) of a model of real proportions for
CPU devices (or for TPUs or GPUs that need not be there: `compile_targets.py`), from shapes alone,
and adds up the collectives in the optimised HLO (all-reduce counts 2(n-1)/n of its bytes,
all-gather and reduce-scatter (n-1)/n; what a scan's body sends counts once per layer). The optimum
is Megatron's: per decoder layer four all-reduces of an activation (two where attention and
feed-forward run in parallel), six and one of the source for a decoder layer with cross-attention,
one per embedding lookup and one for the head's input gradient; with `--remat full` families reduce
once more what their layers' own backward passes read. `--all` prints one line per model at 2, 4 and
8 shards. Prints one JSON line last.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compile_targets import TARGETS, find_devices, set_environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.engine.traffic
COMPILED_FOR = next((name for name in TARGETS if name in sys.argv), "cpu")
set_environment(COMPILED_FOR, num_cpu_devices=8)
REMAT = "full" if "full" in sys.argv else "none"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fused_models import FusedModel, GatedBlock
from user_model import Block, SeparateBlock, UserModel

from redco_flow import Deployer
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.training_plan import StepMemory, TrainingPlan, step_memory
from redco_flow.models.find import find_model
from tests.engine.traffic import read_collectives

BATCH, SOURCE, TARGET = 8, 512, 256
LAYERS, WIDTH, HEADS, HIDDEN = 4, 1024, 16, 4096
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Case:
    """A model, and the activations (in sequence positions) that its step must reduce.

    Args:
        loss_fn: (params, batch, rngs, is_training) -> totals and weights.
        batch: shapes of one micro-batch.
        positions: how many positions of WIDTH floats are reduced, per example.
    """

    params: Any
    loss_fn: Callable[..., Any]
    batch: dict[str, Any]
    positions: int


def ids(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((BATCH, length), jnp.int32)


def decoder(family: str, reductions_per_layer: int = 4, **values: Any) -> Case:
    """A decoder-only model; two further reductions are the lookup's and the head's."""
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values}, remat=REMAT)
    # An encoder's stands in its stack.
    reductions_per_layer += num_repeated(getattr(config.core, "stack", config.core))

    def loss_fn(params, batch, rngs, is_training):
        return cross_entropy(module.apply(config, params, batch["input_ids"]), batch["labels"])

    batch = {"input_ids": ids(SOURCE), "labels": ids(SOURCE)}
    positions = (LAYERS * reductions_per_layer + 2) * SOURCE
    return Case(module.abstract_params(config), loss_fn, batch, positions)


def num_repeated(stack: Any) -> int:
    """Return how many results of a layer full rematerialisation would reduce again.

    What nothing but the next layer's input is computed from is not.
    """
    if stack.remat != "full" or stack.is_parallel:
        return 0
    return (1 if stack.norm_placement == "pre" else 2) + (stack.cross_attention is not None)


def encoder_decoder(family: str, **values: Any) -> Case:
    """T5 or BART: two lookups, eleven reductions per pair of layers, the head."""
    module = find_model(family)
    config = module.Config.from_hugging_face({"model_type": family, **values}, remat=REMAT)
    repeated = (num_repeated(stack) for stack in (config.core.encoder, config.core.decoder))
    of_source, of_target = (again + first for again, first in zip(repeated, (5, 6), strict=True))

    def loss_fn(params, batch, rngs, is_training):
        mask = jnp.ones_like(batch["input_ids"])
        logits = module.apply(config, params, batch["input_ids"], mask, batch["decoder_input_ids"])
        return cross_entropy(logits, batch["labels"])

    batch = {"input_ids": ids(SOURCE), "decoder_input_ids": ids(TARGET), "labels": ids(TARGET)}
    positions = LAYERS * (of_source * SOURCE + of_target * TARGET) + SOURCE + 2 * TARGET
    return Case(module.abstract_params(config), loss_fn, batch, positions)


def gpt2() -> Case:
    return decoder(
        "gpt2", vocab_size=50257, n_positions=SOURCE, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        n_inner=HIDDEN, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def gptj() -> Case:
    return decoder(
        "gptj", 2, vocab_size=50400, n_positions=SOURCE, n_embd=WIDTH, n_layer=LAYERS,
        n_head=HEADS, n_inner=HIDDEN, rotary_dim=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip


def opt() -> Case:
    return decoder(
        "opt", vocab_size=50272, max_position_embeddings=SOURCE, hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        ffn_dim=HIDDEN, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def llama(num_kv_heads: int = HEADS) -> Case:
    return decoder(
        "llama", vocab_size=32000, max_position_embeddings=SOURCE, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=HIDDEN,
        num_key_value_heads=num_kv_heads, tie_word_embeddings=False,
    )  # fmt: skip


def mixtral() -> Case:
    """Two of eight experts to a token; their choice is made on every shard."""
    return decoder(
        "mixtral", vocab_size=32000, max_position_embeddings=SOURCE, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=HIDDEN,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        tie_word_embeddings=False,
    )  # fmt: skip


def t5(form: str = "gated-gelu") -> Case:
    """Version 1.1, or with `relu` and a tied head 1.0."""
    return encoder_decoder(
        "t5", vocab_size=32128, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=HIDDEN,
        num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0, feed_forward_proj=form,
        tie_word_embeddings=form == "relu",
    )  # fmt: skip


def bart() -> Case:
    return encoder_decoder(
        "bart", vocab_size=50265, d_model=WIDTH, max_position_embeddings=SOURCE,
        encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=HIDDEN, decoder_ffn_dim=HIDDEN,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip


def bert() -> Case:
    return decoder(
        "bert", vocab_size=30522, max_position_embeddings=SOURCE, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=HIDDEN,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def renamed() -> Case:
    """LLaMA with grouped queries whose parameters have meaningless names."""
    case = llama(8)
    leaves, structure = jax.tree.flatten(case.params)
    order = np.random.default_rng(0).permutation(len(leaves))
    names = [f"{'abcdefgh'[place % 8]}{place}" for place in order]

    def loss_fn(params, *rest):
        original = jax.tree.unflatten(structure, [params[name] for name in names])
        return case.loss_fn(original, *rest)

    return Case(dict(zip(names, leaves, strict=True)), loss_fn, case.batch, case.positions)


def user(block: Callable[..., nn.Module] = Block) -> Case:
    """`user_model.py`, whose author thought of no device."""
    return of_module(UserModel(32000, WIDTH, LAYERS, HEADS, block), 4)


def user_bf16() -> Case:
    """Flax's own attention with products in bfloat16: reductions of a layer are half as wide."""
    block = partial(SeparateBlock, dtype=jnp.bfloat16)
    return of_module(UserModel(32000, WIDTH, LAYERS, HEADS, block), 2)


def fused(**values: Any) -> Case:
    """`fused_models.py`: kernels whose parts are taken apart after the product.

    Scanned layers are rematerialised, and the backward pass repeats the reduction after attention.
    """
    module = FusedModel(32000, WIDTH, LAYERS, HEADS, **values)
    return of_module(module, 5 if module.is_scanned else 4)


def of_module(module: nn.Module, reductions_per_layer: int) -> Case:
    """A user's module: token ids to logits."""
    tokens = jnp.zeros((1, SOURCE), jnp.int32)
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), tokens)["params"])

    def loss_fn(params, batch, rngs, is_training):
        logits = module.apply({"params": params}, batch["input_ids"])
        return cross_entropy(logits, batch["labels"])

    batch = {"input_ids": ids(SOURCE), "labels": ids(SOURCE)}
    return Case(params, loss_fn, batch, (LAYERS * reductions_per_layer + 2) * SOURCE)


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "llama_gqa": partial(llama, 8),
    # Fewer key-value heads than shards: their kernels are replicated.
    "llama_gqa_2": partial(llama, 2),
    "mixtral": mixtral,
    "gpt2": gpt2,
    "gptj": gptj,
    "opt": opt,
    "bart": bart,
    "t5": t5,
    "t5_v1.0": partial(t5, "relu"),
    "bert": bert,
    "renamed": renamed,
    "user": user,
    "user_separate": partial(user, SeparateBlock),
    "user_separate_gelu": partial(user, partial(SeparateBlock, is_gated=False)),
    "user_fused": partial(fused, num_kv_heads=HEADS),
    "user_fused_scan": partial(fused, num_kv_heads=HEADS, is_scanned=True, is_tied=False),
    "user_fused_gqa": partial(fused, num_kv_heads=8, block=GatedBlock, is_tied=False),
    "user_fused_gqa_scan": partial(fused, num_kv_heads=8, block=GatedBlock, is_scanned=True),
}
if COMPILED_FOR != "cpu":
    # XLA:CPU reduces bfloat16 as float32.
    CASES["user_separate_bf16"] = user_bf16


def compile_step(case: Case, num_model_shards: int) -> tuple[str, StepMemory]:
    """Return the optimised HLO of the whole train step on one group of model shards, its memory."""
    deployer = Deployer(num_model_shards, devices=find_devices(COMPILED_FOR, num_model_shards))
    rules = deployer.get_sharding_rules(case.params, case.loss_fn, case.batch, None, False)
    plan = TrainingPlan(
        deployer,
        loss_fn=case.loss_fn,
        params=case.params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules,
        global_batch_size=BATCH,
        max_grad_norm=1.0,
        batch=case.batch,
    )
    compiled = plan.compile()
    return compiled.as_text(), step_memory(compiled)


def measure(name: str, num_model_shards: int) -> dict[str, Any]:
    case = CASES[name]()
    program, memory = compile_step(case, num_model_shards)
    found = read_collectives(program)
    share = (num_model_shards - 1) / num_model_shards
    optimum = 2 * share * case.positions * BATCH * WIDTH * FLOAT_BYTES
    num_bytes = sum(one.wire_bytes for one in found)
    return {
        "model": name,
        "target": COMPILED_FOR,
        "remat": REMAT,
        "num_model_shards": num_model_shards,
        "bytes": round(num_bytes),
        "optimum_bytes": round(optimum),
        "ratio": round(num_bytes / optimum, 4),
        "state_bytes": memory.aliased,
        "temporary_bytes": memory.temporaries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CASES), default="llama")
    parser.add_argument("--num-model-shards", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--all", action="store_true", help="every model at 2, 4 and 8 shards")
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="whose compiler")
    parser.add_argument("--remat", choices=("none", "full"), default="none", help="of families")
    options = parser.parse_args()
    if not options.all:
        print(json.dumps(measure(options.model, options.num_model_shards)))
        return
    found = []
    for name in CASES:
        for num_model_shards in (2, 4, 8):
            found.append(measure(name, num_model_shards))
            print(json.dumps(found[-1]), flush=True)
    largest = max(one["ratio"] for one in found)
    print(json.dumps({"models": len(CASES), "target": COMPILED_FOR, "largest_ratio": largest}))


if __name__ == "__main__":
    main()
