"""PPO on CartPole: a policy that balances a pole, learned from its own attempts.

    redco-flow run pipelines/ppo.yaml                  # as a stage: tracked, tried again, resumed
    python examples/ppo.py --num_rounds 5              # by hand: everything below out/

Schulman et al. 2017, algorithm 1. A round collects steps of several environments side by side with
the policy so far, then trains for some epochs on them. It begins with new episodes, so that it
follows from the parameters and its number alone, and a resumed training repeats it.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from redco_flow import Deployer, Predictor, Rounds, Trainer, script_context

DISCOUNT = 0.99
LAMBDA = 0.95  # of generalised advantage estimation
CLIP = 0.2  # how far the ratio of probabilities may move
VALUE_WEIGHT = 0.5
ENTROPY_WEIGHT = 0.01
BATCH_SIZE = 256
NUM_TEST_EPISODES, TEST_SEED = 32, 1_000_000
MAX_RETURN = 500
WIDTH = 64


class ActorCritic(nn.Module):
    """Logits (B, 2) of the actions, and values (B,), of observations (B, 4)."""

    @nn.compact
    def __call__(self, observation):
        def network(num_outputs, scale):
            x = observation
            for _ in range(2):
                x = nn.tanh(nn.Dense(WIDTH)(x))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(x)

        return network(2, 0.01), network(1, 1.0)[:, 0]


MODEL = ActorCritic()


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def collate_fn(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def estimate_advantages(reward, value, fell, ended):
    """Generalised advantage estimates (steps, environments).

    `value` has a step more. An episode that ended without a fall goes on, worth its last
    observation's value.
    """
    found, later = np.zeros_like(reward), np.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        error = reward[t] + DISCOUNT * value[t + 1] * ~fell[t] - value[t]
        found[t] = later = error + DISCOUNT * LAMBDA * later * ~ended[t]
    return found


def play(choose, num_envs, num_steps, seed):
    """Yield steps of environments side by side; `choose` acts on the t-th observations."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs)
    observation, _ = envs.reset(seed=seed)
    ended = np.zeros(num_envs, bool)
    for t in range(num_steps):
        step = {"observation": observation, **choose({"observation": observation}, t)}
        # The step after an episode's end only begins the next one.
        step["weight"] = 1 - ended.astype(np.float32)
        observation, step["reward"], step["fell"], cut, _ = envs.step(step["action"])
        step["ended"] = ended = step["fell"] | cut
        yield step


def mean_return(choose):
    alive, total = np.ones(NUM_TEST_EPISODES, bool), np.zeros(NUM_TEST_EPISODES)
    for step in play(choose, NUM_TEST_EPISODES, MAX_RETURN, TEST_SEED):
        total += step["reward"] * alive
        alive &= ~step["ended"]
        if not alive.any():
            break
    return float(total.mean())


def make_collect(predictor, num_envs, num_steps, seed):
    """Collect a round: `num_steps` steps of each environment, as examples."""

    def collect(params, number, carry):
        act, first = predictor.bind(params), number * (num_steps + 1)
        choose = lambda seen, t: act(seen, seed=first + t)  # noqa: E731
        # One more than are kept: its value is that of what follows the last.
        steps = list(play(choose, num_envs, num_steps + 1, 10_000 * seed + number))
        value, columns = collate_fn(steps)["value"], collate_fn(steps[:-1])
        del columns["likeliest"]
        ends = columns.pop("fell"), columns.pop("ended")
        advantage = estimate_advantages(columns.pop("reward"), value, *ends)
        columns["return"] = advantage + columns.pop("value")
        real = advantage[columns["weight"] > 0]
        columns["advantage"] = (advantage - real.mean()) / (real.std() + 1e-8)
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
        return rows_of(flat), carry

    return collect


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def loss_fn(params, batch, rngs, is_training):
    """The clipped objective, the value's squared error and the entropy's bonus, of each step."""
    logits, value = MODEL.apply(params, batch["observation"])
    ratio = jnp.exp(log_prob_of(logits, batch["action"]) - batch["log_prob"])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1)
    error = (value - batch["return"]) ** 2
    total = -gain + VALUE_WEIGHT * error - ENTROPY_WEIGHT * entropy
    weight = batch["weight"]
    return total * weight, weight, {"entropy": entropy * weight, "value_loss": error * weight}


def pred_fn(params, batch, rngs):
    """Draw actions; say their log probabilities, the likeliest ones, and the values."""
    logits, value = MODEL.apply(params, batch["observation"])
    action = jax.vmap(jax.random.categorical)(rngs, logits)
    said = {"action": action, "log_prob": log_prob_of(logits, action), "value": value}
    return {**said, "likeliest": jnp.argmax(logits, axis=1)}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_rounds", type=int, default=24)
    parser.add_argument("--num_epochs", type=int, default=8, help="on the examples of a round")
    parser.add_argument("--num_envs", type=int, default=16)
    parser.add_argument("--num_steps", type=int, default=128, help="of each environment, a round")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    num_examples = arguments.num_envs * arguments.num_steps
    round_steps = arguments.num_epochs * -(-num_examples // BATCH_SIZE)
    total_steps = arguments.num_rounds * round_steps
    schedule = optax.linear_schedule(arguments.learning_rate, 0.0, total_steps)

    observation = np.zeros((arguments.num_envs, 4), np.float32)
    params = jax.jit(MODEL.init)(jax.random.key(arguments.seed), observation)
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    rules = deployer.get_sharding_rules(params, MODEL.apply, observation)
    common = {"deployer": deployer, "collate_fn": collate_fn, "sharding_rules": rules}
    options = {"lr_schedule": schedule, "global_batch_size": BATCH_SIZE, "max_grad_norm": 0.5}
    optimizer = optax.adam(schedule)
    trainer = Trainer(loss_fn=loss_fn, params=params, optimizer=optimizer, **options, **common)
    predictor = Predictor(pred_fn=pred_fn, batch_size=arguments.num_envs, **common)

    def evaluate(params, step):
        act = predictor.bind(params)
        return {"mean_return": mean_return(lambda seen, t: {"action": act(seen)["likeliest"]})}

    collect = make_collect(predictor, arguments.num_envs, arguments.num_steps, arguments.seed)
    result = trainer.fit(
        Rounds(collect, num_examples, epochs_per_round=arguments.num_epochs),
        num_epochs=arguments.num_rounds * arguments.num_epochs,
        eval_fn=evaluate,
        eval_every_steps=6 * round_steps,
        log_every_steps=round_steps,
        **script.fit_options(),
    )

    draw = np.random.default_rng(arguments.seed).integers
    learned = result.metrics["mean_return"]
    at_random = mean_return(lambda seen, t: {"action": draw(2, size=NUM_TEST_EPISODES)})
    script.metrics(mean_return=learned, mean_return_at_random=at_random)
    print(f"mean return {learned:.1f} of at most {MAX_RETURN}.0; {at_random:.1f} of random actions")

    arguments.params.mkdir(parents=True, exist_ok=True)
    arrays = flatten_dict(jax.tree.map(np.asarray, trainer.state["params"]), sep=".")
    np.savez(arguments.params / "params.npz", **arrays)


if __name__ == "__main__":
    main()
