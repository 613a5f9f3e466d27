"""Train and predict with three functions, on as many devices as there are.

    python docs/template.py                                     # all devices, data parallel
    python docs/template.py --num-model-shards 4                # each model over four of them

A small Flax model learns to spell words backwards. Whatever the model is, `collate_fn`,
`loss_fn` and `pred_fn` are all that has to be written: there is no code for devices in them.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow import Deployer, Predictor, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.step.loss import cross_entropy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 8
PAD = 0


class Speller(nn.Module):
    """A transformer block over letters: (batch, LENGTH) ids to (batch, LENGTH, 32) logits."""

    @nn.compact
    def __call__(self, ids):
        is_letter = ids != PAD
        # How far each position is from the word's end says where its letter has to go.
        from_end = jnp.where(is_letter, jnp.cumsum(is_letter[:, ::-1], axis=1)[:, ::-1], 0)
        x = nn.Embed(32, 64)(ids) + nn.Embed(LENGTH, 64)(jnp.arange(LENGTH))
        x = x + nn.Embed(LENGTH + 1, 64)(from_end)
        mask = nn.make_attention_mask(is_letter, is_letter)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(32)(nn.LayerNorm()(x))


model = Speller()


def to_ids(word):
    ids = [LETTERS.index(letter) + 1 for letter in word]
    return ids + [PAD] * (LENGTH - len(ids))


def to_word(ids):
    return "".join(LETTERS[i - 1] for i in ids if 1 <= i <= len(LETTERS))


def collate_fn(examples):
    """Examples to NumPy arrays, whose first dim is the number of examples."""
    return {
        "ids": np.array([to_ids(e["word"]) for e in examples], np.int32),
        "labels": np.array([to_ids(e["word"][::-1]) for e in examples], np.int32),
    }


def loss_fn(params, batch, rngs, is_training):
    """A total and a weight per example: the loss is the mean over letters, on any devices."""
    logits = model.apply({"params": params}, batch["ids"])
    return cross_entropy(logits, jnp.where(batch["labels"] == PAD, -100, batch["labels"]))


def pred_fn(params, batch, rngs):
    """Predicted ids of each example."""
    logits = model.apply({"params": params}, batch["ids"])
    return jnp.where(batch["ids"] == PAD, PAD, logits.argmax(axis=-1))


class Print(Callback):
    def on_eval(self, record):
        print(f"step {record['step']:4d}  eval loss {record['eval_loss']:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-model-shards", type=int, default=1)
    parser.add_argument("--num-epochs", type=int, default=4)
    arguments = parser.parse_args()

    source = np.random.default_rng(0)
    lengths = source.integers(3, LENGTH + 1, size=2200)
    words = ["".join(source.choice(list(LETTERS), size)) for size in lengths]
    train = [{"word": word} for word in words[:2000]]
    test = [{"word": word} for word in words[2000:]]

    deployer = Deployer(arguments.num_model_shards, seed=0)
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    # Read off what the loss computes: nothing about the model has to be declared.
    rules = deployer.get_sharding_rules(params, loss_fn, collate_fn(train[:2]), None, False)
    print(rules.explain())

    trainer = Trainer(
        deployer,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(3e-3),
        sharding_rules=rules,
        global_batch_size=64,
        max_grad_norm=1.0,
    )
    trainer.fit(train, num_epochs=arguments.num_epochs, eval_examples=test, callbacks=[Print()])

    predictor = Predictor(
        deployer,
        collate_fn=collate_fn,
        pred_fn=pred_fn,
        output_fn=lambda rows: [to_word(ids) for ids in rows],
        sharding_rules=rules,
        batch_size=64,
    )
    predictions = predictor.predict(test, trainer.state["params"])
    correct = sum(p == e["word"][::-1] for p, e in zip(predictions, test, strict=True))
    print(f"{test[0]['word']} backwards: {predictions[0]}")
    print(f"exact match {correct / len(test):.3f}")


if __name__ == "__main__":
    main()
