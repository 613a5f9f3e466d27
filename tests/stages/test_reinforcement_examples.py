"""The examples that collect what they train on: their formulas, and what PPO learns.

DDPG and GRPO after a stop: `tests/stages/test_resumed_examples.py`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_scripts import load_example, run_by_hand

pytest.importorskip("gymnasium", reason="install gymnasium")


@pytest.fixture(scope="module")
def ppo():
    return load_example("ppo")


@pytest.fixture(scope="module")
def ddpg():
    return load_example("ddpg")


@pytest.fixture(scope="module")
def grpo():
    return load_example("grpo")


def numbers_in(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


@pytest.mark.slow
def test_ppo_learns_to_balance_the_pole(tmp_path):
    said = run_by_hand("ppo.py", tmp_path / "out", "--num_rounds", "5", "--num_model_shards", "2")

    learned, most, at_random = numbers_in(said)
    assert most == 500
    assert 15 < at_random < 40
    assert learned > 4 * at_random


def test_advantages_are_sums_of_discounted_errors_up_to_an_episodes_end(ppo):
    """Schulman et al. 2016, equation 16, with each sum written out."""
    rng = np.random.default_rng(0)
    num_steps, num_envs = 7, 3
    reward, value = (
        rng.normal(size=(num_steps, num_envs)),
        rng.normal(size=(num_steps + 1, num_envs)),
    )
    fell, cut = rng.random((2, num_steps, num_envs)) < 0.2
    ended = fell | cut
    assert (fell.any(), (cut & ~fell).any()) == (True, True)

    found = ppo.estimate_advantages(reward, value, fell, ended)

    for env in range(num_envs):
        for start in range(num_steps):
            expected = 0.0
            for t in range(start, num_steps):
                later = 0.0 if fell[t, env] else 0.99 * value[t + 1, env]
                expected += (0.99 * 0.95) ** (t - start) * (reward[t, env] + later - value[t, env])
                if ended[t, env]:
                    break
            assert found[start, env] == pytest.approx(expected, abs=1e-12)


def test_steps_that_only_begin_an_episode_weigh_nothing(ppo):
    """gymnasium's vector environments ignore the action after an episode's end."""
    always_left = lambda seen, t: {"action": np.zeros(4, np.int64)}  # noqa: E731
    steps = list(ppo.play(always_left, 4, 30, seed=0))

    ended = np.stack([step["ended"] for step in steps])
    weight = np.stack([step["weight"] for step in steps])
    reward = np.stack([step["reward"] for step in steps])
    assert ended.any()
    np.testing.assert_array_equal(weight[1:], ~ended[:-1])
    np.testing.assert_array_equal(reward, weight)


def test_targets_follow_their_networks_at_a_rate(ddpg):
    optimizer = ddpg.with_targets(optax.sgd(0.5), rate=0.1)
    params = {"online": jnp.array([1.0, 2.0]), "target": jnp.array([0.0, 4.0])}
    gradients = {"online": jnp.array([2.0, -2.0]), "target": jnp.zeros(2)}

    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    found = optax.apply_updates(params, updates)

    np.testing.assert_allclose(found["online"], [0.0, 3.0])
    np.testing.assert_allclose(found["target"], [0.0, 0.9 * 4.0 + 0.1 * 3.0], rtol=1e-6)


def test_the_actor_and_the_critic_of_ddpg_have_no_gradients_of_each_other(ddpg):
    """The actor's are those of the mean value alone, the critic's of the mean squared error."""
    rng = np.random.default_rng(1)
    batch = {
        name: rng.normal(size=(5, *shape)).astype(np.float32)
        for name, shape in {
            "observation": (3,),
            "action": (1,),
            "reward": (),
            "after": (3,),
        }.items()
    }
    online = jax.jit(ddpg.MODEL.init)(jax.random.key(0), batch["observation"])
    params = {"online": online, "target": jax.tree.map(lambda x: x * 0.9, online)}

    def mean_value(online):
        return ddpg.judge(
            online, batch["observation"], ddpg.act(online, batch["observation"])
        ).mean()

    def mean_error(online):
        later = ddpg.act(params["target"], batch["after"])
        wanted = batch["reward"] + 0.99 * ddpg.judge(params["target"], batch["after"], later)[:, 0]
        return (
            (ddpg.judge(online, batch["observation"], batch["action"])[:, 0] - wanted) ** 2
        ).mean()

    def loss(params):
        return ddpg.loss_fn(params, batch, None, True)[0].mean()

    found = jax.jit(jax.grad(loss))(params)

    actor = jax.jit(jax.grad(mean_value))(online)["params"]["actor"]
    actor = jax.tree.map(jnp.negative, actor)
    critic = jax.jit(jax.grad(mean_error))(online)["params"]["critic"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        found["online"]["params"],
        {"actor": actor, "critic": critic},
    )
    assert not any(map(np.any, jax.tree.leaves(found["target"])))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("07+25=230", 1), ("99+99=891", 1), ("07+25=032", 0), ("07+25=2=0", 0), ("07+25=23+", 0)],
)
def test_the_rule_rewards_right_sums_alone(grpo, text, expected):
    (ids,) = grpo.collate_texts([text])["ids"]

    assert grpo.reward(ids) == expected


def test_the_loss_of_grpo_is_the_papers(grpo):
    """Shao et al. 2024, equations 3 and 4, in NumPy: a ratio inside, above and below the clip."""
    ids = grpo.collate_texts(["07+25=230", "11+11=220", "50+50=100"])["ids"]
    params = jax.jit(grpo.MODEL.init)(jax.random.key(0), ids)
    log_probs = np.asarray(jax.jit(grpo.score)(params, {"ids": ids}), np.float64)
    batch = {
        "ids": ids,
        "log_probs": np.float32(log_probs + np.array([[0.0], [-0.5], [0.5]])),
        "reference": np.float32(log_probs + np.array([0.3, 0.0, -0.2])),
        "advantage": np.float32([1.5, 1.0, -1.0]),
        "reward": np.float32([1, 1, 0]),
    }

    losses, weights, measures = jax.jit(grpo.loss_fn)(params, batch, None, True)

    apart = np.array([0.3, 0.0, -0.2])
    kl = np.mean(np.exp(apart) - apart - 1)
    gains = np.array([1.5, 1.2, -0.8])  # of ratios 1, exp(0.5) and exp(-0.5)
    np.testing.assert_allclose(losses, grpo.KL_WEIGHT * kl - gains, atol=1e-5)
    np.testing.assert_allclose(measures["kl"], np.full(3, kl), atol=1e-5)
    np.testing.assert_array_equal(weights, np.ones(3))
