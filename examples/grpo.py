"""GRPO with a rule as its reward: a tiny language model learns to add by trial and error.

    redco-flow run pipelines/grpo.yaml                 # as a stage: tracked, tried again, resumed
    python examples/grpo.py --num_rounds 5             # by hand: everything below out/

Shao et al. 2024 (DeepSeekMath), section 4.1. The model first reads worked sums until it is right at
times. Then it answers each question several times, and the advantage of an answer is how much
better than its group's mean the rule finds it: no network estimates values.
"""

import argparse
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from redco_flow import Deployer, Predictor, Rounds, Trainer, script_context

CHARACTERS = "0123456789+="
NUM_QUESTION, NUM_ANSWER = 6, 3  # characters of "07+25=" and "230", 32 from its last digit on
CLIP = 0.2  # how far the ratio of probabilities may move
KL_WEIGHT = 0.01  # of the divergence from the model that has only read
WIDTH = 64
NUM_WORKED, NUM_TEST = 1024, 512


class Decoder(nn.Module):
    """Logits (B, T, characters) of the characters that follow ids (B, T)."""

    @nn.compact
    def __call__(self, ids):
        places = nn.Embed(NUM_QUESTION + NUM_ANSWER, WIDTH)(jnp.arange(ids.shape[1]))
        x = nn.Embed(len(CHARACTERS), WIDTH)(ids) + places
        for _ in range(2):
            mask = nn.make_causal_mask(ids)
            attend = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
            x += attend(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(len(CHARACTERS))(nn.LayerNorm()(x))


MODEL = Decoder()


def reward(ids):
    """The rule: 1 for a text like "07+25=230" whose sum, read backwards, is right, else 0."""
    question, _, answer = "".join(CHARACTERS[i] for i in ids).partition("=")
    return float(answer.isdigit() and int(answer[::-1]) == sum(map(int, question.split("+"))))


def collate_texts(texts):
    return {"ids": np.array([[CHARACTERS.index(c) for c in text] for text in texts], np.int32)}


def collate_rows(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def forward(params, ids):
    """Log probabilities (B, NUM_ANSWER, characters) of the answers that end ids."""
    logits = MODEL.apply(params, ids[:, :-1])
    return jax.nn.log_softmax(logits[:, NUM_QUESTION - 1 :])


def score(params, batch, rngs=None):
    """Log probabilities (B, NUM_ANSWER) of the answers' characters."""
    answers = batch["ids"][:, NUM_QUESTION:, None]
    return jnp.take_along_axis(forward(params, batch["ids"]), answers, axis=2)[..., 0]


def make_answer_fn(is_greedy):
    def answer(params, batch, rngs):
        """Answer questions (B, NUM_QUESTION) character by character."""
        ids = jnp.pad(batch["ids"], ((0, 0), (0, NUM_ANSWER)))
        for place in range(NUM_ANSWER):
            log_probs = forward(params, ids)[:, place]
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, place)
            drawn = jax.vmap(jax.random.categorical)(keys, log_probs)
            chosen = jnp.argmax(log_probs, axis=1) if is_greedy else drawn
            ids = ids.at[:, NUM_QUESTION + place].set(chosen)
        return {"ids": ids, "log_probs": score(params, {"ids": ids})}

    return answer


def reading_loss(params, batch, rngs, is_training):
    losses = -jnp.mean(score(params, batch), axis=1)
    return losses, jnp.ones_like(losses)


def loss_fn(params, batch, rngs, is_training):
    """The clipped objective, and the divergence from the reference, of an answer's characters."""
    log_probs = score(params, batch)
    ratio = jnp.exp(log_probs - batch["log_probs"])
    advantage = batch["advantage"][:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    apart = batch["reference"] - log_probs
    divergence = jnp.exp(apart) - apart - 1  # never negative, and right on average
    losses = jnp.mean(KL_WEIGHT * divergence - gain, axis=1)
    measures = {"kl": jnp.mean(divergence, axis=1), "reward": batch["reward"]}
    return losses, jnp.ones_like(losses), measures


def make_collect(answerer, score_by_reference, questions, num_questions, num_answers, seed):
    """Collect a round: several answers to each of some questions, with their advantages."""

    def collect(params, number, carry):
        rng = np.random.default_rng([seed, number])
        chosen = np.repeat(rng.choice(questions, num_questions, replace=False), num_answers)
        columns = answerer.bind(params)(collate_texts(chosen), seed=number)
        columns["reference"] = score_by_reference({"ids": columns["ids"]})
        columns["reward"] = np.array([reward(ids) for ids in columns["ids"]], np.float32)
        groups = columns["reward"].reshape(num_questions, num_answers)
        spread = groups.std(axis=1, keepdims=True) + 1e-4
        columns["advantage"] = ((groups - groups.mean(axis=1, keepdims=True)) / spread).ravel()
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows], carry

    return collect


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share_before", type=float, default=0.2, help="right, when reading ends")
    parser.add_argument("--num_rounds", type=int, default=100)
    parser.add_argument("--num_questions", type=int, default=64, help="of a round")
    parser.add_argument("--num_answers", type=int, default=8, help="to each question")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    pairs = np.random.default_rng(arguments.seed).permutation(10_000)
    test, train = np.split(np.array([f"{n // 100:02}+{n % 100:02}=" for n in pairs]), [NUM_TEST])
    sums = [f"{n // 100 + n % 100:03}"[::-1] for n in pairs]
    worked = [q + a for q, a in zip(train[:NUM_WORKED], sums[NUM_TEST:], strict=False)]

    batch = collate_texts(worked[:2])
    params = jax.jit(MODEL.init)(jax.random.key(arguments.seed), batch["ids"])
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    common = {"deployer": deployer}
    common["sharding_rules"] = deployer.get_sharding_rules(params, score, batch)
    num_examples = arguments.num_questions * arguments.num_answers
    predicting = {"collate_fn": collate_texts, "batch_size": num_examples, **common}
    examiner = Predictor(pred_fn=make_answer_fn(is_greedy=True), **predicting)
    answerer = Predictor(pred_fn=make_answer_fn(is_greedy=False), **predicting)
    scorer = Predictor(pred_fn=score, **predicting)

    def evaluate(params, step):
        answers = examiner.bind(params)(collate_texts(test))
        return {"right": np.mean([reward(ids) for ids in answers["ids"]])}

    reading = {"loss_fn": reading_loss, "collate_fn": collate_texts, "optimizer": optax.adam(1e-3)}
    reader = Trainer(params=params, global_batch_size=128, **reading, **common)
    before, num_epochs = 0.0, 0
    while before < arguments.share_before:
        num_epochs += 1
        reader.fit(worked, num_epochs=num_epochs, log_every_steps=1000)
        before = evaluate(reader.state["params"], reader.step)["right"]

    reference = reader.state["params"]
    numbers = arguments.num_questions, arguments.num_answers, arguments.seed
    collect = make_collect(answerer, scorer.bind(reference), train, *numbers)
    # Adam's first updates are as large as its rate, however noisy the gradients.
    optimizer = optax.adam(optax.linear_schedule(0.0, arguments.learning_rate, 20))
    options = {"global_batch_size": num_examples // 2, "max_grad_norm": 1.0, **common}
    trained = {"loss_fn": loss_fn, "collate_fn": collate_rows, "params": reference}
    trainer = Trainer(optimizer=optimizer, **trained, **options)
    options = {"eval_every_steps": 20, "log_every_steps": 20, **script.fit_options()}
    rounds = Rounds(collect, num_examples)
    result = trainer.fit(rounds, num_epochs=arguments.num_rounds, eval_fn=evaluate, **options)

    commonest = Counter(sums[NUM_TEST:]).most_common(1)[0][0]
    always = float(np.mean([answer == commonest for answer in sums[:NUM_TEST]]))
    after = result.metrics["right"]
    script.metrics(right=after, right_before=before, right_of_commonest=always)
    print(f"right answers: {after:.3f}, {before:.3f} before GRPO, ", end="")
    print(f"{always:.3f} of always {commonest}.")

    arguments.params.mkdir(parents=True, exist_ok=True)
    arrays = flatten_dict(jax.tree.map(np.asarray, trainer.state["params"]), sep=".")
    np.savez(arguments.params / "params.npz", **arrays)


if __name__ == "__main__":
    main()
