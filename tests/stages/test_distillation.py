"""examples/distillation.py: the loss, and a student that learns more from answers than labels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_scripts import PROJECT, load_example
from scipy.special import log_softmax, softmax
from stage_kinds import script

pytestmark = pytest.mark.slow

PATH = str(PROJECT / "examples" / "distillation.py")
STUDENT = {"num_images": 64, "num_epochs": 60, "learning_rate": 5e-3}


def distill(bench, teacher=None, **arguments):
    """Run the script as a stage; return what it made."""
    given = {} if teacher is None else {"teacher": [teacher["params"]]}
    settings = {"path": PATH, "arguments": arguments, "outputs": ["params"]}
    return bench.run(script, settings, given)


def test_a_student_learns_more_from_the_teachers_answers_than_from_labels(bench, capsys):
    def accuracies():
        return [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out)]

    teacher = distill(bench, num_epochs=3)
    accuracy, majority = accuracies()
    distill(bench, teacher, **STUDENT)

    distilled, on_labels, of_teacher, _ = accuracies()
    assert majority < 0.15 < 0.85 < accuracy
    assert of_teacher == pytest.approx(accuracy)
    assert on_labels + 0.04 < distilled < accuracy


def test_the_loss_is_hintons_with_gradients_that_the_temperature_leaves_their_size():
    distillation = load_example("distillation")
    model = distillation.Student(width=8)
    batch = distillation.collate_images(distillation.load_images()[0][:6])
    params = model.init(jax.random.key(0), batch["pixels"])["params"]
    teacher = np.random.default_rng(0).normal(0, 3, (6, 10)).astype(np.float32)
    batch["teacher_logits"] = teacher

    losses = distillation.make_distillation_losses(model, temperature=4.0, label_weight=0.25)
    found = losses(params, batch)

    logits = np.asarray(model.apply({"params": params}, batch["pixels"]), np.float64)
    soft = -np.sum(softmax(teacher / 4.0, axis=-1) * log_softmax(logits / 4.0, axis=-1), axis=-1)
    hard = -log_softmax(logits, axis=-1)[np.arange(6), batch["label"]]
    np.testing.assert_allclose(found, 0.75 * 16 * soft + 0.25 * hard, rtol=1e-5)


def test_at_a_high_temperature_the_student_matches_the_teachers_centred_logits():
    """Hinton et al. 2015, equation 4: the gradient is (z - v) / (N T²), with T² taken out here."""
    distillation = load_example("distillation")
    rng = np.random.default_rng(1)
    z, v = (rng.normal(size=(1, 10)).astype(np.float32) for _ in range(2))
    z, v = z - z.mean(), v - v.mean()

    class Logits:
        def apply(self, variables, pixels):
            return variables["params"]

    losses = distillation.make_distillation_losses(Logits(), temperature=100.0, label_weight=0.0)
    batch = {"pixels": z, "label": np.zeros(1, np.int32), "teacher_logits": v}
    gradient = jax.grad(lambda z: jnp.sum(losses(z, batch)))(z)

    np.testing.assert_allclose(gradient, (z - v) / 10, atol=0.01)
