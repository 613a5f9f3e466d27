"""The scripts in examples/: what each learns, and that shards change nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_scripts import assert_close, load_example, run_by_hand

pytestmark = pytest.mark.slow


def test_maml_adapts_to_new_curves(tmp_path):
    said = run_by_hand("maml.py", tmp_path / "out", "--num_epochs", "1")

    adapted, before, baseline = map(float, re.findall(r"\d+\.\d+", said))
    assert adapted < 0.4 * baseline
    assert adapted < 0.5 * before
    # Of predicting 0: half the mean square of an amplitude, uniform between 0.1 and 5.
    assert baseline == pytest.approx((5**3 - 0.1**3) / 4.9 / 3 / 2, rel=0.05)


def test_fedavg_learns_all_digits_the_same_over_two_model_shards(run_over):
    (accuracy, centralised, majority), params = run_over("fedavg.py", 1, num_epochs=3)
    (same, _, _), sharded = run_over("fedavg.py", 2, num_epochs=3)

    assert majority < 0.15 < 0.6 < accuracy < centralised
    assert same == pytest.approx(accuracy, abs=0.01)
    assert_close(sharded, params, atol=1e-4)


def test_a_round_of_fedavg_is_the_average_of_models_trained_one_after_the_other():
    """Clients with one batch each, whose order decides nothing; the average is by images."""
    fedavg = load_example("fedavg")
    model = fedavg.Classifier(width=8)
    image_losses = fedavg.make_image_losses(model)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 64)))["params"]
    images, _ = fedavg.load_images(seed=0)
    clients = [images[:16], images[16:21]]

    differentiate = jax.jit(jax.grad(lambda p, batch: image_losses(p, batch).mean()))

    def trained_alone(client):
        batch, mine = fedavg.collate_images(client), params
        for _ in range(3):
            gradients = differentiate(mine, batch)
            mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, gradients)
        return mine

    expected = jax.tree.map(lambda a, b: (16 * a + 5 * b) / 21, *map(trained_alone, clients))

    round_loss = fedavg.make_round_loss_fn(image_losses, num_local_epochs=3, rate=0.1)
    batch = fedavg.make_collate_clients(num_places=16)(clients)

    def mean_loss(params):
        totals, weights = round_loss(params, batch, jax.random.split(jax.random.key(1), 2), True)
        return jnp.sum(totals) / jnp.sum(weights)

    found = jax.tree.map(jnp.subtract, params, jax.jit(jax.grad(mean_loss))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_maml_tells_new_characters_apart(run_over):
    (found, before, _, chance), _ = run_over("maml_glyphs.py", 1, num_tasks=640, num_epochs=1)

    assert chance == 0.2
    assert before == pytest.approx(chance, abs=0.03)
    assert found > 0.27


def test_a_task_of_maml_has_no_font_in_support_and_query():
    """Each image is of one font, told by its grey; shifts leave it alone."""
    maml = load_example("maml_glyphs")
    characters = [[np.full((16, 16), 10 * c + f, np.uint8) for f in range(4)] for c in range(6)]

    collate_fn = maml.make_collate_fn(characters, num_ways=5, num_shots=1)
    batch = collate_fn([7, 8])

    for name, values in collate_fn([7, 8]).items():  # the same after a stop
        np.testing.assert_array_equal(values, batch[name])
    assert batch["support"].shape == (2, 5, 256)
    assert batch["query"].shape == (2, 15, 256)
    support, query = (np.round((batch[name][..., 0] + 0.15) * 255) for name in ("support", "query"))
    for task in range(2):
        assert len({*support[task], *query[task]}) == 20
        np.testing.assert_array_equal(query[task] // 10, np.repeat(support[task] // 10, 3))
    np.testing.assert_array_equal(batch["query_labels"][0], np.repeat(np.arange(5), 3))
