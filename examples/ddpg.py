"""DDPG on Pendulum: a swing-up learned from replayed steps, by actor, critic and their targets.

    redco-flow run pipelines/ddpg.yaml                 # as a stage: tracked, tried again, resumed
    python examples/ddpg.py --num_rounds 5             # by hand: everything below out/

Lillicrap et al. 2016, algorithm 1, in rounds: an episode in each of several environments, with
noise for exploration, then updates on steps drawn from the replay buffer. The buffer is the carry
that goes from round to round, and into checkpoints.
"""

import argparse
from functools import partial
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
TARGET_RATE = 0.01
REWARD_SCALE = 0.1  # values of hundreds would be learned slowly
MAX_TORQUE = 2.0
NUM_STEPS = 200  # of every episode of Pendulum-v1
NOISE = 0.2  # standard deviation of what is added to torques
BUFFER_SIZE = 20_000
BATCH_SIZE, WIDTH = 128, 64
NUM_TEST_EPISODES, TEST_SEED = 32, 1_000_000


class ActorCritic(nn.Module):
    """Torques (B, 1) for observations (B, 3), and values (B, 1) of both."""

    def setup(self):
        def network():
            hidden = [nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH), nn.relu]
            return nn.Sequential([*hidden, nn.Dense(1)])

        self.actor, self.critic = network(), network()

    def act(self, observation):
        return MAX_TORQUE * nn.tanh(self.actor(observation))

    def judge(self, observation, action):
        return self.critic(jnp.concatenate([observation, action], axis=1))

    def __call__(self, observation):
        return self.judge(observation, self.act(observation))


MODEL = ActorCritic()
act, judge = (partial(MODEL.apply, method=method) for method in ("act", "judge"))


def with_targets(optimizer, rate):
    """An optimizer of the online networks, which their targets follow at a rate."""

    def online(tree):
        return {"online": tree["online"]}

    def update(gradients, state, params):
        updates, state = optimizer.update(online(gradients), state, online(params))
        moved = optax.apply_updates(params["online"], updates["online"])
        steps = jax.tree.map(lambda new, old: rate * (new - old), moved, params["target"])
        return {**updates, "target": steps}, state

    return optax.GradientTransformation(lambda params: optimizer.init(online(params)), update)


def loss_fn(params, batch, rngs, is_training):
    """The critic's squared error, minus the value that the critic gives to the actor's torque."""
    online, target = params["online"], jax.lax.stop_gradient(params["target"])
    later = judge(target, batch["after"], act(target, batch["after"]))
    wanted = batch["reward"][:, None] + DISCOUNT * later
    error = (judge(online, batch["observation"], batch["action"]) - wanted) ** 2
    # The value has gradients for the actor alone.
    critic = jax.lax.stop_gradient(online)
    value = judge(critic, batch["observation"], act(online, batch["observation"]))
    losses = (error - value)[:, 0]
    return losses, jnp.ones_like(losses), {"critic_loss": error[:, 0], "value": value[:, 0]}


def pred_fn(params, batch, rngs):
    return act(params["online"], batch["observation"])


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def collate_fn(steps):
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def empty_buffer(size):
    shapes = {"observation": (3,), "action": (1,), "reward": (), "after": (3,)}
    columns = {name: np.zeros((size, *shape), np.float32) for name, shape in shapes.items()}
    return {"columns": columns, "num_seen": np.int64(0)}


def random_torques(rng, count):
    return rng.uniform(-MAX_TORQUE, MAX_TORQUE, (count, 1)).astype(np.float32)


def play(num_envs, choose, seed):
    """Yield the steps of one episode in each environment, the torques being chosen."""
    envs = gymnasium.make_vec("Pendulum-v1", num_envs, vectorization_mode="sync")
    observation, _ = envs.reset(seed=seed)
    for _ in range(NUM_STEPS):
        action = choose({"observation": observation})
        after, reward, _, _, _ = envs.step(action)
        yield {"observation": observation, "action": action, "reward": reward, "after": after}
        observation = after


def mean_return(choose):
    return float(np.mean(sum(s["reward"] for s in play(NUM_TEST_EPISODES, choose, TEST_SEED))))


def make_collect(predictor, num_envs, num_examples, seed):
    """Collect a round: an episode in each environment, then examples from all that is kept."""

    def collect(params, number, carry):
        rng, policy = np.random.default_rng([seed, number]), predictor.bind(params)

        def explore(seen):
            if number == 0:
                return random_torques(rng, num_envs)
            torques = policy(seen)
            torques += rng.normal(scale=NOISE, size=torques.shape).astype(np.float32)
            return np.clip(torques, -MAX_TORQUE, MAX_TORQUE)

        columns, num_seen = carry["columns"], carry["num_seen"]
        # A round's places in the ring are overwritten; a checkpoint has a copy.
        for step in play(num_envs, explore, 10_000 * seed + number):
            step["reward"] *= REWARD_SCALE
            for name, values in step.items():
                columns[name][(num_seen + np.arange(num_envs)) % BUFFER_SIZE] = values
            num_seen += num_envs
        places = rng.integers(min(num_seen, BUFFER_SIZE), size=num_examples)
        drawn = {name: column[places] for name, column in columns.items()}
        return rows_of(drawn), {"columns": columns, "num_seen": num_seen}

    return collect


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_rounds", type=int, default=15)
    parser.add_argument("--num_updates", type=int, default=400, help="of a round")
    parser.add_argument("--num_envs", type=int, default=4, help="each plays an episode a round")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    script = script_context()
    batch = empty_buffer(2)["columns"]
    online = jax.jit(MODEL.init)(jax.random.key(arguments.seed), batch["observation"])
    params = {"online": online, "target": online}
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    rules = deployer.get_sharding_rules(params, loss_fn, batch, None, False)
    common = {"deployer": deployer, "collate_fn": collate_fn, "sharding_rules": rules}
    optimizer = with_targets(optax.adam(arguments.learning_rate), TARGET_RATE)
    trained = {"loss_fn": loss_fn, "params": params, "optimizer": optimizer}
    trainer = Trainer(global_batch_size=BATCH_SIZE, **trained, **common)
    predictor = Predictor(pred_fn=pred_fn, batch_size=NUM_TEST_EPISODES, **common)

    def evaluate(params, step):
        return {"mean_return": mean_return(predictor.bind(params))}

    num_examples = arguments.num_updates * BATCH_SIZE
    collect = make_collect(predictor, arguments.num_envs, num_examples, arguments.seed)
    rounds = Rounds(collect, num_examples, carry=empty_buffer(BUFFER_SIZE))
    options = {"eval_every_steps": 5 * arguments.num_updates, "log_every_steps": 100}
    options |= {"num_epochs": arguments.num_rounds, **script.fit_options()}
    result = trainer.fit(rounds, eval_fn=evaluate, **options)

    rng = np.random.default_rng(arguments.seed)
    learned = result.metrics["mean_return"]
    at_random = mean_return(lambda seen: random_torques(rng, NUM_TEST_EPISODES))
    script.metrics(mean_return=learned, mean_return_at_random=at_random)
    print(f"mean return {learned:.1f}; {at_random:.1f} of random torques")

    arguments.params.mkdir(parents=True, exist_ok=True)
    arrays = flatten_dict(jax.tree.map(np.asarray, trainer.state["params"]), sep=".")
    np.savez(arguments.params / "params.npz", **arrays)


if __name__ == "__main__":
    main()
