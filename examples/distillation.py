"""Knowledge distillation on scikit-learn's digits: a small student learns from a teacher's answers.

    redco-flow run pipelines/distillation.yaml             # two stages, tracked and resumed
    python examples/distillation.py                        # by hand, the teacher, into out/params
    python examples/distillation.py --teacher out/params   # and its student

Hinton, Vinyals and Dean 2015, sections 2 and 5.1: the teacher is trained on all images; the student
sees few of them, and matches the teacher's probabilities at a high temperature. The same student,
trained on the labels of the same images alone, stands beside it.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from sklearn.datasets import load_digits

from redco_flow import Deployer, Predictor, Trainer, script_context

NUM_TEST = 360
BATCH_SIZE = 16


class Teacher(nn.Module):
    """Logits (images, 10) of pixels (images, 64); 85,000 parameters."""

    @nn.compact
    def __call__(self, pixels):
        x = pixels.reshape(-1, 8, 8, 1)
        for width, stride in ((32, 1), (64, 2)):
            x = nn.relu(nn.Conv(width, (3, 3), strides=stride)(x))
        x = nn.relu(nn.Dense(width)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Student(nn.Module):
    """Logits (images, 10) of pixels (images, 64); 1,210 parameters with a width of 16."""

    width: int

    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(pixels)))


def load_images():
    """Training and test images, always the same: rows of {pixels, label}."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = [{"pixels": digits.data[i] / 16, "label": digits.target[i]} for i in order]
    return images[NUM_TEST:], images[:NUM_TEST]


def collate_images(images):
    batch = {"label": np.array([image["label"] for image in images], np.int32)}
    for name in images[0].keys() - {"label"}:
        batch[name] = np.stack([image[name] for image in images]).astype(np.float32)
    return batch


def make_label_losses(model):
    def label_losses(params, batch):
        logits = model.apply({"params": params}, batch["pixels"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    return label_losses


def make_distillation_losses(model, temperature, label_weight):
    """Cross-entropy with the teacher's softened probabilities, and with the labels.

    The first is scaled by the temperature's square, which keeps its gradients' size (section 2).
    """
    label_losses = make_label_losses(model)

    def losses(params, batch):
        logits = model.apply({"params": params}, batch["pixels"]) / temperature
        targets = jax.nn.softmax(batch["teacher_logits"] / temperature)
        soft = temperature**2 * optax.softmax_cross_entropy(logits, targets)
        return (1 - label_weight) * soft + label_weight * label_losses(params, batch)

    return losses


class Classifying:
    """A model on the devices: how it is trained, and what it says."""

    def __init__(self, deployer, model, learning_rate):
        self.deployer, self.model, self.learning_rate = deployer, model, learning_rate
        key, pixels = jax.random.key(deployer.seed), np.zeros((1, 64), np.float32)
        self.params = model.init(key, pixels)["params"]
        apply = self.logits = lambda params, batch: model.apply({"params": params}, batch["pixels"])
        self.rules = deployer.get_sharding_rules(self.params, apply, {"pixels": pixels})

    def trainer(self, image_losses):
        """One that begins at the same parameters whatever the losses."""
        return Trainer(
            self.deployer,
            collate_fn=collate_images,
            loss_fn=lambda params, batch, *_: image_losses(params, batch).mean(),
            params=self.params,
            optimizer=optax.adam(self.learning_rate),
            sharding_rules=self.rules,
            global_batch_size=BATCH_SIZE,
        )

    def predict(self, images, params):
        """Logits (images, 10)."""
        predictor = Predictor(
            self.deployer,
            collate_fn=collate_images,
            pred_fn=lambda params, batch, rngs: self.logits(params, batch),
            sharding_rules=self.rules,
            batch_size=120,
        )
        return np.stack(predictor.predict(images, params))

    def accuracy(self, images, params):
        found = np.argmax(self.predict(images, params), axis=-1)
        return float(np.mean(found == [image["label"] for image in images]))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, help="its parameters; none: train the teacher")
    parser.add_argument("--num_images", type=int, help="to train on; all by default")
    parser.add_argument("--temperature", type=float, default=8.0)
    parser.add_argument("--label_weight", type=float, default=0.1, help="the rest is the teacher's")
    parser.add_argument("--width", type=int, default=16, help="of the student")
    parser.add_argument("--num_epochs", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_model_shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=Path, default="out/params")
    return parser.parse_args()


def train_teacher(teacher, train, test, fit, script):
    """Train on the labels; return the parameters."""
    trainer = teacher.trainer(make_label_losses(teacher.model))
    trainer.fit(train, **fit, **script.fit_options())
    accuracy = teacher.accuracy(test, trainer.state["params"])
    script.metrics(accuracy=accuracy)
    print(f"accuracy {accuracy:.3f} of the teacher; ", end="")
    return trainer.state["params"]


def train_student(student, losses, train, test, fit, script):
    """Train on the teacher's answers, and beside it on the labels alone; return the parameters."""
    trainer = student.trainer(losses)
    trainer.fit(train, **fit, **script.fit_options())
    alone = student.trainer(make_label_losses(student.model))
    alone.fit(train, **fit)
    accuracy = student.accuracy(test, trainer.state["params"])
    on_labels = student.accuracy(test, alone.state["params"])
    script.metrics(accuracy=accuracy, accuracy_on_labels_alone=on_labels)
    print(f"accuracy {accuracy:.3f} of the student, {on_labels:.3f} of one trained on ", end="")
    print(f"the labels of the same {len(train)} images; ", end="")
    return trainer.state["params"]


def main():
    arguments = parse_arguments()
    script = script_context()
    images, test = load_images()
    chosen = np.random.default_rng(arguments.seed).permutation(len(images))
    train = [images[i] for i in chosen[: arguments.num_images]]
    # An epoch of few images is a few steps, too few for a checkpoint.
    fit = {"num_epochs": arguments.num_epochs, "log_every_steps": 100, "save_every_epochs": 50}
    deployer = Deployer(arguments.num_model_shards, seed=arguments.seed)
    teacher = Classifying(deployer, Teacher(), arguments.learning_rate)
    if arguments.teacher is None:
        params = train_teacher(teacher, train, test, fit, script)
    else:
        known = unflatten_dict(dict(np.load(arguments.teacher / "params.npz")), sep=".")
        answers = teacher.predict(train, known)
        train = [{**row, "teacher_logits": x} for row, x in zip(train, answers, strict=True)]
        student = Classifying(deployer, Student(arguments.width), arguments.learning_rate)
        weights = arguments.temperature, arguments.label_weight
        losses = make_distillation_losses(student.model, *weights)
        of_teacher = teacher.accuracy(test, known)
        params = train_student(student, losses, train, test, fit, script)
        script.metrics(accuracy_of_teacher=of_teacher)
        print(f"{of_teacher:.3f} of the teacher, ", end="")
    commonest = np.bincount([image["label"] for image in images]).argmax()
    majority = float(np.mean([image["label"] == commonest for image in test]))
    script.metrics(accuracy_of_majority=majority)
    print(f"{majority:.3f} of the commonest digit")

    arguments.params.mkdir(parents=True, exist_ok=True)
    arrays = jax.tree.map(np.asarray, flatten_dict(params, sep="."))
    np.savez(arguments.params / "params.npz", **arrays)


if __name__ == "__main__":
    main()
