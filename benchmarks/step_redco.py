"""Upstream Redco's training loop, timed on demand; `train_step.py` starts it in its environment.

    uv venv redco-env
    uv pip install --python redco-env/bin/python redco==0.4.23 transformers==4.57.6
    python benchmarks/train_step.py --redco-python redco-env/bin/python

Reads a line from standard input, trains one epoch, prints the seconds it took; ends with the input.
Its model is transformers' Flax class of the same config (LLaMA and GPT-2 in Flax, T5 v1.1).
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import optax
import transformers
from redco import Deployer, Trainer
from step_models import BATCH, CONFIGS, collate, make_examples

CLASSES = {
    "gpt2": ("GPT2Config", "FlaxGPT2LMHeadModel"),
    "llama": ("LlamaConfig", "FlaxLlamaForCausalLM"),
    "t5": ("T5Config", "FlaxT5ForConditionalGeneration"),
}
# It clips with an argument that newer jax.numpy.clip no longer has.
_clip = jnp.clip


def clip(array, a_min=None, a_max=None, **limits):
    return _clip(array, limits.get("min", a_min), limits.get("max", a_max))


def loss_fn(rng, state, params, batch, is_training, model):
    if model == "t5":
        ids = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["decoder_input_ids"]}
        logits, labels = state.apply_fn(**ids, params=params).logits, batch["labels"]
    else:
        logits = state.apply_fn(input_ids=batch["input_ids"], params=params).logits[:, :-1]
        labels = batch["labels"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(name: str, num_model_shards: int, num_steps: int) -> None:
    jnp.clip = clip
    config_class, model_class = (getattr(transformers, one) for one in CLASSES[name])
    model = model_class(config_class(**CONFIGS[name]), seed=0)
    deployer = Deployer(jax_seed=0, n_model_shards=num_model_shards, verbose=False)
    trainer = Trainer(
        deployer=deployer,
        collate_fn=partial(collate, name),
        apply_fn=model,
        loss_fn=partial(loss_fn, model=name),
        params=model.params,
        optimizer=optax.adamw(1e-3),
        params_sharding_rules=deployer.get_sharding_rules(params_shape_or_params=model.params),
    )
    examples = make_examples(name, num_steps)
    for _ in sys.stdin:
        start = time.perf_counter()
        trainer.train(examples=examples, per_device_batch_size=BATCH[name])
        jax.block_until_ready(trainer._state.params)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
